"""The presets are the settings of the MARS papers; schedules end where they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_nanogpt_train

from examples.nanogpt import model, optimizers
from examples.nanogpt.config import default_config, parse

quick_compilation = test_nanogpt_train.quick_compilation

# Rate, the AdamW fallback's rate, b1, b2, weight decay, for every size.
PUBLISHED = {
    "adamw": ([6e-4, 3e-4, 2e-4], [6e-4, 3e-4, 2e-4], 0.9, 0.95, 0.1),
    "muon": ([2e-2, 1e-2, 6.67e-3], [6e-4, 3e-4, 2e-4], 0.95, None, 0.1),
    "mars_adamw": ([6e-3, 3e-3, 2e-3], [3e-3, 1.5e-3, 1e-3], 0.95, 0.99, 0.01),
    "mars_m": ([6e-3, 5e-3, 5e-3], [6e-3, 5e-3, 5e-3], 0.95, None, 0.1),
}
SIZES = {  # layers, heads, width, minimum rate
    "small": (12, 12, 768, 3e-5),
    "medium": (24, 16, 1024, 6e-5),
    "large": (36, 20, 1280, 1e-5),
    "xl": (48, 25, 1600, 1e-5),
}


@pytest.mark.parametrize("preset", SIZES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_papers_settings(name, preset):
    config = default_config(preset, name)
    layers, heads, width, minimum = SIZES[preset]
    shape = config.model
    assert (shape.layers, shape.heads, shape.width) == (layers, heads, width)
    assert (shape.context, shape.padded_vocab) == (1024, 50304)
    assert not shape.bias and shape.scale_by_layer and shape.dropout == 0
    assert (config.steps, config.batch_size, config.warmup) == (100_000, 480, 2000)
    assert (config.schedule, config.gamma, config.min_rate) == ("cosine", 0.025, minimum)
    assert optimizers.CLIP_NORM == 1.0

    rates, fallbacks, b1, b2, decay = PUBLISHED[name]
    recipe = optimizers.RECIPES[name]
    assert (recipe.b1, config.weight_decay) == (b1, decay)
    assert b2 is None or recipe.b2 == b2
    assert optimizers.FALLBACK_BETAS == (0.9, 0.95)
    if preset == "xl":  # only MARS-M's is published
        assert name != "mars_m" or config.learning_rate == 3e-3
        return
    i = list(SIZES).index(preset)
    assert optimizers.learning_rates(name, preset) == (rates[i], fallbacks[i])
    assert config.learning_rate == rates[i]
    rate, fallback = config.rates()
    for schedule, peak in ((rate, rates[i]), (fallback, fallbacks[i])):
        assert float(schedule(0)) == pytest.approx(peak / 2000, rel=1e-3)  # in float32
        assert float(schedule(2000)) == pytest.approx(peak)
    assert float(rate(100_000)) == pytest.approx(minimum, rel=1e-4)
    # The fallback's rate keeps its proportion to the end.
    assert float(fallback(100_000)) == pytest.approx(minimum * fallbacks[i] / rates[i], rel=1e-4)


def test_the_settings_reach_the_optimizer():
    """The second step of every optimizer, by hand: betas, rates, decay and the fallback's share."""
    shape = model.GPTConfig(layers=1, heads=1, width=8, context=8, vocab_size=128, bias=False)
    _, shapes = model.define(shape)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    scale = 1e-3  # so small that no clip acts
    first, second = (jax.tree.map(lambda p, s=s: s * scale * p, params) for s in (1.0, -0.5))
    rate, fallback = 0.1, 0.05

    def step_of(name):
        config = parse(["--preset", "small", "--optimizer", name])
        tx = optimizers.build(
            name,
            lambda count: rate,
            lambda count: fallback,
            weight_decay=config.weight_decay,
            gamma=config.gamma,
            steps=10,
        )

        @jax.jit
        def two_steps():
            _, state = tx.update(first, tx.init(params), params)
            return tx.update(second, state, params)[0]

        return jax.tree.map(lambda u: float(u.ravel()[0]), two_steps())

    def adam(g1, g2, b1, b2):
        m, v = (1 - b1) * (b1 * g1 + g2), (1 - b2) * (b2 * g1**2 + g2**2)
        return m / (1 - b1**2) / (np.sqrt(v / (1 - b2**2)) + 1e-8)

    g1, g2 = scale, -0.5 * scale
    plain = adam(g1, g2, 0.9, 0.95)
    k = 0.025 * 0.95 / 0.05
    corrected = adam(g1 + k * g1, g2 + k * (g2 - g1), 0.95, 0.99)
    adamw, mars = step_of("adamw"), step_of("mars_adamw")
    for updates, rates in ((adamw, rate), (mars, fallback)):
        assert updates["final_norm"]["scale"] == pytest.approx(-rates * plain, rel=1e-4)
    for path in (("blocks", "mlp_in", "kernel"), ("token_embedding", "embedding")):
        for updates, wanted, decay in ((adamw, plain, 0.1), (mars, corrected, 0.01)):
            for key in path:
                updates = updates[key]
            assert updates == pytest.approx(-rate * (wanted + decay), rel=1e-4), path
    # MARS-M leaves the embedding to the fallback.
    embedding = step_of("mars_m")["token_embedding"]["embedding"]
    assert embedding == pytest.approx(-fallback * (plain + 0.1), rel=1e-4)


def test_newton_schulz_runs_in_the_dtype_of_the_products():
    shape = ["--layers", "1", "--heads", "1", "--width", "64", "--context", "8"]
    draw = np.random.default_rng(0)
    _, shapes = model.define(parse(shape).model)
    params = jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), p.dtype), shapes)

    def program(*flags):
        tx = parse([*shape, *flags]).build_optimizer()
        return str(jax.make_jaxpr(lambda p: tx.update(p, tx.init(p), p)[0])(params))

    for name in ("mars_m", "mars_shampoo"):
        assert "bf16" not in program("--optimizer", name)
        low = program("--optimizer", name, "--dtype", "bfloat16")
        products = [line for line in low.splitlines() if "dot_general" in line]
        assert products and all("bf16" in line for line in products)
    assert "bf16" not in program("--optimizer", "mars_adamw", "--dtype", "bfloat16")


def test_gamma_goes_linearly_to_its_end():
    config = parse(["--gamma", "0.1", "--gamma-end", "0.02", "--steps", "101"])
    np.testing.assert_allclose([float(config.gammas(i)) for i in (0, 50, 100)], [0.1, 0.06, 0.02])
    assert parse(["--gamma", "0.1"]).gammas == 0.1


def test_published_losses():
    assert optimizers.PUBLISHED_LOSSES["small", "adamw"] == (3.193, 2.885)
    assert optimizers.PUBLISHED_LOSSES["large", "mars_adamw"] == (2.876, 2.518)
    assert ("xl", "adamw") not in optimizers.PUBLISHED_LOSSES
