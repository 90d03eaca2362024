"""mars_optax.diagnostics against NumPy, in any chain, and on noise whose size is known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax import MarsGrads, mars_vr
from mars_optax.diagnostics import diagnostics

GAMMA, B1 = 0.1, 0.9
K = GAMMA * B1 / (1 - B1)
SHAPES = {"w": (6, 4), "stack": (3, 5, 4), "b": (4,)}
NUMBERS = {
    "w": MuonDimensionNumbers(0, 1),
    "stack": MuonDimensionNumbers(1, 2),
    "b": None,
}


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=s)).astype(np.float32) for name, s in SHAPES.items()}


def flat(tree, names=("w", "stack")):
    return np.concatenate([np.asarray(tree[n], np.float64).ravel() for n in names])


def expected(g, p, m, clip_norm, exact):
    """The formulas, on the matrices alone."""
    G, P, M = flat(g), flat(p), flat(m)
    norm = np.linalg.norm
    norms = [norm(g["w"] + K * (g["w"] - p["w"]))]
    norms += [norm(a + K * (a - b)) for a, b in zip(g["stack"], p["stack"], strict=True)]
    signal = G @ M if exact else G @ P
    noise = max(G @ G - G @ M, 0) if exact else norm(G - P) ** 2 / 2
    return {
        "correction": K * norm(G - P) / norm(G),
        "cosine": G @ P / norm(G) / norm(P),
        "clipped": np.mean(np.array(norms) > clip_norm),
        "momentum_distance": norm(M - G) / norm(G),
        "noise_scale": noise / signal if signal > 0 else np.inf,
        "removed": 1 - norm(M + GAMMA * (G - P) - G) ** 2 / norm(M - G) ** 2 if exact else None,
    }


def near(actual, wanted):
    for name, value in wanted.items():
        if value is None:
            assert getattr(actual, name) is None
        else:
            np.testing.assert_allclose(getattr(actual, name), value, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", ["mars_adamw", "mars_lion", "mars_m", "mars_sgdm"])
@pytest.mark.parametrize("exact", [False, True])
def test_against_numpy(name, exact):
    """With a partition, whose fallback has a `mu` of its own, and under jit."""
    clip_norm = 5.0
    tx = getattr(mars_optax, name)(
        1e-3, b1=B1, gamma=GAMMA, clip_norm=clip_norm, exact=exact, weight_dimension_numbers=NUMBERS
    )
    params, common = draw(0), draw(1)
    state, m = tx.init(params), {n: np.zeros(s) for n, s in SHAPES.items()}
    last = m
    settings = {"gamma": GAMMA, "b1": B1, "clip_norm": clip_norm}
    seen = jax.jit(lambda s, u: diagnostics(s, u, weight_dimension_numbers=NUMBERS, **settings))
    for t in range(1, 4):
        g = {n: common[n] + x for n, x in draw(10 + t, 0.5).items()}
        p = {n: g[n] + x for n, x in draw(20 + t, 0.3).items()} if exact else last
        updates = MarsGrads(g, p) if exact else g
        unbiased = {n: x / (1 - B1 ** (t - 1)) if t > 1 else x for n, x in m.items()}
        if t > 1:
            near(seen(state, updates), expected(g, p, unbiased, clip_norm, exact))
        _, state = tx.update(updates, state, params)
        # The momentum of the corrected, clipped gradient.
        c = {n: g[n] + K * (np.float64(g[n]) - p[n]) for n in ("w", "stack")}
        axes = {"w": (0, 1), "stack": (1, 2)}
        for n in c:
            norm = np.sqrt(np.sum(c[n] ** 2, axis=axes[n], keepdims=True))
            m = {**m, n: B1 * m[n] + (1 - B1) * c[n] / np.maximum(1, norm / clip_norm)}
        last = g
    assert 0 < expected(g, p, unbiased, clip_norm, exact)["clipped"] < 1  # it tells them apart


def test_the_first_step_has_numbers():
    tx = mars_optax.mars_adamw(1e-3)
    g = {"w": jnp.ones((2, 2))}
    first = diagnostics(tx.init(g), g)
    near(first, {"correction": 0.475, "cosine": 0.0, "momentum_distance": 1.0, "removed": None})
    assert np.isinf(first.noise_scale)
    zeros = diagnostics(tx.init(g), {"w": jnp.zeros((2, 2))})
    assert not any(np.isnan(x) for x in jax.tree.leaves(zeros))


def test_bfloat16_is_summed_in_float32():
    g = {"w": jnp.ones((300, 300), jnp.bfloat16)}
    tx = optax.chain(mars_vr(), optax.trace(0.95))
    seen = diagnostics(tx.init(g), g, clip_norm=299.0 * 1.475)
    assert seen.correction.dtype == jnp.float32
    near(seen, {"correction": 0.475, "clipped": 1.0})


def test_a_schedule_and_a_global_clip():
    tx = optax.chain(optax.identity(), mars_vr(b1=B1), optax.ema(B1), optax.scale(-1.0))
    g = {"a": jnp.full(4, 3.0), "b": jnp.full(1, 8.0)}  # norms 6 and 8, together 10
    state = tx.init(g)
    _, state = tx.update(g, state)
    for scope, norm, share in (("global", 9.0, 1.0), ("global", 11.0, 0.0), ("tensor", 7.0, 0.5)):
        seen = diagnostics(state, g, b1=B1, clip_norm=norm, clip_scope=scope)
        assert seen.clipped == share
    assert diagnostics(state, g, clip_norm=None).clipped == 0
    half = jax.tree.map(lambda x: 2 * x, g)  # ‖g − g⁻‖ / ‖g‖ = 1/2
    seen = diagnostics(state, half, gamma=lambda count: 0.1 * count, b1=B1)
    near(seen, {"correction": 0.9 * 0.5})


@pytest.mark.parametrize("exact", [False, True])
def test_the_noise_scale_of_known_noise(exact):
    """Gradients of a fixed mean with noise: tr Σ / ‖∇F‖² = 4."""
    size = 20_000
    rng = np.random.default_rng(0)
    mean = rng.normal(size=size)
    tx = mars_optax.mars_sgdm(0.0, b1=B1, gamma=0.0, clip_norm=float("inf"), exact=exact)
    params = jnp.zeros((size, 1))
    state, seen = tx.init(params), []
    for t in range(60):
        g = jnp.asarray(mean + 2 * rng.normal(size=size), jnp.float32)[:, None]
        updates = MarsGrads(g, g) if exact else g
        if t > 30:
            seen.append(diagnostics(state, updates, gamma=0.0, b1=B1).noise_scale)
        _, state = tx.update(updates, state, params)
    assert np.median(seen) == pytest.approx(4.0, rel=0.1)


def test_removed_error_on_a_moving_gradient():
    """Without noise, the momentum lags behind by b1/(1−b1) steps of the gradient's drift; at γ = 1
    it does not lag, and what the correction saves is all of what one step's drift would add."""
    drift = np.full((3, 3), 0.1, np.float32)
    for gamma in (0.0, 0.1, 1.0):
        tx = mars_optax.mars_sgdm(0.0, b1=B1, gamma=gamma, clip_norm=None, exact=True)
        params = jnp.zeros((3, 3))
        state = tx.init(params)
        # Steady from the start: all gradients before were at the first point.
        for t in range(120):
            pair = MarsGrads(jnp.asarray(drift * (t + 1)), jnp.asarray(drift * t))
            seen = diagnostics(state, pair, gamma=gamma, b1=B1, clip_norm=None)
            _, state = tx.update(pair, state, params)
        lag = 1 + (1 - gamma) * B1 / (1 - B1)  # of the carried momentum, in drifts
        np.testing.assert_allclose(seen.removed, 1 - (lag - gamma) ** 2 / lag**2, atol=2e-3)


@pytest.mark.parametrize(
    ("state", "updates", "message"),
    [
        (optax.adam(1e-3).init(jnp.ones(2)), jnp.ones(2), "must hold one MarsVRState, got 0"),
        (mars_vr().init(jnp.ones(2)), jnp.ones(2), "has no momentum"),
        (
            optax.chain(mars_vr(), optax.trace(0.9)).init(jnp.ones(2)),
            MarsGrads(jnp.ones(2), jnp.ones(2)),
            "one gradient tree for this state, got MarsGrads",
        ),
        (
            mars_optax.mars_lion(1e-3, exact=True).init(jnp.ones((2, 2))),
            jnp.ones((2, 2)),
            "a MarsGrads pair for this state",
        ),
        (
            optax.chain(mars_vr(), optax.trace(0.9)).init({"a": jnp.ones(2)}),
            {"b": jnp.ones(2)},
            "must have the tree structure of the state's momentum",
        ),
    ],
)
def test_bad_input(state, updates, message):
    with pytest.raises(ValueError, match=message):
        diagnostics(state, updates)
