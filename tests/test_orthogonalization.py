"""Newton–Schulz on X and on its Gram matrix, against NumPy and against the polar factor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from benchmarks.closeness import matrix, spectra
from benchmarks.hlo import matrix_flops
from mars_optax import orthogonalization, orthogonalize, scale_by_orthogonalization
from mars_optax.orthogonalization import STANDARD_COEFFS

# Polar Express, arXiv:2505.16932, rounded: rows that differ from step to step.
POLAR_EXPRESS = [(8.3, -23.6, 17.3), (4.11, -2.95, 0.545), (3.95, -2.91, 0.552)]


def random(shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@functools.cache
def jitted(**settings):
    return jax.jit(functools.partial(orthogonalize, **settings))


def numpy_newton_schulz(x, rows):
    x = x / (np.linalg.norm(x) + 1e-8)
    for a, b, c in rows:
        gram = x @ x.conj().T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


# The result


@pytest.mark.parametrize("gram", [None, False, True])
@pytest.mark.parametrize("shape", [(5, 5), (4, 12), (16, 2), (1, 7), (256, 300), (513, 260)])
def test_numpy_reference(shape, gram):
    """From 256 rows on symmetric products are computed by halves; 513 x 260 has odd ones."""
    x = random(shape)
    with jax.enable_x64(True):
        ours = jitted(ns_gram=gram)(jnp.asarray(x))
    expected = numpy_newton_schulz(x, [STANDARD_COEFFS] * 5)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 30])
def test_any_number_of_steps(steps):
    """The steps on the Gram matrix start anew in time: it would diverge after about eight."""
    x = random((6, 24), dtype=np.float32)
    x[3:] *= 1e-6
    x[5] = x[4]
    ours = jitted(ns_steps=steps, ns_gram=True)(x)
    theirs = jitted(ns_steps=steps, ns_gram=False)(x)
    assert jnp.all(jnp.isfinite(ours))
    if steps < 30:
        expected = numpy_newton_schulz(x.astype(np.float64), [STANDARD_COEFFS] * steps)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-3)
    else:  # the standard polynomial does not converge: only the range is the same
        for y in (ours, theirs):
            assert 0.6 < jnp.linalg.norm(y, 2) < 1.3


@pytest.mark.parametrize("gram", [False, True])
def test_rows_of_coefficients(gram):
    x = random((4, 16))
    with jax.enable_x64(True):
        ours = orthogonalize(jnp.asarray(x), ns_steps=3, ns_coeffs=POLAR_EXPRESS, ns_gram=gram)
    np.testing.assert_allclose(ours, numpy_newton_schulz(x, POLAR_EXPRESS), rtol=0, atol=1e-9)


@pytest.mark.parametrize("gram", [False, True])
def test_complex(gram):
    x = random((4, 12)) + 1j * random((4, 12), 1)
    with jax.enable_x64(True):
        ours = jitted(ns_gram=gram)(jnp.asarray(x))
    assert ours.dtype == np.complex128
    expected = numpy_newton_schulz(x, [STANDARD_COEFFS] * 5)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-9)


def test_traced_steps_are_the_standard_form():
    x = jnp.asarray(random((4, 16), dtype=np.float32))
    traced = jax.jit(lambda steps: orthogonalize(x, ns_steps=steps))(5)
    np.testing.assert_allclose(traced, orthogonalize(x), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="`ns_gram=True` needs a static number"):
        jax.jit(lambda steps: orthogonalize(x, ns_steps=steps, ns_gram=True))(5)


def test_bad_gram():
    with pytest.raises(ValueError, match="`ns_gram` is unknown, got 'yes'"):
        orthogonalize(jnp.ones((2, 4)), ns_gram="yes")


# Closeness to the polar factor


@pytest.mark.parametrize("aspect", [1, 2, 4, 8])
@pytest.mark.parametrize("spectrum", spectra(1))
def test_at_least_as_close_as_five_standard_steps_in_bfloat16(spectrum, aspect):
    """Relative distance to U Vᵀ; 0.01 is left for the noise of flat random spectra."""
    m = 128
    x, polar = matrix(m, m * aspect, spectra(m)[spectrum])
    distance = lambda y: np.linalg.norm(y - polar) / np.linalg.norm(polar)  # noqa: E731
    of = lambda dtype, gram: distance(  # noqa: E731
        np.asarray(jitted(ns_dtype=dtype, ns_gram=gram)(x), np.float64)
    )
    bound = of(jnp.bfloat16, False) + 0.01
    assert of(jnp.bfloat16, True) <= bound
    assert of(jnp.float32, True) <= bound
    assert abs(of(jnp.float32, True) - of(jnp.float32, False)) < 1e-4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("aspect", [2, 8])
def test_singular_values_in_the_band(aspect, dtype):
    x, _ = matrix(128, 128 * aspect, None)
    ours = jitted(ns_dtype=dtype, ns_gram=True)(x)
    singular_values = np.linalg.svd(np.asarray(ours, np.float32), compute_uv=False)
    assert singular_values.min() > 0.66
    assert singular_values.max() < 1.16


# The work


def flops(f, *shapes):
    return matrix_flops(jax.make_jaxpr(f)(*shapes).jaxpr)


@pytest.mark.parametrize("aspect, most", [(1, 0.85), (3, 0.62), (4, 0.57), (8, 0.54)])
def test_less_work_chosen_by_shape(aspect, most):
    """Against five products of X Xᵀ, A A and P X each."""
    m = 768
    x = jax.ShapeDtypeStruct((m, aspect * m), jnp.float32)
    textbook = 5 * (4 * aspect + 2) * m**3
    work = {gram: flops(functools.partial(orthogonalize, ns_gram=gram), x) for gram in (0, 1)}
    assert flops(orthogonalize, x) == min(work.values())
    assert flops(orthogonalize, x) < most * textbook


def gpt2_matrices(layers=12, d=768):
    shapes = {"attention": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    return {
        f"{name}_{i}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for i in range(layers)
        for name, shape in shapes.items()
    }


def test_gpt2_small_costs_two_thirds_of_optax():
    """optax.contrib.muon: 17,950 FLOPs per parameter."""
    tree = gpt2_matrices()
    update = lambda u: scale_by_orthogonalization().update(u, optax.EmptyState())[0]  # noqa: E731
    count = sum(x.size for x in tree.values())
    assert flops(update, tree) / count <= 11_500


def test_program_does_not_grow_with_the_layers():
    def products(layers):
        update = lambda u: scale_by_orthogonalization().update(u, optax.EmptyState())[0]  # noqa: E731
        return str(jax.make_jaxpr(update)(gpt2_matrices(layers, d=16))).count("dot_general")

    # Three shapes, "up" and "down" being one: at most 6 products of the Gram matrix a step.
    assert products(1) == products(7) < 3 * 30


# Stacked leaves


def test_leaves_of_one_shape_are_independent():
    """Shapes, transposes, stacks and layouts in one tree, each as if alone; None stays."""
    tree = {
        "a": jnp.asarray(random((4, 12), 1, np.float32)),
        "b": jnp.asarray(random((12, 4), 2, np.float32)) * 100,
        "c": jnp.asarray(random((3, 4, 12), 3, np.float32)),
        "heads": jnp.asarray(random((4, 3, 4), 4, np.float32)),
        "square": jnp.asarray(random((4, 4), 5, np.float32)),
        "low": jnp.asarray(random((4, 12), 6), jnp.bfloat16),
        "none": None,
    }
    numbers = {
        "a": None,
        "b": None,
        "c": MuonDimensionNumbers(1, 2),
        "heads": MuonDimensionNumbers(0, (1, 2)),
        "square": None,
        "low": None,
        "none": None,
    }
    transformation = scale_by_orthogonalization(weight_dimension_numbers=numbers)
    ours, _ = jax.jit(transformation.update)(tree, transformation.init(tree))
    assert ours["none"] is None
    for name, x in tree.items():
        if x is not None:
            alone = jitted(dimension_numbers=numbers[name])(x)
            assert ours[name].dtype == x.dtype and ours[name].shape == x.shape
            np.testing.assert_allclose(
                np.float32(ours[name]), np.float32(alone), rtol=0, atol=1e-5, err_msg=name
            )


@pytest.mark.parametrize(
    "layers, bound, at_once", [(4, 3, 2), (6, 3, 3), (5, 3, 1), (3, 3, 3), (3, 0, 1)]
)
def test_a_large_stack_is_taken_in_parts(layers, bound, at_once, monkeypatch):
    """As many matrices at once as the bound allows and the layers divide by, but at least one."""
    x = jnp.asarray(random((layers, 4, 12), 1, np.float32))
    numbers = MuonDimensionNumbers(1, 2)
    alone = [orthogonalize(matrix) for matrix in x]
    monkeypatch.setattr(orthogonalization, "_PART", bound * 4 * 12 * 4)
    ours = lambda x: orthogonalize(x, dimension_numbers=numbers)  # noqa: E731
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
        np.testing.assert_allclose(ours(x), jnp.stack(alone), rtol=0, atol=1e-5)
        program = jax.make_jaxpr(ours)(x)
    loops = [e for e in program.eqns if e.primitive.name == "scan"]
    steps = 5  # where there is one part, their loop is the outermost
    trips = layers // at_once if at_once < layers else steps
    assert [loop.params["length"] for loop in loops] == [trips]


def test_empty_tree():
    transformation = scale_by_orthogonalization()
    assert transformation.update({}, transformation.init({})) == ({}, optax.EmptyState())


def test_empty_stack():
    x = jnp.zeros((0, 4, 12))
    assert orthogonalize(x, dimension_numbers=MuonDimensionNumbers(1, 2)).shape == x.shape


@pytest.mark.parametrize("steps", [5.0, np.int64(5)])
def test_whole_numbers_of_other_types_count_as_steps(steps):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    np.testing.assert_array_equal(orthogonalize(x, ns_steps=steps), orthogonalize(x))
