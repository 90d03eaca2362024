"""Precision: dtypes of updates and states, and arithmetic in float32 or wider."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import mars_optax
from mars_optax import mars_vr

FACTORIES = {kind: getattr(mars_optax, f"mars_{kind}") for kind in oracle.KINDS}
EVERY_KIND = pytest.mark.parametrize("kind", oracle.KINDS)
BF16, F16, F32, F64 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64
DTYPES = {  # of the parameters kernel, bias and head, and of their gradients
    "bf16": ((BF16, BF16, BF16), (BF16, BF16, BF16)),
    "f16": ((F16, F16, F16), (F16, F16, F16)),
    "f32": ((F32, F32, F32), (F32, F32, F32)),
    "f64": ((F64, F64, F64), (F64, F64, F64)),
    "bf16 with f32 gradients": ((BF16, BF16, BF16), (F32, F32, F32)),
    "f32 with bf16 gradients": ((F32, F32, F32), (BF16, BF16, BF16)),
    "mixed": ((BF16, F32, F16), (F32, BF16, F16)),
    "mixed with f64": ((F64, BF16, F32), (BF16, F64, F64)),
}
EVERY_DTYPE = pytest.mark.parametrize("dtypes", DTYPES)
SHAPES = {"kernel": (3, 4), "bias": (4,), "head": (4, 2)}


def x64_if_needed(dtypes):
    return jax.enable_x64(True) if "f64" in dtypes else contextlib.nullcontext()


def random_tree(seed, dtypes, size=1.0):
    rng = np.random.default_rng(seed)
    return {
        n: jnp.asarray(size * rng.normal(size=shape), dtype)
        for (n, shape), dtype in zip(SHAPES.items(), dtypes, strict=True)
    }


def dtypes_of(tree):
    return jax.tree.map(lambda x: x.dtype, tree)


def to_float64(tree):
    return {n: np.asarray(x).astype(np.float64) for n, x in tree.items()}


@EVERY_KIND
@pytest.mark.parametrize(
    "dtypes, x64", [(d, x64) for d in DTYPES for x64 in (False, True) if x64 or "f64" not in d]
)
def test_dtypes_are_stable_under_scan(kind, dtypes, x64):
    """`lax.scan` raises where a carry changes its type. Nothing is run."""
    param_dtypes, grad_dtypes = DTYPES[dtypes]
    with jax.enable_x64(x64):
        params, grads = random_tree(0, param_dtypes), random_tree(1, grad_dtypes)
        for exact in (False, True):
            optimizer = FACTORIES[kind](
                optax.linear_schedule(0.1, 0.01, 10),
                gamma=optax.linear_schedule(0.1, 0.01, 10),
                weight_decay=0.1,
                exact=exact,
            )

            def step(carry, _, optimizer=optimizer, exact=exact):
                params, state = carry
                extra = {"prev_grad": grads} if exact else {}
                updates, state = optimizer.update(grads, state, params, **extra)
                return (optax.apply_updates(params, updates), state), updates

            state = optimizer.init(params)
            (_, last), updates = jax.eval_shape(
                lambda carry, step=step: jax.lax.scan(step, carry, length=3), (params, state)
            )
            assert dtypes_of(updates) == dtypes_of(params)
            assert dtypes_of(last) == dtypes_of(state)


@EVERY_KIND
@EVERY_DTYPE
def test_updates_are_rounded_once(kind, dtypes):
    """The first update is the exact one up to the last bit of the parameter's dtype."""
    param_dtypes, grad_dtypes = DTYPES[dtypes]
    with x64_if_needed(dtypes):
        params, grads = random_tree(2, param_dtypes), random_tree(3, grad_dtypes)
        optimizer = FACTORIES[kind](0.1, gamma=0.3, weight_decay=0.1)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        assert dtypes_of(updates) == dtypes_of(params)
        x = to_float64(params)
        expected = oracle.Mars(kind, 0.1, gamma=0.3, weight_decay=0.1).step(x, to_float64(grads))
        for n in SHAPES:
            exactly = expected[n] - x[n]
            # Arithmetic is at least in float32, whose errors Newton-Schulz makes larger.
            computed = np.finfo(F64 if params[n].dtype == grads[n].dtype == F64 else F32).eps
            error = 200 * computed * np.max(np.abs(exactly))
            error = error + 0.5 * float(jnp.finfo(params[n].dtype).eps) * np.abs(exactly)
            np.testing.assert_array_less(np.abs(to_float64(updates)[n] - exactly), error, err_msg=n)


@EVERY_KIND
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_low_precision_follows_the_oracle_for_some_steps(kind, dtype):
    params = random_tree(4, (dtype,) * 3)
    grads = [random_tree(5 + t, (dtype,) * 3) for t in range(4)]
    ours = oracle.trajectory(FACTORIES[kind](0.1, gamma=0.3), params, grads)[-1]
    reference, x = oracle.Mars(kind, 0.1, gamma=0.3), to_float64(params)
    for g in grads:
        x = reference.step(x, to_float64(g))
    for n, start in to_float64(params).items():
        largest = np.max(np.abs(start)) + np.max(np.abs(x[n]))
        bound = 4 * float(jnp.finfo(dtype).eps) * largest
        np.testing.assert_allclose(to_float64(ours)[n], x[n], rtol=0, atol=bound, err_msg=n)


@EVERY_KIND
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("exact", [False, True])
def test_zero_gradients_give_zero_updates(kind, dtype, exact):
    """In float16, Adam's eps of 1e-8 rounds to zero."""
    params = random_tree(6, (dtype,) * 3)
    zero = jax.tree.map(jnp.zeros_like, params)
    optimizer = FACTORIES[kind](0.1, weight_decay=0.0, adam_weight_decay=0.0, exact=exact)
    points = oracle.trajectory(optimizer, params, [zero] * 2, [zero] * 2 if exact else None)
    jax.tree.map(np.testing.assert_array_equal, points[-1], params)


@EVERY_KIND
def test_small_and_large_float16_gradients_give_finite_updates(kind):
    params = random_tree(7, (F16,) * 3)
    for size in (1e-7, 1e-4, 1e4):
        grads = [random_tree(t, (F16,) * 3, size) for t in range(3)]
        points = oracle.trajectory(FACTORIES[kind](0.1), params, grads)
        for x in jax.tree.leaves(points):
            assert np.all(np.isfinite(np.asarray(x)))


@EVERY_KIND
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_injected_float32_hyperparameters_keep_low_precision(kind, dtype):
    params, grads = random_tree(8, (dtype,) * 3), random_tree(9, (dtype,) * 3)
    settings = {"weight_decay": 0.1, "gamma": 0.3}
    optimizer = optax.inject_hyperparams(FACTORIES[kind], hyperparam_dtype=jnp.float32)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 10), **settings
    )
    state = optimizer.init(params)
    assert state.hyperparams["b1"].dtype == jnp.float32
    updates, new_state = optimizer.update(grads, state, params)
    assert dtypes_of(updates) == dtypes_of(params)
    assert dtypes_of(new_state) == dtypes_of(state)
    # The injected numbers are used, in float32: the update is the one without injection.
    plain = FACTORIES[kind](0.1, **settings)
    expected, _ = plain.update(grads, plain.init(params), params)
    for n in SHAPES:
        np.testing.assert_allclose(
            to_float64(updates)[n],
            to_float64(expected)[n],
            rtol=float(jnp.finfo(dtype).eps),
            atol=1e-6,
        )


# Gradients stored in bfloat16


def stored_bytes(state):
    return sum(x.nbytes for x in jax.tree.leaves(optax.tree.get(state, "last_grad")))


@pytest.mark.parametrize("dtype", [None, F16, BF16])
def test_grad_dtype_of_mars_vr(dtype):
    g = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), F32)}
    vr = mars_optax.mars_vr(0.5, clip_norm=None, grad_dtype=dtype)
    corrected, state = vr.update(g, vr.init(g))
    assert corrected["w"].dtype == F32
    assert state.last_grad["w"].dtype == (dtype or F32)
    assert stored_bytes(state) == 16 * jnp.dtype(dtype or F32).itemsize
    rounded = g["w"].astype(dtype or F32).astype(F32)
    corrected, state = vr.update(g, state)  # k = 0.5 · 0.95 / 0.05 = 9.5
    np.testing.assert_allclose(corrected["w"], g["w"] + 9.5 * (g["w"] - rounded), rtol=1e-6)


@EVERY_KIND
def test_gradient_stored_in_bfloat16_halves_its_bytes_and_keeps_the_trajectory(kind):
    """Within a hundredth of the distance travelled over 100 noisy steps, with the defaults."""
    steps = 100
    rng = np.random.default_rng(10)
    target = jnp.asarray(rng.normal(size=(8, 6)), F32)
    noise = jnp.asarray(rng.normal(size=(steps, 8, 6)), F32)

    def run(grad_dtype):
        optimizer = FACTORIES[kind](0.01, weight_decay=0.0, grad_dtype=grad_dtype)

        def step(carry, noise):
            x, state = carry
            updates, state = optimizer.update(x - target + 0.3 * noise, state, x)
            return (x + updates, state), None

        start = jnp.zeros_like(target)
        (x, state), _ = jax.lax.scan(step, (start, optimizer.init(start)), noise)
        return x, stored_bytes(state)

    full, full_bytes = run(None)
    half, half_bytes = run(jnp.bfloat16)
    assert half_bytes == full_bytes / 2
    travelled = jnp.linalg.norm(full)  # it starts at zero
    distance = jnp.linalg.norm(half - full)
    assert distance < 1e-2 * travelled


# Reductions


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("clip_scope", ["tensor", "global"])
def test_clip_norm_of_a_large_low_precision_array(dtype, clip_scope):
    """2²⁰ entries of about 300: squares overflow float16, and their sum stalls in bfloat16."""
    x = 300 * np.random.default_rng(11).normal(size=(2**10, 2**10))
    x = jnp.asarray(x, dtype)
    exactly = np.asarray(x).astype(np.float64)
    vr = mars_optax.mars_vr(0.0, clip_norm=100.0, clip_scope=clip_scope)
    clipped, _ = vr.update(x, vr.init(x))
    # Every entry is the right one, rounded once.
    expected = (exactly * (100 / np.linalg.norm(exactly))).astype(dtype)
    np.testing.assert_array_equal(clipped, expected)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_equal_entries_of_a_large_array_sum_up(dtype):
    """A sum of ones in bfloat16 stalls at 256, in float16 at 2048."""
    x = jnp.ones(2**20, dtype)
    vr = mars_optax.mars_vr(0.0, clip_norm=64.0)
    clipped, _ = vr.update(x, vr.init(x))
    np.testing.assert_array_equal(np.asarray(clipped).astype(np.float64), 64 / 2**10)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_orthogonalization_of_low_precision_matrices(dtype, size):
    """The norm is taken in float32: 1e4² overflows float16 and 1e-3² loses its bits there."""
    x = jnp.asarray(size * np.random.default_rng(12).normal(size=(8, 32)), dtype)
    ours = mars_optax.orthogonalize(x)
    assert ours.dtype == dtype
    expected = oracle.orthogonalize(np.asarray(x).astype(np.float64))
    # Five steps in this dtype move the entries by some units of its last place.
    error = np.linalg.norm(np.asarray(ours).astype(np.float64) - expected)
    assert error < 16 * float(jnp.finfo(dtype).eps) * np.linalg.norm(expected)


def test_orthogonalization_in_another_dtype_returns_the_dtype_of_its_input():
    x = jnp.asarray(np.random.default_rng(13).normal(size=(8, 32)), F32)
    full = mars_optax.orthogonalize(x)
    low = mars_optax.orthogonalize(x, ns_dtype=jnp.bfloat16)
    assert low.dtype == F32
    error = float(jnp.linalg.norm(low - full) / jnp.linalg.norm(full))
    assert 1e-5 < error < 1e-1
    low_input = x.astype(BF16)
    high = mars_optax.orthogonalize(low_input, ns_dtype=jnp.float32)
    assert high.dtype == BF16
    expected = oracle.orthogonalize(np.asarray(low_input).astype(np.float64))
    np.testing.assert_allclose(np.asarray(high).astype(np.float64), expected, rtol=2**-8, atol=1e-6)


def test_momentum_of_half_precision_gradients_is_not_rounded_before_the_sum():
    """Both terms are near 3e-8, half of float16's smallest number, and their sum is above it."""
    momentum = mars_optax.mars_momentum(0.025, 0.95)
    g = jnp.full(1, 6e-7, jnp.float16)
    m, _ = momentum.update(g, momentum.init(jnp.zeros(1, jnp.float32)))
    exact = (0.975 * 0.05 + 0.025) * float(g[0])
    assert m[0] == jnp.float16(exact) > 0


def test_a_gradient_beyond_bfloat16_is_stored_as_its_largest_number():
    vr = mars_vr(0.0, clip_norm=None, grad_dtype=jnp.bfloat16)
    _, state = vr.update(jnp.array([3.4e38, 0.0]), vr.init(jnp.zeros(2)))
    corrected, _ = vr.update(jnp.ones(2), state)
    np.testing.assert_array_equal(corrected, jnp.ones(2))


def test_a_number_is_a_tensor():
    vr = mars_vr(0.5, 0.9, clip_norm=None)
    _, state = vr.update(1.0, vr.init(0.0))
    corrected, _ = vr.update(2.0, state)
    assert corrected == 2 + 4.5 * (2 - 1)


def test_the_clip_of_a_zero_gradient_has_a_derivative():
    """A small correction is not clipped, so that it grows by 1 + k with the gradient."""
    vr = mars_vr(0.5, 0.9, clip_norm=1e-3)
    slope = jax.grad(lambda g: vr.update(g, vr.init(g))[0].sum())(jnp.zeros(2))
    np.testing.assert_allclose(slope, 1 + 4.5, rtol=1e-6)
