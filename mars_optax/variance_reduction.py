"""The MARS correction: a scaled stochastic recursive momentum in front of a preconditioner."""

import contextlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from mars_optax import _checks
from mars_optax.dimension_numbers import WeightDimensionNumbers, matrix_axes, resolve
from mars_optax.previous_iterate import reject_pair, varying


class MarsVRState(NamedTuple):
    """State of :func:`mars_vr`."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=int32
    last_grad: optax.Updates | None  # None in exact mode


def mars_vr(
    gamma: optax.ScalarOrSchedule = 0.025,
    b1: jax.typing.ArrayLike = 0.95,
    *,
    clip_norm: jax.typing.ArrayLike | None = 1.0,
    clip_scope: Literal["tensor", "global"] = "tensor",
    exact: bool = False,
    grad_dtype: jax.typing.DTypeLike | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Corrects gradients by scaled variance reduction and clips them.

    .. math::
        k_t &= \gamma_t b_1 / (1 - b_1) \\
        c_t &= g_t + k_t (g_t - g^-_t) \\
        \tilde c_t &= c_t / \max(1, \|c_t\|_2 / \text{clip\_norm})

    Approximate mode (the default): :math:`g^-_t = g_{t-1}`, the gradient that this transformation
    received one step before, zero at the first step. Exact mode: :math:`g^-_t` is the gradient on
    the current batch at the previous parameters, handed to `update` as `prev_grad`;
    :func:`mars_optax.exact` and :func:`mars_optax.value_and_grads` supply it.

    The momentum that follows must decay with the same `b1`:
    ``optax.chain(mars_vr(0.025, b1=0.95), optax.scale_by_adam(0.95, 0.99))``.

    The correction and its norm are computed in float32 or wider and returned in the gradient's
    dtype. A tensor (a parameter, or a matrix of a stack with dimension numbers) with any entry that
    is not finite, or whose norm or sum overflows, is not stored: its `last_grad` stays. A
    correction whose norm overflows, in float32 from about 1e19 on, is clipped to zero.

    Args:
        gamma: The scale of the variance reduction, at least 0, or a schedule: a function of the
            step count, which starts at 0. 0 gives the plain gradient.
        b1: Decay rate of the momentum that follows, in [0, 1).
        clip_norm: Largest Euclidean norm of :math:`c_t`; None turns the clip off.
        clip_scope: "tensor" clips each parameter by its own norm, as the authors do; "global"
            clips all of them by their joint norm.
        exact: Whether `prev_grad` is given to `update`. Nothing is stored then.
        grad_dtype: Dtype of the stored gradient, such as `jnp.bfloat16`; default: the parameter's.
        weight_dimension_numbers: A tree (or a prefix of one, or a callable that makes it from the
            parameters) of `optax.contrib.MuonDimensionNumbers`. Axes in neither of its lists are
            batch axes, and each batch entry is a tensor of its own, so that a stack of layers
            behaves like the layers. A parameter without dimension numbers (None) is one tensor.

    Returns:
        A `GradientTransformationExtraArgs`. `update` takes `prev_grad`, a tree like the gradients,
        in exact mode, and ignores other extra arguments. Its state is a :class:`MarsVRState`:
        `count` and `last_grad`, which has the parameters' shapes.

    Raises:
        ValueError: `gamma` or `clip_norm` is negative (or `clip_norm` 0), `b1` is outside [0, 1),
            `clip_scope` is unknown; dimension numbers are out of range; in `update`, trees do not
            match, `prev_grad` is missing in exact mode or given in approximate mode.
        TypeError: A parameter is not floating point, or `updates` is a `MarsGrads` pair.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from mars_optax import mars_vr
        >>> vr = mars_vr(gamma=0.5, b1=0.9, clip_norm=None)  # k = 4.5
        >>> params = jnp.zeros(2)
        >>> state = vr.init(params)
        >>> _, state = vr.update(jnp.array([1.0, 2.0]), state)
        >>> corrected, state = vr.update(jnp.array([2.0, 2.0]), state)
        >>> print(corrected)  # g2 + 4.5 (g2 - g1)
        [6.5 2. ]
        >>> optimizer = optax.chain(
        ...     mars_vr(0.025), optax.scale_by_adam(0.95, 0.99), optax.scale_by_learning_rate(3e-3)
        ... )

    References:
        Yuan et al., `MARS: Unleashing the Power of Variance Reduction for Training Large Models
        <https://arxiv.org/abs/2411.10438>`_, 2024, Algorithm 1.
    """
    _checks.check_non_negative("gamma", gamma)
    _checks.check_decay("b1", b1)
    if clip_norm is not None:
        remedy = "use a positive norm, or None for no clip"
        _checks.check_number("clip_norm", clip_norm, lambda v: v > 0, remedy)
    _checks.check_choice("clip_scope", clip_scope, ("tensor", "global"))
    _checks.check_choice("exact", exact, (False, True))
    if grad_dtype is not None and not jnp.issubdtype(grad_dtype, jnp.floating):
        raise ValueError(
            f"`grad_dtype` must be a floating-point dtype, got {grad_dtype!r}: use jnp.bfloat16."
        )
    if exact and grad_dtype is not None:
        raise ValueError(
            f"`grad_dtype` has no use in exact mode, which stores no gradient, got {grad_dtype!r}: "
            "leave it out."
        )

    def init_fn(params):
        _checks.check_inexact("params", params)
        _check_dimension_numbers(weight_dimension_numbers, params)
        last_grad = None
        if not exact:
            if grad_dtype is not None and any(map(jnp.iscomplexobj, jax.tree.leaves(params))):
                raise ValueError(f"`grad_dtype` {grad_dtype!r} cannot hold complex gradients.")
            last_grad = optax.tree.zeros_like(params, dtype=grad_dtype)
        return MarsVRState(jnp.zeros([], jnp.int32), last_grad)

    def correct(g, previous, scale, spec):
        """The correction, its size (squared where the clip needs it), and the tensor to store."""
        size_of = _absolute_sum if clip_norm is None else _squared_norm
        c = _correct(g, previous, scale)
        if exact:
            return c, None if clip_norm is None else size_of(c, spec), None
        previous, size = _hold(previous, size_of(c, spec))
        if clip_norm is None:  # then nothing but the hold makes the correction wait for the size
            g, size = _hold(g, size)
        return _correct(g, previous, scale), size, _store(g, previous, spec, size)

    def update_fn(updates, state, params=None, *, prev_grad=None, **unused_extra_args):
        del params, unused_extra_args
        reject_pair(updates)
        previous = _previous_gradient(updates, state, prev_grad, exact)
        scale = _correction_scale(gamma(state.count) if callable(gamma) else gamma, b1)
        grads, structure = jax.tree.flatten(updates, is_leaf=_checks.is_none)
        grads = [None if g is None else jnp.asarray(g) for g in grads]
        previous_leaves = jax.tree.leaves(previous, is_leaf=_checks.is_none)
        numbers = resolve(weight_dimension_numbers, updates)
        corrected, stored, sizes = [], [], []
        for g, last, spec in zip(grads, previous_leaves, numbers, strict=True):
            c = size = None
            if g is not None:
                c, size, last = correct(g, last, scale, spec)
                scale = _after(size, scale)
            corrected.append(c)
            sizes.append(size)
            stored.append(last)
        if clip_norm is not None:
            corrected = _clip(corrected, sizes, clip_norm, clip_scope)
        corrected = [
            None if c is None else c.astype(g.dtype) for c, g in zip(corrected, grads, strict=True)
        ]
        last_grad = None if exact else structure.unflatten(stored)
        count = optax.safe_increment(state.count)
        return structure.unflatten(corrected), MarsVRState(count, last_grad)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class MarsMomentumState(NamedTuple):
    """State of :func:`mars_momentum`."""

    ema: optax.Updates


def mars_momentum(
    gamma: jax.typing.ArrayLike = 0.025, b1: jax.typing.ArrayLike = 0.95
) -> optax.GradientTransformationExtraArgs:
    r"""The momentum of the corrected gradient, with one buffer instead of two.

    .. math::
        \text{EMA}_t &= b_1 \text{EMA}_{t-1} + (1 - b_1) g_t \\
        m_t &= (1 - \gamma) \text{EMA}_t + \gamma g_t

    For a constant :math:`\gamma`, in approximate mode and without the clip, that is
    ``optax.chain(mars_vr(gamma, b1, clip_norm=None), optax.ema(b1, debias=False))`` from the first
    step on: quasi-hyperbolic momentum. :func:`mars_optax.mars_lion`,
    :func:`mars_optax.mars_shampoo`, :func:`mars_optax.mars_m` and :func:`mars_optax.mars_sgdm` use
    it where these hold.

    A parameter's gradient with any entry that is not finite is left out of its average, but the
    returned momentum is not finite either, so that `optax.apply_if_finite` notices.

    Args:
        gamma: The scale of the variance reduction, at least 0. A schedule needs the two buffers.
        b1: Decay rate of the momentum, in [0, 1).

    Returns:
        A `GradientTransformationExtraArgs` with the state :class:`MarsMomentumState`. Arithmetic is
        in float32 or wider; the average is stored in the parameters' dtypes and :math:`m_t`
        returned in the gradients'.

    Raises:
        ValueError: `gamma` is negative, `b1` is outside [0, 1); in `update`, trees do not match or
            `prev_grad` is given.
        TypeError: `gamma` is a schedule, a parameter is not floating point, or `updates` is a
            `MarsGrads` pair.

    Example:
        >>> import jax.numpy as jnp
        >>> from mars_optax import mars_momentum
        >>> momentum = mars_momentum(gamma=0.5, b1=0.9)
        >>> state = momentum.init(jnp.zeros(2))
        >>> m, state = momentum.update(jnp.array([1.0, 2.0]), state)
        >>> print(m, state.ema)
        [0.55 1.1 ] [0.1 0.2]

    References:
        Ma and Yarats, `Quasi-hyperbolic momentum <https://arxiv.org/abs/1810.06801>`_, 2018.
    """
    if callable(gamma):
        raise TypeError(
            f"`gamma` must be a number, got the schedule {gamma!r}: use "
            "optax.chain(mars_vr(gamma, b1), optax.ema(b1, debias=False))."
        )
    _checks.check_non_negative("gamma", gamma)
    _checks.check_decay("b1", b1)

    def init_fn(params):
        _checks.check_inexact("params", params)
        return MarsMomentumState(optax.tree.zeros_like(params))

    def update_fn(updates, state, params=None, *, prev_grad=None, **unused_extra_args):
        del params, unused_extra_args
        reject_pair(updates)
        _reject_prev_grad(prev_grad)
        _checks.check_same_tree("updates", updates, "the state's `ema`", state.ema)

        def average(g, ema):
            if g is None:
                return None, ema
            dtype = jnp.promote_types(jnp.result_type(g, ema), jnp.float32)
            new = b1 * ema.astype(dtype) + (1 - b1) * g.astype(dtype)
            new, total = _hold(new, _sum_of_tensors(new, None))
            m = (1 - gamma) * new + gamma * g.astype(dtype)
            return m.astype(g.dtype), _store(new, ema, None, total)

        grads, structure = jax.tree.flatten(updates, is_leaf=_checks.is_none)
        emas = jax.tree.leaves(state.ema, is_leaf=_checks.is_none)
        pairs = [average(g, ema) for g, ema in zip(grads, emas, strict=True)]
        ema = structure.unflatten([ema for _, ema in pairs])
        return structure.unflatten([m for m, _ in pairs]), MarsMomentumState(ema)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_dimension_numbers(spec: WeightDimensionNumbers, params: Any) -> None:
    leaves = jax.tree.leaves(params, is_leaf=_checks.is_none)
    for numbers, leaf in zip(resolve(spec, params), leaves, strict=True):
        if numbers is not None and leaf is not None:
            matrix_axes(numbers, leaf.shape)


def _previous_gradient(updates: Any, state: MarsVRState, prev_grad: Any, exact: bool) -> Any:
    if exact and prev_grad is None:
        raise ValueError(
            "`prev_grad` is missing, got None, and `mars_vr(exact=True)` never falls back: wrap "
            "the whole optimizer in `mars_optax.exact` and hand it the pair from "
            "`mars_optax.value_and_grads`, or pass `prev_grad=` to `update`."
        )
    if not exact:
        _reject_prev_grad(prev_grad)
        _checks.check_same_tree("updates", updates, "the state's `last_grad`", state.last_grad)
        return state.last_grad
    # `optax.masked` and `optax.partition` mask the updates only, so prev_grad is masked here.
    with contextlib.suppress(ValueError):  # the check below says what differs
        prev_grad = _masked_like(updates, prev_grad)
    _checks.check_same_tree("prev_grad", prev_grad, "`updates`", updates)
    return prev_grad


def _masked_like(like: Any, tree: Any) -> Any:
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(lambda m, x: m if is_masked(m) else x, like, tree, is_leaf=is_masked)


def _reject_prev_grad(prev_grad: Any) -> None:
    if prev_grad is not None:
        raise ValueError(
            "`prev_grad` was given, but this optimizer is approximate and would not use it: build "
            "it with `exact=True`, or leave `prev_grad` out."
        )


def _correction_scale(gamma: jax.typing.ArrayLike, b1: jax.typing.ArrayLike) -> Any:
    """k = γ·b1/(1−b1), in float32 or wider: 1−b1 cancels badly in low precision."""
    if isinstance(gamma, jax.Array):
        gamma = gamma.astype(jnp.promote_types(gamma.dtype, jnp.float32))
    if isinstance(b1, jax.Array):
        b1 = b1.astype(jnp.promote_types(b1.dtype, jnp.float32))
    return gamma * b1 / (1 - b1)


def _correct(grad: jax.Array, previous: jax.Array, scale: Any) -> jax.Array:
    dtype = jnp.promote_types(jnp.result_type(grad, previous), jnp.float32)
    grad, previous = jnp.asarray(grad, dtype), jnp.asarray(previous, dtype)
    return grad + jnp.asarray(scale, jnp.finfo(dtype).dtype) * (grad - previous)


def _squared_norm(c: jax.Array, spec: MuonDimensionNumbers | None) -> jax.Array:
    """Of each matrix where dimension numbers are given; `c` is float32 or wider."""
    squares = jnp.square(jnp.real(c)) + (jnp.square(jnp.imag(c)) if jnp.iscomplexobj(c) else 0)
    return _sum_of_tensors(squares, spec)


def _absolute_sum(c: jax.Array, spec: MuonDimensionNumbers | None) -> jax.Array:
    """As `_squared_norm`, and overflows later."""
    return _sum_of_tensors(jnp.abs(c), spec)


def _sum_of_tensors(x: jax.Array, spec: MuonDimensionNumbers | None) -> jax.Array:
    """Sums over the matrix axes where dimension numbers are given, or over all; kept as axes."""
    axes = None
    if spec is not None:
        matrix = matrix_axes(spec, x.shape)
        axes = matrix.reduction + matrix.output
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.sum(x, axis=axes, dtype=dtype, keepdims=spec is not None)


def _hold(x: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`x` for uses that wait for `total`, which is summed over it.

    On TPUs the pass that sums leaves a copy on chip: XLA reads buffers that it may overwrite from
    HBM each time, 40 bytes for a parameter of MARS-AdamW instead of 36.
    """
    if not isinstance(x, jax.core.Tracer) or varying(x) != varying(total):  # nothing to arrange
        return x, total

    def copy(x, total):
        one = jax.lax.optimization_barrier(jnp.ones((), x.dtype))  # XLA would drop a plain copy
        return jax.lax.optimization_barrier((x * one, total))

    return jax.lax.platform_dependent(x, total, tpu=copy, default=lambda x, total: (x, total))


def _after(size: jax.Array | None, scale: Any) -> Any:
    """`scale`, as if it depended on the size: then XLA's CPU backend is done with one tensor before
    it corrects the next, in memory that is still cached. Other backends would lose by an order."""
    if not isinstance(size, jax.core.Tracer) or varying(size):  # by which all others would vary
        return scale
    wait = lambda n: jnp.where(jnp.any(n < 0), 1.0, 0.0)  # noqa: E731  # 0, but XLA cannot know
    return scale + jax.lax.platform_dependent(size, cpu=wait, default=lambda n: jnp.zeros(()))


def _clip(corrected: list, squared_norms: list, clip_norm: Any, scope: str) -> list:
    """Divides by max(1, norm / clip_norm); a leaf may be None, and has no norm then."""
    if scope == "global":
        total = sum(jnp.sum(s) for s in squared_norms if s is not None)
        squared_norms = [total] * len(squared_norms)

    def clip(c, squared):
        norm = jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), squared)
        return c / jnp.maximum(1.0, norm / clip_norm).astype(squared.dtype)

    pairs = zip(corrected, squared_norms, strict=True)
    return [None if c is None else clip(c, squared) for c, squared in pairs]


def _store(
    new: jax.Array, old: jax.Array, spec: MuonDimensionNumbers | None, total: jax.Array
) -> jax.Array:
    """`new` in the dtype of `old`, or `old` for each tensor whose `total` is not finite."""
    if new.dtype == jnp.float32 and old.dtype == jnp.bfloat16:  # whose range ends 0.4 % earlier
        new = jnp.clip(new, jnp.finfo(old.dtype).min, jnp.finfo(old.dtype).max)
    stored = jnp.asarray(new, old.dtype)
    if jnp.finfo(old.dtype).maxexp < jnp.finfo(new.dtype).maxexp:  # it may still overflow
        total = _sum_of_tensors(stored, spec)
    return jnp.where(jnp.isfinite(total), stored, old)
