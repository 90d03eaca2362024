"""Orthogonalization of matrices by Newton–Schulz iteration, and the preconditioner built on it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from mars_optax import _checks
from mars_optax.dimension_numbers import (
    MatrixAxes,
    WeightDimensionNumbers,
    fans,
    matrix_axes,
    resolve,
)

Coefficients: TypeAlias = Sequence[float] | Sequence[Sequence[float]]

STANDARD_COEFFS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-8  # the authors' term beside the norm: a zero matrix stays zero
_RESTART = 3  # steps on one Gram matrix: with more, bfloat16's rounding of it grows too large
_SMALL = 64  # rows below which work does not matter: there PyTorch's roundings are repeated
_HALVE = 256  # rows from which a symmetric product is worth computing by halves
_PART = 2**24  # bytes that are iterated on at once: with what comes of them they fit on a TPU chip
_FREE = jax.sharding.PartitionSpec.UNCONSTRAINED


class _Iteration(NamedTuple):
    """What is done to each matrix."""

    steps: Any
    coeffs: np.ndarray  # [3] or [steps, 3]
    dtype: Any
    gram: bool | None


def orthogonalize(
    x: jax.Array,
    *,
    ns_steps: jax.typing.ArrayLike = 5,
    ns_coeffs: Coefficients = STANDARD_COEFFS,
    ns_dtype: jax.typing.DTypeLike | None = None,
    ns_gram: bool | None = None,
    dimension_numbers: MuonDimensionNumbers | None = None,
) -> jax.Array:
    r"""Moves the singular values of a matrix towards 1: about :math:`U V^T` for :math:`U S V^T`.

    Quintic Newton–Schulz iteration from the matrix scaled to Frobenius norm 1:

    .. math::
        X \leftarrow a X + (b A + c A^2) X, \quad A = X X^T

    The standard coefficients maximize the slope at zero instead of converging: after five steps
    singular values above about 1/100 of the norm lie within 0.68 to 1.13.

    Where it is less work, for all but nearly square matrices, the steps run on the small matrix
    :math:`R = X X^T`, and X is multiplied by the product of their polynomials once in three steps:

    .. math::
        R \leftarrow P R P, \quad Q \leftarrow P Q, \quad P = a I + b R + c R^2,
        \qquad \text{at last } X \leftarrow Q X

    That is the same result up to rounding. In bfloat16 it is about as close to :math:`U V^T` as the
    steps on X, closer for spectra that decay.

    Args:
        x: A matrix of shape (m, n), or an array of any shape with `dimension_numbers`; real or
            complex (then :math:`X^H` replaces :math:`X^T`).
        ns_steps: Number of steps, at least 1. It may be a traced integer.
        ns_coeffs: (a, b, c), or one such row for each step.
        ns_dtype: Dtype of the iteration, such as `jnp.bfloat16`; products accumulate in float32 or
            wider, and so does the norm. Default: that of `x`.
        ns_gram: Whether to run the steps on :math:`X X^T`. Default: where that is less work and
            matrices have at least 64 rows and columns. False repeats PyTorch's implementations to
            the last rounding in bfloat16.
        dimension_numbers: Which axes of `x` form the matrix; the others are batch axes, each entry
            of which is a matrix of its own. Default: axis 0 by axis 1 of a 2-axis `x`.

    Returns:
        An array of the shape and dtype of `x`. Zero matrices stay zero, and matrices whose norm is
        not well above 1e-8 or beyond about 1e19 (whose square overflows) go towards zero.

    Raises:
        ValueError: `x` has other than 2 axes and no dimension numbers, these are out of range,
            `ns_steps` is below 1, `ns_coeffs` has another shape, `ns_gram` is True for a traced
            `ns_steps`.
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
    iteration = _iteration(ns_steps, ns_coeffs, ns_dtype, ns_gram)
    _checks.check_inexact("x", x)
    numbers = _default_numbers(dimension_numbers, x.shape, "x")
    axes = matrix_axes(numbers, x.shape)
    return _orthogonalize_all([x], [axes], iteration)[0]


def scale_by_orthogonalization(
    *,
    ns_steps: jax.typing.ArrayLike = 5,
    ns_coeffs: Coefficients = STANDARD_COEFFS,
    ns_dtype: jax.typing.DTypeLike | None = None,
    ns_gram: bool | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    shape_factor: Literal["spectral", "rms"] | None = None,
) -> optax.GradientTransformation:
    r"""Orthogonalizes each update and scales it by a factor of its shape.

    .. math::
        u \leftarrow s \cdot \text{NS}(u)

    with :math:`s = 1` by default, :math:`\sqrt{\max(1, \text{fan\_out}/\text{fan\_in})}` for
    "spectral" (MARS-Shampoo) and :math:`0.2\sqrt{\max(\text{fan\_in}, \text{fan\_out})}` for "rms"
    (MARS-M), which gives updates the root mean square of AdamW's.

    Matrices of one shape, or of its transpose, are stacked and iterated together. Under a mesh
    (inside ``jax.set_mesh(mesh)``, or with updates on explicit axes) the stack is split over all
    devices, so that each orthogonalizes its share; shardings of the updates stay. A count that the
    devices do not divide is filled up with zero matrices. Without a mesh XLA decides. On a single
    device, and inside `jax.shard_map`, a stack of more than 16 MiB is taken in parts.

    Args:
        ns_steps: See :func:`orthogonalize`.
        ns_coeffs: See :func:`orthogonalize`.
        ns_dtype: See :func:`orthogonalize`.
        ns_gram: See :func:`orthogonalize`.
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
    iteration = _iteration(ns_steps, ns_coeffs, ns_dtype, ns_gram)
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
        arrays, axes = [], []
        for x, numbers in with_numbers(updates):
            arrays.append(x)
            axes.append(matrix_axes(numbers, x.shape))
        orthogonalized = [
            y * _shape_factor(shape_factor, *fans(a, y.shape))
            for y, a in zip(_orthogonalize_all(arrays, axes, iteration), axes, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(updates), orthogonalized), state

    return optax.GradientTransformation(init_fn, update_fn)


def _iteration(ns_steps: Any, ns_coeffs: Any, ns_dtype: Any, ns_gram: Any) -> _Iteration:
    remedy = "use an integer of at least 1, such as 5"
    _checks.check_number("ns_steps", ns_steps, lambda v: v >= 1 and v == int(v), remedy)
    if not isinstance(ns_steps, jax.Array | np.ndarray):
        ns_steps = int(ns_steps)  # 5.0 and np.int64(5) are static too
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
    _checks.check_choice("ns_gram", ns_gram, (None, False, True))
    if ns_gram and not isinstance(ns_steps, int):
        raise ValueError(
            "`ns_gram=True` needs a static number of steps, got a traced or array `ns_steps` "
            f"{ns_steps!r}: use a Python integer, or leave `ns_gram` out."
        )
    return _Iteration(ns_steps, coeffs, None if ns_dtype is None else jnp.dtype(ns_dtype), ns_gram)


def _default_numbers(
    numbers: MuonDimensionNumbers | None, shape: tuple[int, ...], name: str
) -> MuonDimensionNumbers:
    if numbers is not None:
        return numbers
    if len(shape) != 2:
        raise ValueError(
            f"`{name}` has shape {shape}, which is no matrix: give it dimension numbers, such as "
            "optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2) for a stack "
            "[L, m, n], or leave it to another optimizer through `mars_mask`."
        )
    return MuonDimensionNumbers(reduction_axis=0, output_axis=1)


def _shape_factor(kind: str | None, fan_in: int, fan_out: int) -> float:
    if kind == "spectral":
        return math.sqrt(max(1.0, fan_out / fan_in)) if fan_in else 1.0
    if kind == "rms":
        return 0.2 * math.sqrt(max(fan_in, fan_out))
    return 1.0


def _orthogonalize_all(
    arrays: list[jax.Array], axes: list[MatrixAxes], iteration: _Iteration
) -> list[jax.Array]:
    """Matrices of one shape are stacked, so that the program has one iteration for each shape."""
    groups: dict[Any, list[int]] = {}
    for i, (x, a) in enumerate(zip(arrays, axes, strict=True)):
        key = (*sorted(fans(a, x.shape)), x.dtype, jax.typeof(x).sharding.mesh)
        groups.setdefault(key, []).append(i)
    results = list(arrays)
    for (*_, mesh), members in groups.items():
        run = _stacked([axes[i] for i in members], iteration)
        if jax.sharding.AxisType.Explicit in mesh.axis_types:
            shardings = [jax.typeof(arrays[i]).sharding for i in members]
            run = jax.sharding.auto_axes(run, out_sharding=shardings)
        for i, y in zip(members, run(*[arrays[i] for i in members]), strict=True):
            results[i] = y
    return results


def _stacked(axes: list[MatrixAxes], iteration: _Iteration) -> Callable[..., list]:
    """A function of arrays whose matrices have one shape, or its transpose."""

    def run(*arrays):
        matrices = [
            _narrowed(_to_matrices(x, a), iteration) for x, a in zip(arrays, axes, strict=True)
        ]
        by_shape: dict[Any, list[int]] = {}
        for i, x in enumerate(matrices):
            by_shape.setdefault(x.shape[1:], []).append(i)
        together = _together if len(arrays) > 1 else lambda x: x
        stacks = [together(_concatenate([matrices[i] for i in ids])) for ids in by_shape.values()]
        stack = _concatenate([_wide(x) for x in stacks])
        result = together(_each_device_its_share(stack, iteration))
        results = list(matrices)
        for ids, y, x in zip(by_shape.values(), _split(result, stacks), stacks, strict=True):
            y = together(y if x.shape[1] < x.shape[2] else y.swapaxes(1, 2))
            for i, part in zip(ids, _split(y, [matrices[i] for i in ids]), strict=True):
                results[i] = _from_matrices(part, axes[i], arrays[i])
        return results

    return run


def _to_matrices(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """[batch, fan_in, fan_out]."""
    permuted = x.transpose(axes.batch + axes.reduction + axes.output)
    batch = math.prod(x.shape[axis] for axis in axes.batch)
    return permuted.reshape((batch, *fans(axes, x.shape)))


def _from_matrices(y: jax.Array, axes: MatrixAxes, like: jax.Array) -> jax.Array:
    order = axes.batch + axes.reduction + axes.output
    permuted = y.reshape([like.shape[axis] for axis in order])
    return permuted.transpose(np.argsort(order)).astype(like.dtype)


def _narrowed(x: jax.Array, iteration: _Iteration) -> jax.Array:
    """float32 in bfloat16, which has its range, if the iteration does: sent at half the size."""
    to_bfloat16 = x.dtype == jnp.float32 and iteration.dtype == jnp.bfloat16
    return x.astype(jnp.bfloat16) if to_bfloat16 else x


def _wide(x: jax.Array) -> jax.Array:
    """[batch, m, n] with m ≤ n; square ones are transposed to PyTorch's (out, in)."""
    return x if x.shape[1] < x.shape[2] else x.swapaxes(1, 2)


def _concatenate(stacks: list[jax.Array]) -> jax.Array:
    return stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)


def _split(stack: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    ends = np.cumsum([len(x) for x in like])
    return [stack[end - len(x) : end] for end, x in zip(ends, like, strict=True)]


def _mesh_axes() -> tuple[str, ...]:
    """The axes of the current mesh over which XLA may share out work."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == jax.sharding.AxisType.Auto and mesh.shape[name] > 1
    )


def _on_one_device() -> bool:
    """Whether an array, outside the axes of `_mesh_axes`, is sure to lie there as a whole."""
    return jax.device_count() == 1 or not jax.sharding.get_abstract_mesh().empty


def _share_out(stack: jax.Array, axes: tuple[str, ...], matrix: Any) -> jax.Array:
    """Splits the batch over `axes` of the mesh; `matrix` says how the other two axes lie."""
    spec = jax.sharding.PartitionSpec(axes or None, matrix, matrix)
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), spec)
    return jax.lax.with_sharding_constraint(stack, sharding)


def _together(stack: jax.Array) -> jax.Array:
    """Keeps the matrices sharded as the parameters are, but all in one way: they move at once."""
    return _share_out(stack, (), _FREE) if _mesh_axes() else stack


def _each_device_its_share(stack: jax.Array, iteration: _Iteration) -> jax.Array:
    """Newton–Schulz on [batch, m, n], the batch split over all devices of the current mesh.

    The stack is resharded as a whole, to whole matrices and back: XLA finds the shardings of the
    parameters where they are left free.
    """
    axes = _mesh_axes()
    if not axes:
        run = _in_parts if _on_one_device() else _newton_schulz
        return run(stack, iteration)
    count, sizes = len(stack), jax.sharding.get_abstract_mesh().shape
    padding = -count % math.prod(sizes[name] for name in axes)
    stack = jnp.pad(stack, ((0, padding), (0, 0), (0, 0)))
    # One axis at a time: XLA would replicate the stack where two have to move at once.
    for i in range(1, len(axes)):
        stack = _share_out(stack, axes[:i], _FREE)
    stack = _newton_schulz(_share_out(stack, axes, None), iteration)
    stack = _share_out(stack, axes, None)
    for i in reversed(range(1, len(axes))):
        stack = _share_out(stack, axes[:i], _FREE)
    return _together(stack)[:count] if padding else stack


def _in_parts(stack: jax.Array, iteration: _Iteration) -> jax.Array:
    """Newton–Schulz in a loop over parts of the stack that are small enough for fast memory.

    XLA cannot share out such a loop: a stack over several devices would be gathered.
    """
    count, of_one = len(stack), math.prod(stack.shape[1:]) * stack.dtype.itemsize
    sizes = [n for n in range(1, count + 1) if count % n == 0 and n * of_one <= _PART]
    size = max(sizes, default=1)
    if size >= count:
        return _newton_schulz(stack, iteration)
    parts = stack.reshape(count // size, size, *stack.shape[1:])
    return jax.lax.map(lambda part: _newton_schulz(part, iteration), parts).reshape(stack.shape)


def _newton_schulz(x: jax.Array, iteration: _Iteration) -> jax.Array:
    """Iterates on a batch of matrices [batch, m, n], m ≤ n."""
    steps, coeffs, dtype, gram = iteration
    dtype = x.dtype if dtype is None else dtype
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        dtype = jnp.promote_types(dtype, jnp.complex64)
    wide = jnp.promote_types(dtype, jnp.float32)

    x = _reduce_precision(x.astype(jnp.promote_types(x.dtype, wide)), dtype)
    norm = jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x)), axis=(1, 2), keepdims=True))
    x = _narrow(x / (_reduce_precision(norm, dtype) + _EPS), dtype)
    static = isinstance(steps, int)  # or a count injected as a hyperparameter
    if gram is None:
        gram = static and _gram_is_less_work(x.shape[1], x.shape[2], steps)
    if not gram:
        table = jnp.asarray(coeffs, jnp.finfo(wide).dtype).reshape(-1, 3)
        row = lambda i: table[jnp.minimum(i, len(table) - 1)]  # noqa: E731
        return jax.lax.fori_loop(0, steps, lambda i, x: _standard_step(x, row(i), dtype), x)
    rows = [tuple(map(float, row)) for row in np.broadcast_to(coeffs, (steps, 3))]
    for start in range(0, steps, _RESTART):
        x = _gram_steps(x, rows[start : start + _RESTART], dtype)
    return x


def _gram_is_less_work(m: int, n: int, steps: int) -> bool:
    """Counts the products, m·m·m as 1."""
    chunks = math.ceil(steps / _RESTART)
    standard = steps * (2 * n + m)
    return m >= _SMALL and chunks * 2 * n + (4 * steps - 3 * chunks) * m < standard


def _standard_step(x: jax.Array, row: Any, dtype: Any) -> jax.Array:
    """X ← aX + (bA + cA²)X, rounded wherever PyTorch rounds: in bfloat16 the authors' results
    depend on every rounding, by some 5 % of an update."""
    a, b, c = row
    wide = jnp.promote_types(dtype, jnp.float32)
    narrow = lambda y: _narrow(y.astype(wide), dtype)  # noqa: E731
    times = lambda scale, y: narrow(scale * y.astype(wide))  # noqa: E731
    gram = narrow(_gram(x))
    polynomial = times(b, gram) + narrow(_symmetric_product(times(c, gram), gram))
    return narrow(times(a, x) + narrow(narrow(polynomial) @ x))


def _gram_steps(x: jax.Array, rows: list[tuple[float, ...]], dtype: Any) -> jax.Array:
    r"""The same steps on the small matrix R = X Xᴴ, with one product with X at the end.

    A step is X ← PX for the polynomial P = aI + S, S = bR + cR², which commutes with R. Thus

        R ← PRP = aY + SY,  Y = aR + SR

    and X ends as QX for the product Q of all P. Written Q = qI + T, with the scalar q, it is

        q ← aq,  T ← aT + qS + ST

    so that the large multiples of I, which act on small singular values, are never rounded.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    narrow = lambda y: y.astype(dtype)  # noqa: E731
    product = lambda y, z: _symmetric_product(y, z).astype(wide)  # noqa: E731
    gram = narrow(_gram(x))
    for i, (a, b, c) in enumerate(rows):
        s = b * gram.astype(wide) + c * product(gram, gram)
        narrow_s = narrow(s)
        if i == 0:
            q, t = a, narrow_s
        else:
            t = narrow(a * t.astype(wide) + q * s + product(narrow_s, t))
            q = a * q
        if i + 1 < len(rows):
            y = narrow(a * gram.astype(wide) + product(narrow_s, gram))
            gram = narrow(a * y.astype(wide) + product(narrow_s, y))
    return narrow(q * x.astype(wide) + t @ x)


def _gram(x: jax.Array) -> jax.Array:
    """X Xᴴ; the upper half of the rows and the last block are three quarters of the work."""
    half = x.shape[1] // 2
    if x.shape[1] < _HALVE:
        return x @ x.swapaxes(1, 2).conj()
    upper, lower = x[:, :half], x[:, half:]
    return _mirror(upper @ x.swapaxes(1, 2).conj(), lower @ lower.swapaxes(1, 2).conj())


def _symmetric_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """XY for Hermitian matrices that commute, so that XY is Hermitian too."""
    half = x.shape[1] // 2
    if x.shape[1] < _HALVE:
        return x @ y
    return _mirror(x[:, :half] @ y, x[:, half:] @ y[:, :, half:])


def _mirror(upper: jax.Array, last: jax.Array) -> jax.Array:
    """The Hermitian matrix of which the upper rows and the last block are given."""
    half = upper.shape[1]
    lower = jnp.concatenate([upper[:, :, half:].swapaxes(1, 2).conj(), last], axis=2)
    return jnp.concatenate([upper, lower], axis=1)


def _reduce_precision(y: jax.Array, dtype: Any) -> jax.Array:
    """Only the mantissa is cut: the range stays float32's."""
    mantissa = jnp.finfo(dtype).nmant
    return y if mantissa >= 23 else jax.lax.reduce_precision(y, 8, mantissa)


def _narrow(y: jax.Array, dtype: Any) -> jax.Array:
    """Rounds explicitly, since compilers may skip a cast to low precision and back."""
    info = jnp.finfo(dtype)
    if info.nmant < 23:
        y = jax.lax.reduce_precision(y, info.nexp, info.nmant)
    return y.astype(dtype)
