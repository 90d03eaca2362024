"""Layouts of parameters: which axes are a matrix, which are a stack, and what that changes."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from optax.contrib import MuonDimensionNumbers

import mars_optax

FACTORIES = {kind: getattr(mars_optax, f"mars_{kind}") for kind in oracle.KINDS}
EVERY_KIND = pytest.mark.parametrize("kind", oracle.KINDS)
EVERY_MODE = pytest.mark.parametrize("exact", [False, True], ids=["approximate", "exact"])
ORTHOGONALIZED = pytest.mark.parametrize("kind", ["shampoo", "m"])
MATRIX = MuonDimensionNumbers(0, 1)
STACKED_MATRIX = MuonDimensionNumbers(1, 2)
STEPS = 4
LAYERS = 3


def random_trees(seed, shapes, count):
    # Sizes grow from step to step: some corrections are clipped and others are not.
    rng = np.random.default_rng(seed)
    return [
        {n: jnp.asarray((t + 0.2) * rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
        for t in range(count)
    ]


def run(kind, numbers, params, grads, prev_grads, **settings):
    optimizer = FACTORIES[kind](
        0.05,
        gamma=0.4,
        weight_decay=0.1,
        exact=prev_grads is not None,
        weight_dimension_numbers=numbers,
        **settings,
    )
    return oracle.trajectory(optimizer, params, grads, prev_grads)


def check_equal_layouts(kind, exact, shapes, numbers, into, other_numbers):
    """The trajectory of `into(tree)` under `other_numbers` is `into` of the trajectory."""
    params, *grads = random_trees(0, shapes, 1 + STEPS)
    prev_grads = random_trees(1, shapes, STEPS) if exact else None
    ours = run(kind, numbers, params, grads, prev_grads)
    theirs = run(
        kind,
        other_numbers,
        into(params),
        [into(g) for g in grads],
        [into(g) for g in prev_grads] if exact else None,
    )
    for t in range(STEPS):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6),
            into(ours[t]),
            theirs[t],
        )


# Stacks


@EVERY_KIND
@EVERY_MODE
def test_scanned_stack_behaves_like_its_layers(kind, exact):
    """Kernels (L, m, n) and biases (L, d), which the default rule would take for matrices."""
    unstack = lambda tree: [{n: x[i] for n, x in tree.items()} for i in range(LAYERS)]  # noqa: E731
    check_equal_layouts(
        kind,
        exact,
        {"kernel": (LAYERS, 4, 6), "bias": (LAYERS, 6)},
        {"kernel": STACKED_MATRIX, "bias": None},
        unstack,
        [{"kernel": MATRIX, "bias": None}] * LAYERS,
    )


@EVERY_KIND
def test_unstacked_layers_follow_the_default_rule(kind):
    """The same biases under the default rule: (d,) is AdamW's, as the None of a stack is."""
    params, *grads = random_trees(2, {"kernel": (4, 6), "bias": (6,)}, 1 + STEPS)
    named = run(kind, {"kernel": MATRIX, "bias": None}, params, grads, None)
    default = run(kind, None, params, grads, None)
    jax.tree.map(np.testing.assert_array_equal, named, default)


@EVERY_KIND
def test_stack_in_the_last_axis_and_stack_of_stacks(kind):
    move = lambda tree: {"w": jnp.moveaxis(tree["w"], (0, 1), (1, 3))}  # noqa: E731
    check_equal_layouts(
        kind,
        False,
        {"w": (2, LAYERS, 4, 5)},
        {"w": MuonDimensionNumbers(-2, -1)},
        move,  # (4, 2, 5, L)
        {"w": MuonDimensionNumbers(0, 2)},
    )


@pytest.mark.parametrize("clip_scope", ["tensor", "global"])
def test_clip_of_a_stack(clip_scope):
    """Layers of norm 10 and 0.5: by tensor they become 1 and 0.5."""
    layer = jnp.full((2, 2), 0.5)
    stack = {"w": jnp.stack([10 * layer, 0.5 * layer])}
    vr = mars_optax.mars_vr(
        0.0, clip_scope=clip_scope, weight_dimension_numbers={"w": STACKED_MATRIX}
    )
    clipped, _ = vr.update(stack, vr.init(stack))
    norms = jnp.linalg.norm(clipped["w"], axis=(1, 2))
    joint = np.hypot(10, 0.5)
    expected = {"tensor": [1.0, 0.5], "global": [10 / joint, 0.5 / joint]}[clip_scope]
    np.testing.assert_allclose(norms, expected, rtol=1e-6)


def test_stack_without_dimension_numbers_is_clipped_as_one_tensor():
    stack = {"w": jnp.full((2, 4, 4), 1.0), "v": jnp.full((2, 2), 0.1)}
    vr = mars_optax.mars_vr(0.0, weight_dimension_numbers={"w": None, "v": None})
    clipped, _ = vr.update(stack, vr.init(stack))
    np.testing.assert_allclose(jnp.sqrt(jnp.sum(clipped["w"] ** 2)), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(clipped["v"], stack["v"])


# Attention kernels and convolutions


@EVERY_KIND
@EVERY_MODE
def test_flax_attention_kernels_are_matrices(kind, exact):
    """(d, heads, head_dim) is (d, heads · head_dim), and the output kernel the other way."""
    flat = lambda tree: {  # noqa: E731
        "query": tree["query"].reshape(6, 8),
        "out": tree["out"].reshape(8, 6),
    }
    check_equal_layouts(
        kind,
        exact,
        {"query": (6, 2, 4), "out": (2, 4, 6)},
        {"query": MuonDimensionNumbers(0, (1, 2)), "out": MuonDimensionNumbers((0, 1), 2)},
        flat,
        {"query": MATRIX, "out": MATRIX},
    )


@EVERY_KIND
def test_flax_convolution_is_the_torch_convolution(kind):
    """(kh, kw, in, out) and (out, in, kh, kw): the same fans, the same directions."""
    check_equal_layouts(
        kind,
        False,
        {"conv": (3, 2, 4, 5)},
        {"conv": MuonDimensionNumbers((0, 1, 2), 3)},
        lambda tree: {"conv": tree["conv"].transpose(3, 2, 0, 1)},
        {"conv": MuonDimensionNumbers((2, 3, 1), 0)},
    )


@EVERY_KIND
def test_stack_of_attention_kernels_behaves_like_its_layers(kind):
    check_equal_layouts(
        kind,
        False,
        {"query": (2, 6, 2, 4)},
        {"query": MuonDimensionNumbers(1, (2, 3))},
        lambda tree: {f"query_{i}": tree["query"][i].reshape(6, 8) for i in range(2)},
        {"query_0": MATRIX, "query_1": MATRIX},
    )


@EVERY_KIND
def test_torch_matrix_is_the_transposed_flax_matrix(kind):
    check_equal_layouts(
        kind,
        False,
        {"w": (4, 7)},
        {"w": MATRIX},
        lambda tree: {"w": tree["w"].T},
        {"w": MuonDimensionNumbers(reduction_axis=1, output_axis=0)},
    )


@EVERY_KIND
def test_kernels_with_other_than_two_axes_need_dimension_numbers(kind):
    """Without them they are AdamW's, in all five."""
    params, *grads = random_trees(3, {"query": (6, 2, 4)}, 1 + STEPS)
    ours = run(kind, None, params, grads, None)
    adamw = run(kind, None, params, grads, None, mars_mask=False)
    jax.tree.map(np.testing.assert_array_equal, ours, adamw)


# Factors of the shape


def first_update(kind, shape, numbers, **settings):
    """The update over minus the learning rate, for a matrix of a known momentum."""
    x = jnp.asarray(np.random.default_rng(4).normal(size=shape), jnp.float32)
    optimizer = FACTORIES[kind](1.0, weight_decay=0.0, weight_dimension_numbers=numbers, **settings)
    update, _ = optimizer.update(x, optimizer.init(x), x)
    return x, -update


FANS = pytest.mark.parametrize(
    "shape, numbers, fan_in, fan_out",
    [
        ((4, 16), None, 4, 16),
        ((16, 4), None, 16, 4),
        ((4, 16), MuonDimensionNumbers(1, 0), 16, 4),
        ((16, 4), MuonDimensionNumbers(1, 0), 4, 16),
        ((4, 2, 8), MuonDimensionNumbers(0, (1, 2)), 4, 16),
        ((2, 8, 4), MuonDimensionNumbers((0, 1), 2), 16, 4),
        ((5, 4, 16), MuonDimensionNumbers(1, 2), 4, 16),  # 5 is a batch axis
        ((3, 3, 2, 8), MuonDimensionNumbers((0, 1, 2), 3), 18, 8),
        ((8, 2, 3, 3), MuonDimensionNumbers((1, 2, 3), 0), 18, 8),
    ],
)


@FANS
def test_shampoo_factor(shape, numbers, fan_in, fan_out):
    """√max(1, fan_out / fan_in): 2 for a kernel with 4 inputs and 16 outputs."""
    x, update = first_update("shampoo", shape, numbers)
    direction = mars_optax.orthogonalize(x, dimension_numbers=numbers)
    factor = 2.0 if (fan_in, fan_out) == (4, 16) else 1.0
    np.testing.assert_allclose(update, factor * direction, rtol=0, atol=1e-4)


@FANS
def test_mars_m_factor(shape, numbers, fan_in, fan_out):
    """0.2 √max(fan_in, fan_out), whichever is which."""
    x, update = first_update("m", shape, numbers)
    direction = mars_optax.orthogonalize(x, dimension_numbers=numbers)
    factor = 0.2 * np.sqrt(max(fan_in, fan_out))
    np.testing.assert_allclose(update, factor * direction, rtol=0, atol=1e-4)


def test_mars_m_updates_have_the_root_mean_square_of_adamw():
    """About 0.2 for any shape."""
    for shape in [(16, 16), (12, 48), (48, 12)]:
        _, update = first_update("m", shape, None)
        assert 0.15 < float(jnp.sqrt(jnp.mean(update**2))) < 0.25


# Newton-Schulz


def test_torch_convolution_flattened_has_singular_values_of_about_one():
    x = jnp.asarray(np.random.default_rng(5).normal(size=(8, 4, 3, 3)), jnp.float32)
    numbers = MuonDimensionNumbers((1, 2, 3), 0)
    ours = mars_optax.orthogonalize(x, dimension_numbers=numbers)
    singular_values = jnp.linalg.svd(ours.reshape(8, 36), compute_uv=False)
    assert jnp.min(singular_values) > 0.68
    assert jnp.max(singular_values) < 1.135
    # Its rows are the outputs, not some other eight vectors.
    flat = mars_optax.orthogonalize(x.reshape(8, 36))
    np.testing.assert_allclose(ours.reshape(8, 36), flat, rtol=0, atol=1e-5)


@ORTHOGONALIZED
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 3, 5)])
def test_zero_matrix_stays_zero_in_a_stack_too(kind, shape):
    numbers = MATRIX if len(shape) == 2 else STACKED_MATRIX
    zero = jnp.zeros(shape)
    np.testing.assert_array_equal(mars_optax.orthogonalize(zero, dimension_numbers=numbers), zero)
    optimizer = FACTORIES[kind](1.0, weight_decay=0.0, weight_dimension_numbers=numbers)
    update, _ = optimizer.update(zero, optimizer.init(zero), zero)
    np.testing.assert_array_equal(update, zero)


def test_matrices_of_a_stack_are_scaled_by_their_own_norms():
    x = jnp.asarray(np.random.default_rng(6).normal(size=(2, 4, 4)), jnp.float32)
    stack = x * jnp.array([1.0, 1e4])[:, None, None]
    ours = mars_optax.orthogonalize(stack, dimension_numbers=STACKED_MATRIX)
    theirs = jnp.stack([mars_optax.orthogonalize(matrix) for matrix in x])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_rank_one_matrix_of_one_row_is_its_direction():
    """NS of a vector is p⁵(1) times the vector over its norm."""
    x = jnp.array([[3.0, 4.0]])
    s = 1.0
    for _ in range(5):
        a, b, c = oracle.NS_COEFFS
        s = a * s + b * s**3 + c * s**5
    for matrix, expected in [(x, x / 5), (x.T, x.T / 5)]:
        np.testing.assert_allclose(mars_optax.orthogonalize(matrix), s * expected, atol=1e-6)


@pytest.mark.parametrize("given", ["tree", "function"])
def test_masks_and_numbers_of_an_equinox_module_which_is_callable_itself(given):
    eqx = pytest.importorskip("equinox")
    params, _ = eqx.partition(eqx.nn.Linear(3, 4, key=jax.random.key(0)), eqx.is_inexact_array)
    plain = {"weight": params.weight, "bias": params.bias}
    numbers = {"weight": MuonDimensionNumbers(1, 0), "bias": None}
    decayed, mars = {"weight": False, "bias": True}, {"weight": True, "bias": False}

    def step(params, of):
        optimizer = mars_optax.mars_m(
            0.1,
            weight_dimension_numbers=of(numbers),
            weight_decay_mask=of(decayed),
            mars_mask=of(mars),
        )
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        return updates

    def module(values):
        tree = jax.tree.unflatten(jax.tree.structure(params), [values["weight"], values["bias"]])
        return tree if given == "tree" else lambda _: tree

    result, expected = step(params, module), step(plain, lambda values: values)
    np.testing.assert_array_equal(result.weight, expected["weight"])
    np.testing.assert_array_equal(result.bias, expected["bias"])
