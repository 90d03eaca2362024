"""`mars_momentum`: one buffer for two, when it is chosen, what the states of all five weigh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mars_optax
from mars_optax import MarsMomentumState, mars_momentum, mars_vr

SHAPES = {"wide": (3, 5), "tall": (6, 2)}
FOUR = ["lion", "shampoo", "m", "sgdm"]
FACTORIES = {kind: getattr(mars_optax, f"mars_{kind}") for kind in [*FOUR, "adamw"]}


def random_tree(seed, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(size=s), dtype) for n, s in SHAPES.items()}


def is_lean(optimizer):
    state = optimizer.init(random_tree(0, jnp.float32))
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MarsMomentumState))
    return any(isinstance(x, MarsMomentumState) for x in leaves)


@pytest.mark.parametrize("gamma", [0.0, 0.025, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("b1", [0.0, 0.95])
def test_equals_two_buffers_from_the_first_step(gamma, b1):
    """The first step too, whose previous gradient is zero."""
    with jax.enable_x64(True):
        lean = mars_momentum(gamma, b1)
        full = optax.chain(mars_vr(gamma, b1, clip_norm=None), optax.ema(b1, debias=False))
        lean_state, full_state = lean.init(random_tree(0)), full.init(random_tree(0))
        for t in range(8):
            grads = random_tree(t)
            m, lean_state = lean.update(grads, lean_state)
            expected, full_state = full.update(grads, full_state)
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12), m, expected
            )


@pytest.mark.parametrize("kind", FOUR)
def test_optimizers_equal_two_buffers(kind):
    """A schedule that is constant needs the two buffers and must give the same trajectory."""
    with jax.enable_x64(True):
        optimizers = [
            FACTORIES[kind](0.1, gamma=gamma, weight_decay=0.1, clip_norm=None)
            for gamma in (0.4, lambda count: 0.4)
        ]
        trajectories = []
        for optimizer in optimizers:
            params = random_tree(9)
            state = optimizer.init(params)
            for t in range(6):
                updates, state = optimizer.update(random_tree(t), state, params)
                params = optax.apply_updates(params, updates)
            trajectories.append(params)
        assert is_lean(optimizers[0]) and not is_lean(optimizers[1])
    # The orthogonalization multiplies differences of 1e-16 by up to 500.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12), *trajectories)


@pytest.mark.parametrize("kind", FOUR)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_norm": None, "exact": True},
        {"clip_norm": None, "gamma": lambda count: 0.1},
        {"clip_norm": None, "gamma": jnp.array(0.1)},
        {"clip_norm": None, "grad_dtype": jnp.bfloat16},
    ],
)
def test_two_buffers_where_one_does_not_do(kind, settings):
    assert not is_lean(FACTORIES[kind](0.1, **settings))
    assert is_lean(FACTORIES[kind](0.1, clip_norm=None))


def test_injected_gamma_may_change():
    optimizer = optax.inject_hyperparams(mars_optax.mars_sgdm, static_args="clip_norm")(
        0.1, clip_norm=None
    )
    assert not is_lean(optimizer)


def test_non_finite_gradient_is_returned_but_not_stored():
    """So that a chain with apply_if_finite loses exactly that step."""
    chain = optax.chain(mars_momentum(0.5, 0.9), optax.apply_if_finite(optax.sgd(0.1), 5))
    params = random_tree(0, jnp.float32)
    good, skipping = chain.init(params), chain.init(params)
    bad = {n: x.at[0, 0].set(jnp.nan) for n, x in random_tree(7, jnp.float32).items()}
    for t in range(4):
        expected, good = chain.update(random_tree(t, jnp.float32), good)
        if t == 2:
            update, skipping = chain.update(bad, skipping)
            jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), update)
        ours, skipping = chain.update(random_tree(t, jnp.float32), skipping)
        jax.tree.map(np.testing.assert_array_equal, ours, expected)


def test_each_parameter_keeps_its_own_average_of_finite_gradients():
    momentum = mars_momentum(0.5, 0.9)
    good = random_tree(1, jnp.float32)
    _, before = momentum.update(good, momentum.init(good))
    spoilt = good | {"wide": good["wide"].at[0, 0].set(jnp.inf)}
    _, after = momentum.update(spoilt, before)
    np.testing.assert_array_equal(after.ema["wide"], before.ema["wide"])
    np.testing.assert_allclose(after.ema["tall"], 1.9 * before.ema["tall"], rtol=1e-6)


def test_low_precision_keeps_its_dtypes():
    params = random_tree(0, jnp.bfloat16)
    momentum = mars_momentum()
    m, state = momentum.update(random_tree(1, jnp.float32), momentum.init(params))
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(m)} == {jnp.dtype(jnp.float32)}


def test_bad_input():
    with pytest.raises(TypeError, match="`gamma` must be a number, got the schedule"):
        mars_momentum(lambda count: 0.1)
    with pytest.raises(ValueError, match="`gamma` is out of range, got -1"):
        mars_momentum(-1.0)
    with pytest.raises(ValueError, match="`b1` is out of range, got 1"):
        mars_momentum(0.1, 1.0)
    momentum = mars_momentum()
    grads = random_tree(0, jnp.float32)
    state = momentum.init(grads)
    with pytest.raises(ValueError, match="`prev_grad` was given"):
        momentum.update(grads, state, prev_grad=grads)
    with pytest.raises(ValueError, match="`updates` must have the tree structure"):
        momentum.update({"wide": grads["wide"]}, state)
    with pytest.raises(TypeError, match="`updates` must be one gradient tree"):
        momentum.update(mars_optax.MarsGrads(grads, grads), state)


# Memory


@pytest.mark.parametrize(
    "optimizer, expected",
    [
        (optax.adamw(0.1), 8),
        (FACTORIES["adamw"](0.1), 12),
        (FACTORIES["adamw"](0.1, grad_dtype=jnp.bfloat16), 10),
        (FACTORIES["adamw"](0.1, exact=True), 12),
        *[(FACTORIES[kind](0.1), 8) for kind in FOUR],
        *[(FACTORIES[kind](0.1, grad_dtype=jnp.bfloat16), 6) for kind in FOUR],
        *[(FACTORIES[kind](0.1, exact=True), 8) for kind in FOUR],
        *[(FACTORIES[kind](0.1, clip_norm=None), 4) for kind in FOUR],
    ],
)
def test_state_bytes_per_parameter(optimizer, expected):
    """Of float32 matrices; counters are the rest."""
    params = random_tree(0, jnp.float32)
    count = sum(p.size for p in jax.tree.leaves(params))
    state = jax.eval_shape(optimizer.init, params)
    arrays = [x for x in jax.tree.leaves(state) if x.shape]
    assert sum(x.size * x.dtype.itemsize for x in arrays) == expected * count
