"""What the optimizers are for special settings, and what the one-liners are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import mars_optax

FACTORIES = {kind: getattr(mars_optax, f"mars_{kind}") for kind in oracle.KINDS}
SHAPES = {"kernel": (3, 5), "other": (4, 2), "bias": (5,), "scale": ()}
STEPS = 6
RATE = 0.1


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def problem(seed, shapes=SHAPES, size=1.0):
    """Parameters and independent random gradients."""
    rng = np.random.default_rng(seed)
    tree = lambda: {n: jnp.asarray(size * rng.normal(size=s)) for n, s in shapes.items()}  # noqa: E731
    return tree(), [tree() for _ in range(STEPS)]


def largest_difference(left, right):
    """Of two trajectories, relative to the distance travelled."""
    distance = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)), left, right)
    travelled = jnp.max(jnp.abs(right[-1]["kernel"] - right[0]["kernel"]))
    return max(jax.tree.leaves(distance)) / travelled


def assert_same(ours, theirs, params, grads):
    ours = oracle.trajectory(ours, params, grads)
    theirs = oracle.trajectory(theirs, params, grads, update=jax.jit(theirs.update))
    assert largest_difference(ours, theirs) < 1e-12


# gamma = 0: the plain optimizer


def test_gamma_zero_is_adamw():
    ours = mars_optax.mars_adamw(
        RATE, 0.9, 0.98, 1e-6, 0.3, gamma=0.0, clip_norm=None, mars_mask=True
    )
    assert_same(ours, optax.adamw(RATE, 0.9, 0.98, 1e-6, weight_decay=0.3), *problem(0))


def test_gamma_zero_is_lion_with_one_beta():
    ours = mars_optax.mars_lion(RATE, 0.9, 0.3, gamma=0.0, clip_norm=None, mars_mask=True)
    assert_same(ours, optax.lion(RATE, 0.9, 0.9, weight_decay=0.3), *problem(0))


def test_gamma_zero_is_sgd_with_averaged_momentum():
    ours = mars_optax.mars_sgdm(RATE, 0.9, 0.3, gamma=0.0, clip_norm=None, mars_mask=True)
    theirs = optax.chain(
        optax.ema(0.9, debias=False),
        optax.add_decayed_weights(0.3),
        optax.scale_by_learning_rate(RATE),
    )
    assert_same(ours, theirs, *problem(0))


@pytest.mark.parametrize("kind, consistent_rms", [("shampoo", None), ("m", 0.2)])
def test_gamma_zero_is_muon(kind, consistent_rms):
    """Optax corrects the momentum's bias, which orthogonalization takes out again."""
    ours = FACTORIES[kind](RATE, 0.9, 0.3, gamma=0.0, clip_norm=None)
    theirs = optax.contrib.muon(
        RATE,
        beta=0.9,
        weight_decay=0.3,
        nesterov=False,
        consistent_rms=consistent_rms,
        adam_b1=0.9,
        adam_b2=0.95,
        adam_weight_decay=0.1,
    )
    # Gradients this large make the terms beside the norm (1e-8) invisible.
    shapes = {"kernel": (3, 5), "bias": (5,)}
    assert_same(ours, theirs, *problem(0, shapes, size=1e6))


# Momentum identities of the approximate correction, which hold from the first step


@pytest.mark.parametrize("b1", [0.5, 0.95])
def test_gamma_one_minus_b1_is_nesterov(b1):
    ours = mars_optax.mars_sgdm(RATE / (1 - b1), b1, gamma=1 - b1, clip_norm=None, mars_mask=True)
    assert_same(ours, optax.sgd(RATE, momentum=b1, nesterov=True), *problem(1))


@pytest.mark.parametrize("lion_b1, lion_b2", [(0.9, 0.99), (0.95, 0.98), (0.5, 0.9)])
def test_lion_with_two_betas(lion_b1, lion_b2):
    gamma = (lion_b2 - lion_b1) / lion_b2
    ours = mars_optax.mars_lion(RATE, lion_b2, 0.3, gamma=gamma, clip_norm=None, mars_mask=True)
    assert_same(ours, optax.lion(RATE, lion_b1, lion_b2, weight_decay=0.3), *problem(2))


@pytest.mark.parametrize("gamma", [0.025, 0.5, 1.0])
def test_constant_gamma_is_quasi_hyperbolic_momentum(gamma):
    """m_t = (1 - gamma) EMA_t + gamma g_t."""
    b1 = 0.9
    params, grads = problem(3)
    ours = mars_optax.mars_sgdm(RATE, b1, gamma=gamma, clip_norm=None, mars_mask=True)
    average = jax.tree.map(jnp.zeros_like, params)
    expected = [params]
    for g in grads:
        average = jax.tree.map(lambda e, g: b1 * e + (1 - b1) * g, average, g)
        expected.append(
            jax.tree.map(
                lambda x, e, g: x - RATE * ((1 - gamma) * e + gamma * g), expected[-1], average, g
            )
        )
    ours = oracle.trajectory(ours, params, grads)
    assert largest_difference(ours, expected[1:]) < 1e-12


@pytest.mark.parametrize("kind", ["shampoo", "m"])
def test_constant_gamma_needs_one_buffer_for_orthogonalized_momentum_too(kind):
    b1, gamma = 0.9, 0.3
    ours = FACTORIES[kind](RATE, b1, 0.0, gamma=gamma, clip_norm=None, mars_mask=True)
    params, grads = problem(4, {"kernel": (3, 5), "other": (4, 2)}, size=1e6)
    quasi_hyperbolic, average = [], jax.tree.map(jnp.zeros_like, params)
    for g in grads:
        average = jax.tree.map(lambda e, g: b1 * e + (1 - b1) * g, average, g)
        quasi_hyperbolic.append(jax.tree.map(lambda e, g: (1 - gamma) * e + gamma * g, average, g))
    orthogonalize = optax.chain(
        mars_optax.scale_by_orthogonalization(
            shape_factor={"shampoo": "spectral", "m": "rms"}[kind]
        ),
        optax.scale_by_learning_rate(RATE),
    )
    expected = oracle.trajectory(orthogonalize, params, quasi_hyperbolic)
    assert largest_difference(oracle.trajectory(ours, params, grads), expected) < 1e-12


# Exact, gamma = 1: STORM


@pytest.mark.parametrize("first", ["zero", "same point"])
def test_exact_with_gamma_one_is_storm(first):
    """m_t = g_t + b1 (m_{t-1} - g^-_t)."""
    b1 = 0.9
    params, grads = problem(5)
    _, prev_grads = problem(6)
    prev_grads[0] = jax.tree.map(jnp.zeros_like, grads[0]) if first == "zero" else grads[0]
    ours = mars_optax.mars_sgdm(RATE, b1, gamma=1.0, clip_norm=None, mars_mask=True, exact=True)
    m = jax.tree.map(jnp.zeros_like, params)
    expected = [params]
    for g, previous in zip(grads, prev_grads, strict=True):
        m = jax.tree.map(lambda m, g, p: g + b1 * (m - p), m, g, previous)
        expected.append(jax.tree.map(lambda x, m: x - RATE * m, expected[-1], m))
    ours = oracle.trajectory(ours, params, grads, prev_grads)
    assert largest_difference(ours, expected[1:]) < 1e-12


# A correction that cancels out would pass everything with gamma = 0


def test_correction_changes_the_gradient_from_the_first_step():
    params, grads = problem(7)
    vr = mars_optax.mars_vr(0.025, 0.95, clip_norm=None)
    state = vr.init(params)
    for t, g in enumerate(grads):
        corrected, state = vr.update(g, state)
        previous = grads[t - 1] if t else jax.tree.map(jnp.zeros_like, g)
        # k = 0.025 · 0.95 / 0.05 = 0.475
        difference = jax.tree.map(lambda c, g: c - g, corrected, g)
        expected = jax.tree.map(lambda g, p: 0.475 * (g - p), g, previous)
        jax.tree.map(
            lambda d, e: np.testing.assert_allclose(d, e, rtol=0, atol=1e-14), difference, expected
        )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_correction_changes_the_result_of_the_default_optimizer(kind, exact):
    params, grads = problem(8)
    prev_grads = problem(9)[1] if exact else None
    run = lambda gamma: oracle.trajectory(  # noqa: E731
        FACTORIES[kind](RATE, gamma=gamma, exact=exact), params, grads, prev_grads
    )
    assert largest_difference(run(0.025), run(0.0)) > 1e-3


def test_equal_gradients_need_no_correction_after_the_first_step():
    params, grads = problem(10)
    vr = mars_optax.mars_vr(0.5, clip_norm=None)
    _, state = vr.update(grads[0], vr.init(params))
    corrected, _ = vr.update(grads[0], state)
    jax.tree.map(np.testing.assert_array_equal, corrected, grads[0])


# Compositions


def test_mars_vr_in_front_of_adam():
    params, grads = problem(11)
    chain = optax.chain(
        mars_optax.mars_vr(0.025),
        optax.scale_by_adam(0.95, 0.99),
        optax.scale_by_learning_rate(RATE),
    )
    reference = oracle.Mars("adamw", RATE, mars=dict.fromkeys(SHAPES, True))
    expected, x = [], params
    for g in grads:
        x = reference.step(x, g)
        expected.append(x)
    assert largest_difference(oracle.trajectory(chain, params, grads), expected) < 1e-12


def test_mars_vr_in_front_of_optax_muon():
    """Optax's Muon has no shape factor of its own, and corrects the bias of the momentum."""
    params, grads = problem(12, {"kernel": (3, 5)})
    chain = optax.chain(
        mars_optax.mars_vr(0.025),
        optax.contrib.scale_by_muon(
            nesterov=False,
            weight_dimension_numbers={"kernel": optax.contrib.MuonDimensionNumbers()},
        ),
        optax.scale_by_learning_rate(RATE),
    )
    correct = oracle.VarianceReduction(0.025)
    x, m, expected = params["kernel"], 0.0, []
    for t, g in enumerate(grads):
        m = 0.95 * m + 0.05 * correct({"kernel": g["kernel"]})["kernel"]
        x = x - RATE * oracle.orthogonalize(m / (1 - 0.95 ** (t + 1)))
        expected.append({"kernel": x})
    ours = oracle.trajectory(chain, params, grads, update=jax.jit(chain.update))
    assert largest_difference(ours, expected) < 1e-12


def inner_part(kind):
    return {
        "adamw": lambda: optax.scale_by_adam(0.9, 0.98, 1e-6),
        "lion": lambda: optax.scale_by_lion(0.9, 0.9),
        "shampoo": lambda: optax.chain(
            optax.ema(0.9, debias=False),
            mars_optax.scale_by_orthogonalization(shape_factor="spectral"),
        ),
        "m": lambda: optax.chain(
            optax.ema(0.9, debias=False),
            mars_optax.scale_by_orthogonalization(shape_factor="rms"),
        ),
        "sgdm": lambda: optax.ema(0.9, debias=False),
    }[kind]()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_one_liner_is_the_chain_of_public_parts(kind, exact):
    rate = optax.linear_schedule(0.1, 0.01, STEPS)
    gamma = optax.linear_schedule(0.5, 0.1, STEPS)
    decays = lambda tree: jax.tree.map(lambda x: x.ndim > 0, tree)  # noqa: E731
    special = {"b2": 0.98, "eps": 1e-6} if kind == "adamw" else {}
    one_liner = FACTORIES[kind](
        rate,
        0.9,
        weight_decay=0.3,
        gamma=gamma,
        clip_norm=0.5,
        exact=exact,
        weight_decay_mask=decays,
        adam_learning_rate=0.02,
        adam_b1=0.8,
        adam_b2=0.9,
        adam_eps=1e-5,
        adam_weight_decay=0.2,
        **special,
    )
    chain = optax.chain(
        mars_optax.mars_vr(gamma, 0.9, clip_norm=0.5, exact=exact),
        inner_part(kind),
        optax.add_decayed_weights(0.3, decays),
        optax.scale_by_learning_rate(rate),
    )
    parts = mars_optax.keep_dtypes(
        optax.partition(
            {
                "mars": chain,
                "adamw": optax.adamw(0.02, 0.8, 0.9, 1e-5, weight_decay=0.2, mask=decays),
            },
            lambda params: jax.tree.map(lambda x: "mars" if x.ndim == 2 else "adamw", params),
        )
    )
    if exact:
        parts = mars_optax.exact(parts)
    params, grads = problem(13)
    prev_grads = problem(14)[1] if exact else None
    ours = oracle.trajectory(one_liner, params, grads, prev_grads)
    theirs = oracle.trajectory(parts, params, grads, prev_grads)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-14), ours, theirs)
