"""Orthogonalization of matrices by Newton–Schulz iteration, and the preconditioner built on it."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from mars_optax import _checks
from mars_optax.dimension_numbers import WeightDimensionNumbers, fans, matrix_axes, resolve

Coefficients: TypeAlias = Sequence[float] | Sequence[Sequence[float]]

STANDARD_COEFFS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-8  # the authors' term beside the norm: a zero matrix stays zero


def orthogonalize(
    x: jax.Array,
    *,
    ns_steps: jax.typing.ArrayLike = 5,
    ns_coeffs: Coefficients = STANDARD_COEFFS,
    ns_dtype: jax.typing.DTypeLike | None = None,
    dimension_numbers: MuonDimensionNumbers | None = None,
) -> jax.Array:
    r"""Moves the singular values of a matrix towards 1: about :math:`U V^T` for :math:`U S V^T`.

    Quintic Newton–Schulz iteration from the matrix scaled to Frobenius norm 1:

    .. math::
        X \leftarrow a X + (b A + c A^2) X, \quad A = X X^T

    The standard coefficients maximize the slope at zero instead of converging: after five steps
    singular values above about 1/100 of the norm lie within 0.68 to 1.13.

    Args:
        x: A matrix of shape (m, n), or an array of any shape with `dimension_numbers`; real or
            complex (then :math:`X^H` replaces :math:`X^T`).
        ns_steps: Number of steps, at least 1. It may be a traced integer.
        ns_coeffs: (a, b, c), or one such row for each step.
        ns_dtype: Dtype of the iteration, such as `jnp.bfloat16`; products accumulate in float32 or
            wider, and so does the norm. Default: that of `x`.
        dimension_numbers: Which axes of `x` form the matrix; the others are batch axes, each entry
            of which is a matrix of its own. Default: axis 0 by axis 1 of a 2-axis `x`.

    Returns:
        An array of the shape and dtype of `x`. Zero matrices stay zero.

    Raises:
        ValueError: `x` has other than 2 axes and no dimension numbers, these are out of range,
            `ns_steps` is below 1, `ns_coeffs` has another shape.
        TypeError: `x` or `ns_dtype` is not floating point.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mars_optax import orthogonalize
        >>> x = jax.random.normal(jax.random.key(0), (4, 8))
        >>> singular_values = jnp.linalg.svd(orthogonalize(x), compute_uv=False)
        >>> bool(jnp.all((singular_values > 0.6) & (singular_values < 1.2)))
        True

    References:
        Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024;
        Liu et al., `MARS-M <https://arxiv.org/abs/2510.21800>`_, 2025.
    """
    coeffs = _check_iteration(ns_steps, ns_coeffs, ns_dtype)
    _checks.check_inexact("x", x)
    numbers = _default_numbers(dimension_numbers, x.shape, "x")
    axes = matrix_axes(numbers, x.shape)
    order = axes.batch + axes.reduction + axes.output
    batch_shape = tuple(x.shape[axis] for axis in axes.batch)

    x, restore = _replicate(x)
    matrices = x.transpose(order).reshape((math.prod(batch_shape), *fans(axes, x.shape)))
    matrices = _newton_schulz(matrices, ns_steps, coeffs, ns_dtype)
    permuted = matrices.reshape([x.shape[axis] for axis in order])
    return restore(permuted.transpose(np.argsort(order)))


def scale_by_orthogonalization(
    *,
    ns_steps: jax.typing.ArrayLike = 5,
    ns_coeffs: Coefficients = STANDARD_COEFFS,
    ns_dtype: jax.typing.DTypeLike | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    shape_factor: Literal["spectral", "rms"] | None = None,
) -> optax.GradientTransformation:
    r"""Orthogonalizes each update and scales it by a factor of its shape.

    .. math::
        u \leftarrow s \cdot \text{NS}(u)

    with :math:`s = 1` by default, :math:`\sqrt{\max(1, \text{fan\_out}/\text{fan\_in})}` for
    "spectral" (MARS-Shampoo) and :math:`0.2\sqrt{\max(\text{fan\_in}, \text{fan\_out})}` for "rms"
    (MARS-M), which gives updates the root mean square of AdamW's.

    Args:
        ns_steps: See :func:`orthogonalize`.
        ns_coeffs: See :func:`orthogonalize`.
        ns_dtype: See :func:`orthogonalize`.
        weight_dimension_numbers: A tree (or a prefix of one, or a callable that makes it from the
            parameters) of `optax.contrib.MuonDimensionNumbers`, whose reduction axes make fan_in
            and output axes fan_out. A parameter without them (None) must have 2 axes, (in, out).
        shape_factor: None, "spectral" or "rms".

    Returns:
        A stateless `GradientTransformation`; shapes and dtypes of the updates stay.

    Raises:
        ValueError: In `init` and `update`: a parameter is no matrix and has no dimension numbers,
            or these are out of range; `ns_steps`, `ns_coeffs` or `shape_factor` is invalid.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from mars_optax import mars_vr, scale_by_orthogonalization
        >>> optimizer = optax.chain(  # MARS-M for matrices, without decay
        ...     mars_vr(0.025, b1=0.95),
        ...     optax.ema(0.95, debias=False),
        ...     scale_by_orthogonalization(shape_factor="rms"),
        ...     optax.scale_by_learning_rate(3e-3),
        ... )
        >>> state = optimizer.init({"kernel": jnp.ones((4, 8))})

    References:
        Liu et al., `MARS-M <https://arxiv.org/abs/2510.21800>`_, 2025, Algorithm 1.
    """
    _check_iteration(ns_steps, ns_coeffs, ns_dtype)
    _checks.check_choice("shape_factor", shape_factor, (None, "spectral", "rms"))

    def with_numbers(tree: Any) -> list[tuple[Any, MuonDimensionNumbers]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        numbers = resolve(weight_dimension_numbers, tree)
        not_none = [
            n
            for n, leaf in zip(numbers, jax.tree.leaves(tree, is_leaf=_checks.is_none), strict=True)
            if leaf is not None
        ]
        return [
            (x, _default_numbers(n, x.shape, f"params{jax.tree_util.keystr(path)}"))
            for (path, x), n in zip(leaves, not_none, strict=True)
        ]

    def init_fn(params):
        for x, numbers in with_numbers(params):
            matrix_axes(numbers, x.shape)
        return optax.EmptyState()

    def update_fn(updates, state, params=None):
        del params
        orthogonalized = [
            orthogonalize(
                x,
                ns_steps=ns_steps,
                ns_coeffs=ns_coeffs,
                ns_dtype=ns_dtype,
                dimension_numbers=numbers,
            )
            * _shape_factor(shape_factor, *fans(matrix_axes(numbers, x.shape), x.shape))
            for x, numbers in with_numbers(updates)
        ]
        return jax.tree.unflatten(jax.tree.structure(updates), orthogonalized), state

    return optax.GradientTransformation(init_fn, update_fn)


def _check_iteration(ns_steps: Any, ns_coeffs: Any, ns_dtype: Any) -> np.ndarray:
    remedy = "use an integer of at least 1, such as 5"
    _checks.check_number("ns_steps", ns_steps, lambda v: v >= 1 and v == int(v), remedy)
    coeffs = np.asarray(ns_coeffs, dtype=np.float64)
    steps = ns_steps if isinstance(ns_steps, int) else None
    if coeffs.shape != (3,) and not (
        coeffs.ndim == 2 and coeffs.shape[1] == 3 and steps in (None, len(coeffs))
    ):
        raise ValueError(
            f"`ns_coeffs` must be (a, b, c) or one such row for each of {ns_steps} steps, got "
            f"shape {coeffs.shape}: make `ns_steps` and the rows match."
        )
    if ns_dtype is not None and not jnp.issubdtype(ns_dtype, jnp.inexact):
        raise TypeError(
            f"`ns_dtype` must be a floating-point dtype, got {ns_dtype!r}: use jnp.bfloat16."
        )
    return coeffs


def _default_numbers(
    numbers: MuonDimensionNumbers | None, shape: tuple[int, ...], name: str
) -> MuonDimensionNumbers:
    if numbers is not None:
        return numbers
    if len(shape) != 2:
        raise ValueError(
            f"`{name}` has shape {shape}, which is no matrix: give it dimension numbers, such as "
            "optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2), or leave it to "
            "another optimizer through `mars_mask`."
        )
    return MuonDimensionNumbers(reduction_axis=0, output_axis=1)


def _shape_factor(kind: str | None, fan_in: int, fan_out: int) -> float:
    if kind == "spectral":
        return math.sqrt(max(1.0, fan_out / fan_in)) if fan_in else 1.0
    if kind == "rms":
        return 0.2 * math.sqrt(max(fan_in, fan_out))
    return 1.0


def _newton_schulz(x: jax.Array, steps: Any, coeffs: np.ndarray, dtype: Any) -> jax.Array:
    """Iterates on a batch of matrices of shape (batch, fan_in, fan_out)."""
    out_dtype = x.dtype
    dtype = out_dtype if dtype is None else jnp.dtype(dtype)
    if jnp.issubdtype(out_dtype, jnp.complexfloating):
        dtype = jnp.promote_types(dtype, jnp.complex64)
    mantissa = jnp.finfo(dtype).nmant
    wide = jnp.promote_types(dtype, jnp.float32)

    # Explicit, since compilers may skip a cast to low precision and back: the authors' results in
    # bfloat16 depend on every rounding, by some 5 % of an update.
    def rounded(y, exponent=8):  # float32's range: only the mantissa is cut
        return y if mantissa >= 23 else jax.lax.reduce_precision(y, exponent, mantissa)

    def narrow(y):
        return rounded(y.astype(wide), jnp.finfo(dtype).nexp).astype(dtype)

    def step(row, x):
        a, b, c = row[0], row[1], row[2]
        gram = narrow(x @ x.swapaxes(1, 2).conj())
        polynomial = narrow(narrow(b * gram) + narrow(narrow(c * gram) @ gram))
        return narrow(narrow(a * x) + narrow(polynomial @ x))

    x = rounded(x.astype(jnp.promote_types(out_dtype, wide)))
    norm = jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x)), axis=(1, 2), keepdims=True))
    x = narrow(x / (rounded(norm) + _EPS))
    transposed = x.shape[1] >= x.shape[2]  # to the smaller Gram matrix
    if transposed:
        x = x.swapaxes(1, 2)
    rows = jnp.asarray(coeffs, jnp.finfo(wide).dtype)
    row = lambda i: rows[jnp.minimum(i, len(rows) - 1)] if rows.ndim == 2 else rows  # noqa: E731
    if isinstance(steps, jax.Array):  # a count injected as a hyperparameter
        x = jax.lax.fori_loop(0, steps, lambda i, x: step(row(i), x), x)
    else:
        for i in range(int(steps)):
            x = step(row(i), x)
    return (x.swapaxes(1, 2) if transposed else x).astype(out_dtype)


def _replicate(x: jax.Array) -> tuple[jax.Array, Any]:
    """On a mesh with explicit axes: the array on every device, and how to shard the result back."""
    sharding = jax.typeof(x).sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    if not explicit:
        return x, lambda y: y
    replicated = jax.sharding.PartitionSpec(*[None] * x.ndim)
    return jax.sharding.reshard(x, replicated), lambda y: jax.sharding.reshard(y, sharding.spec)
