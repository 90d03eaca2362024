"""The trainer's GPT-2 against a NumPy GPT-2, and its two ways through the layers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.nanogpt import model, optimizers, sample

TINY = model.GPTConfig(layers=3, heads=2, width=16, context=12, vocab_size=100)


logits = jax.jit(model.logits, static_argnums=0)
loss = jax.jit(model.loss, static_argnums=0)
loss_and_grads = jax.jit(jax.value_and_grad(model.loss, argnums=1), static_argnums=0)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """These programs run for milliseconds and compile for seconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def random_params(config: model.GPTConfig):
    """The definition and parameters with no zeros or ones, so that every one of them counts."""
    graphdef, shapes = model.define(config)
    draw = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: 0.3 * draw.normal(size=leaf.shape) + 0.1, shapes)
    return graphdef, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def numpy_gpt2(params, tokens, config: model.GPTConfig):
    """GPT-2's logits in float64, one sequence, one layer, one head at a time."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, weights):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * weights["scale"] + weights.get("bias", 0)

    def linear(x, weights):
        return x @ weights["kernel"] + weights.get("bias", 0)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    logits = []
    for sequence in np.asarray(tokens):
        embedding = params["token_embedding"]["embedding"]
        x = embedding[sequence] + params["position_embedding"]["embedding"][: len(sequence)]
        for index in range(config.layers):
            block = jax.tree.map(lambda leaf, i=index: leaf[i], params["blocks"])
            q, k, v = np.split(
                linear(norm(x, block["attention_norm"]), block["attention_in"]), 3, axis=-1
            )
            heads = []
            for q_h, k_h, v_h in zip(
                *(np.split(a, config.heads, axis=-1) for a in (q, k, v)), strict=True
            ):
                scores = q_h @ k_h.T / math.sqrt(q_h.shape[-1])
                scores /= index + 1 if config.scale_by_layer else 1
                scores[np.triu_indices(len(sequence), 1)] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                heads.append(weights / weights.sum(-1, keepdims=True) @ v_h)
            x = x + linear(np.concatenate(heads, -1), block["attention_out"])
            x = x + linear(
                gelu(linear(norm(x, block["mlp_norm"]), block["mlp_in"])), block["mlp_out"]
            )
        logits.append(norm(x, params["final_norm"]) @ embedding.T)
    return np.stack(logits)


@pytest.mark.parametrize(
    ("bias", "scale_by_layer", "unroll", "attention"),
    [
        (True, False, False, "einsum"),
        (True, True, False, "xla"),
        (False, True, True, "einsum"),
        (False, False, True, "xla"),
    ],
)
def test_logits_are_gpt2s(bias, scale_by_layer, unroll, attention):
    config = dataclasses.replace(
        TINY, bias=bias, scale_by_layer=scale_by_layer, unroll=unroll, attention=attention
    )
    graphdef, params = random_params(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12))
    expected = numpy_gpt2(params, tokens, config)
    np.testing.assert_allclose(logits(graphdef, params, tokens), expected, rtol=1e-4, atol=1e-4)


def test_shorter_sequences_use_the_first_positions():
    graphdef, params = random_params(TINY)
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 12))
    whole, part = logits(graphdef, params, tokens), logits(graphdef, params, tokens[:, :5])
    np.testing.assert_allclose(whole[:, :5], part, rtol=1e-5, atol=1e-5)


SCAN_AND_UNROLL = [
    dataclasses.replace(TINY, layers=2, unroll=unroll, dropout=0.2) for unroll in (False, True)
]


def test_scan_equals_unroll_in_loss_and_gradients():
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, TINY.vocab_size)
    results = []
    for config in SCAN_AND_UNROLL:
        graphdef, params = random_params(config)
        results.append(loss_and_grads(graphdef, params, tokens, jax.random.key(1)))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [n for n in optimizers.NAMES if n.startswith("mars_")])
def test_scan_equals_unroll_with_the_optimizers_state(optimizer):
    rate = optimizers.schedule("constant", 1e-3, 10, 0, 0.0)
    tx = optimizers.build(optimizer, rate, rate, weight_decay=0.1, gamma=0.025, steps=10)
    update = jax.jit(tx.update)
    results = []
    for config in SCAN_AND_UNROLL:
        graphdef, params = random_params(config)
        state = tx.init(params)
        for key in jax.random.split(jax.random.key(0), 3):
            tokens = jax.random.randint(key, (2, 13), 0, TINY.vocab_size)
            _, grads = loss_and_grads(graphdef, params, tokens, key)
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        results.append((params, state))
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def equations(jaxpr):
    """Every equation of a program, those of its loops and of other inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = value if hasattr(value, "eqns") else getattr(value, "jaxpr", None)
            if inner is not None:
                yield from equations(inner)


def program(config, tokens, key=None):
    """The equations of loss and gradient."""
    graphdef, params = random_params(config)
    function = jax.value_and_grad(lambda params: model.loss(graphdef, params, tokens, key))
    return list(equations(jax.make_jaxpr(function)(params).jaxpr))


@pytest.mark.parametrize("unroll", [False, True])
def test_remat_changes_no_numbers_but_keeps_less(unroll):
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, TINY.vocab_size)
    key = jax.random.key(1)
    results, widest = [], []
    for remat in (False, True):
        config = dataclasses.replace(TINY, remat=remat, unroll=unroll, dropout=0.2, layers=2)
        graphdef, params = random_params(config)
        results.append(loss_and_grads(graphdef, params, tokens, key))
        # What the forward loop hands to the backward one, stacked over layers.
        loops = [e for e in program(config, tokens, key) if e.primitive.name == "scan"]
        shapes = [v.aval.shape for e in loops for v in e.outvars]
        widest.append(max((s[-1] for s in shapes if len(s) == 4 and s[0] == 2), default=0))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    if not unroll:
        assert widest == [64, 16]  # without the feed-forward network's 4 D


def test_a_chunked_loss_is_the_loss_without_its_logits():
    whole = dataclasses.replace(TINY, layers=1)
    chunked = dataclasses.replace(whole, loss_chunk=3)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, TINY.vocab_size)
    results, longest = [], []
    for config in (whole, chunked):
        graphdef, params = random_params(config)
        results.append(loss_and_grads(graphdef, params, tokens))
        logits = [
            v.aval.size
            for e in program(config, tokens)
            for v in e.outvars
            if v.aval.shape[-1:] == (128,) and v.aval.shape[:-1] != ()
        ]
        longest.append(max(logits))
    assert longest == [2 * 12 * 128, 2 * 3 * 128]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    for one, other in zip(*(jax.tree.leaves(r[1]) for r in results), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    for _, grads in results:  # what pads the vocabulary is no token that could be predicted
        assert not grads["token_embedding"]["embedding"][TINY.vocab_size :].any()
    with pytest.raises(ValueError, match="context 12 is not a multiple of loss_chunk 5: change"):
        dataclasses.replace(TINY, loss_chunk=5)
    with pytest.raises(ValueError, match="10 positions are not a multiple of loss_chunk 3"):
        loss(graphdef, params, tokens[:, :11])


def test_the_loss_is_over_tokens_that_occur():
    graphdef, params = random_params(TINY)
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 13))
    rows = numpy_gpt2(params, tokens[:, :-1], TINY)[..., : TINY.vocab_size]  # of 128
    chosen = np.take_along_axis(rows, tokens[:, 1:, None], -1)[..., 0]
    expected = (np.log(np.exp(rows).sum(-1)) - chosen).mean()
    assert loss(graphdef, params, tokens) == pytest.approx(expected, rel=1e-5)


def test_bfloat16_is_for_products_and_nothing_that_needs_more():
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, TINY.vocab_size)
    config = dataclasses.replace(TINY, dtype="bfloat16", loss_chunk=4, remat=True, layers=1)
    seen: dict[str, set[str]] = {}
    for equation in program(config, tokens):
        dtypes = {str(v.aval.dtype) for v in equation.invars if v.aval.ndim > 1}
        seen.setdefault(equation.primitive.name, set()).update(dtypes)
    for name in ("exp", "log", "rsqrt", "reduce_max", "reduce_sum", "scatter-add"):
        assert seen[name] <= {"float32", "int32", "uint32", "bool"}, name
    assert "float32" in seen["exp"] and "bfloat16" in seen["dot_general"]


def test_initial_weights_and_loss():
    config = model.GPTConfig(layers=8, heads=4, width=128, context=64, vocab_size=256)
    (graphdef, _), params = model.define(config), model.init(config, 0)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert all(leaf.shape[0] == 8 for leaf in jax.tree.leaves(params["blocks"]))
    blocks = params["blocks"]
    assert np.std(blocks["mlp_in"]["kernel"]) == pytest.approx(0.02, rel=0.02)
    assert np.std(blocks["mlp_out"]["kernel"]) == pytest.approx(0.02 / 4, rel=0.02)
    assert np.std(blocks["attention_out"]["kernel"]) == pytest.approx(0.02 / 4, rel=0.02)
    kernels = blocks["mlp_in"]["kernel"]
    assert not np.allclose(kernels[0], kernels[1])  # layers are drawn apart
    tokens = jax.random.randint(jax.random.key(0), (4, 65), 0, 256)
    assert loss(graphdef, params, tokens) == pytest.approx(math.log(256), abs=0.05)


def test_presets_have_gpt2s_sizes():
    for preset, millions in {"small": 124, "medium": 355, "large": 774, "xl": 1558}.items():
        config = dataclasses.replace(model.PRESETS[preset], bias=True)
        assert config.padded_vocab == 50304
        _, shapes = model.define(config)
        padding = (config.padded_vocab - config.vocab_size) * config.width
        assert (model.count(shapes) - padding) / 1e6 == pytest.approx(millions, abs=0.6)


def test_attention_is_causal():
    graphdef, params = random_params(TINY)
    tokens = jax.random.randint(jax.random.key(0), (1, 12), 0, TINY.vocab_size)
    changed = tokens.at[0, 7].set((tokens[0, 7] + 1) % TINY.vocab_size)
    one, other = (logits(graphdef, params, t)[0] for t in (tokens, changed))
    np.testing.assert_array_equal(one[:7], other[:7])
    assert (np.abs(one[7:] - other[7:]).max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_the_attention_of_cpus_has_the_derivative_of_jaxs(dtype, tolerance):
    """Of which masks, scales and both halves of the queries are parts."""
    q, k, v, dy = (
        jax.random.normal(key, (2, 7, 3, 4)).astype(dtype)
        for key in jax.random.split(jax.random.key(0), 4)
    )

    def gradient(attention):
        config = dataclasses.replace(TINY, attention=attention)
        y, pull = jax.vjp(lambda *x: model.causal_attention(*x, 0.3, config, None), q, k, v)
        return y, *pull(dy)

    for one, other in zip(gradient("einsum"), gradient("xla"), strict=True):
        assert one.dtype == other.dtype == dtype
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


def test_dropout_needs_a_key_and_follows_it():
    graphdef, params = random_params(dataclasses.replace(TINY, dropout=0.5))
    plain, _ = random_params(TINY)
    tokens = jax.random.randint(jax.random.key(0), (1, 12), 0, TINY.vocab_size)
    keys = jax.random.split(jax.random.key(2))
    off = logits(graphdef, params, tokens)
    np.testing.assert_array_equal(off, logits(plain, params, tokens))
    on = logits(graphdef, params, tokens, keys[0])
    np.testing.assert_array_equal(on, logits(graphdef, params, tokens, keys[0]))
    assert np.abs(on - off).max() > 0.1
    assert np.abs(on - logits(graphdef, params, tokens, keys[1])).max() > 0.1


@pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="no float32 products of bfloat16 on old CPU backends"
)
def test_bfloat16_keeps_parameters_and_loss_in_float32():
    graphdef, params = random_params(dataclasses.replace(TINY, dtype="bfloat16"))
    plain, _ = random_params(TINY)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, TINY.vocab_size)
    value, grads = loss_and_grads(graphdef, params, tokens)
    assert value.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((params, grads)))
    assert value == pytest.approx(float(loss(plain, params, tokens)), rel=0.02)


def test_one_batch_is_learnt_by_heart_and_recited():
    config = dataclasses.replace(TINY, width=32, bias=False)
    (graphdef, _), params = model.define(config), model.init(config, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, config.vocab_size)
    optimizer = optax.adam(1e-2)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state):
        value, grads = loss_and_grads(graphdef, params, tokens)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    for _ in range(100):
        params, state, value = step(params, state)
    assert value < 0.05
    prompt = np.asarray(tokens[0, :2])
    text = sample.generate(graphdef, params, config, prompt, 10, temperature=0)
    np.testing.assert_array_equal(text, tokens[0, 2:12])


def test_samples_go_on_beyond_the_context_within_the_vocabulary():
    graphdef, params = random_params(TINY)
    prompt = np.arange(20) % TINY.vocab_size
    text = sample.generate(graphdef, params, TINY, prompt, 30, seed=1, temperature=5.0)
    assert text.shape == (30,) and text.max() < TINY.vocab_size
    again = sample.generate(graphdef, params, TINY, prompt, 30, seed=1, temperature=5.0)
    np.testing.assert_array_equal(text, again)
    with pytest.raises(ValueError, match="prompt is empty"):
        sample.generate(graphdef, params, TINY, np.zeros(0, int), 3)


def test_width_must_be_a_multiple_of_heads():
    with pytest.raises(ValueError, match="width 16 is not a multiple of heads 3"):
        dataclasses.replace(TINY, heads=3)


def test_a_rate_of_dropout_that_is_none():
    with pytest.raises(ValueError, match=r"dropout is 1\.5: use a share"):
        model.GPTConfig(dropout=1.5)
