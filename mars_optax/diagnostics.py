"""What the correction does at a step, from the optimizer's state and the step's gradients."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mars_optax import _checks
from mars_optax.dimension_numbers import WeightDimensionNumbers, resolve
from mars_optax.previous_iterate import MarsGrads
from mars_optax.variance_reduction import (
    MarsVRState,
    _correct,
    _correction_scale,
    _masked_like,
    _squared_norm,
)

_MOMENTA = ("mu", "ema", "trace")  # as Optax's states call them


class MarsDiagnostics(NamedTuple):
    r"""Numbers of one step, each of shape () and dtype float32 or wider; a pytree.

    g is the gradient, :math:`g^-` the previous one (in exact mode that at the previous parameters
    on the same batch), both of all MARS parameters together, and :math:`\hat m` the bias-corrected
    momentum that was carried into the step.
    """

    correction: jax.Array
    """:math:`\\|k (g - g^-)\\| / \\|g\\|`, the size of the correction."""
    cosine: jax.Array
    """The cosine of g and :math:`g^-`."""
    clipped: jax.Array
    """The share of tensors (batch entries of dimension numbers count as such) that are clipped."""
    momentum_distance: jax.Array
    """:math:`\\|\\hat m - g\\| / \\|g\\|`."""
    noise_scale: jax.Array
    """How many times larger a batch would have to be for its gradient to be half noise."""
    removed: jax.Array | None
    """Exact mode: the share of the momentum's squared error that the correction removes."""


def diagnostics(
    state: optax.OptState,
    updates: optax.Updates | MarsGrads,
    *,
    gamma: optax.ScalarOrSchedule = 0.025,
    b1: jax.typing.ArrayLike = 0.95,
    clip_norm: jax.typing.ArrayLike | None = 1.0,
    clip_scope: Literal["tensor", "global"] = "tensor",
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> MarsDiagnostics:
    r"""What variance reduction does at a step, to choose γ by and to see whether it helps.

    Call it with the state *before* the step and the gradients that the step is about to take, as
    :func:`mars_optax.mars_vr` receives them: after the links in front of it and after the
    `preprocess` of :func:`mars_optax.exact`. It costs a few reductions over the gradients; call it
    at the steps you log.

    The noise scale is an estimate of :math:`\operatorname{tr}\Sigma / \|\nabla F\|^2`, in batches,
    where Σ is the covariance of a batch's gradient; times the batch size it is the simple noise
    scale of McCandlish et al. It needs two gradients with independent noise. Approximate mode has
    them, :math:`\tfrac12 \|g_t - g_{t-1}\|^2 / \langle g_t, g_{t-1} \rangle`; in exact mode, where
    both are taken on one batch, the momentum stands for the second,
    :math:`(\|g\|^2 - \langle g, \hat m \rangle) / \langle g, \hat m \rangle`, which counts the
    momentum's lag as noise. It is infinite where the inner product is not positive; average it over
    steps by its median.

    Removed error: without the clip :math:`m_t = b_1 (m_{t-1} + \gamma (g - g^-)) + (1 - b_1) g`,
    that is, the correction carries the momentum along by :math:`\gamma (g - g^-)`, and

    .. math::
        \text{removed} = 1 - \frac{\|\hat m + \gamma (g - g^-) - g\|^2}{\|\hat m - g\|^2}

    is the share of its squared distance to the new gradient that this saves; negative where it
    does harm. g stands for the full gradient: batch noise lengthens both distances, which hides a
    part of the gain, and the noise that :math:`g - g^-` shares with g feigns up to
    :math:`\gamma \|g - g^-\|^2 / \|\hat m - g\|^2`.

    Args:
        state: An optimizer state that holds one :class:`mars_optax.MarsVRState` and, in the same
            chain, the momentum that follows (Optax's `mu`, `ema` or `trace`), at any depth.
        updates: The gradients, or a `MarsGrads` pair in exact mode. Parameters that a partition or
            mask keeps from MARS are left out.
        gamma, b1, clip_norm, clip_scope, weight_dimension_numbers: Those of the optimizer.

    Returns:
        A :class:`mars_optax.diagnostics.MarsDiagnostics`. At the first step, where there is nothing
        to compare with, `cosine` is 0 in approximate mode.

    Raises:
        ValueError: `state` holds no or several MARS states, or no momentum beside it; `updates`
            have another tree structure; a pair is given in approximate mode, or none in exact mode.

    Example:
        >>> import jax.numpy as jnp
        >>> from mars_optax import mars_adamw
        >>> from mars_optax.diagnostics import diagnostics
        >>> optimizer = mars_adamw(3e-3, gamma=0.5)
        >>> params = {"w": jnp.ones((2, 2))}
        >>> state = optimizer.init(params)
        >>> _, state = optimizer.update({"w": jnp.full((2, 2), 0.2)}, state, params)
        >>> seen = diagnostics(state, {"w": jnp.full((2, 2), 0.1)}, gamma=0.5)
        >>> print(seen.correction, seen.cosine)  # k = 9.5
        9.5 1.0

    References:
        McCandlish et al., `An Empirical Model of Large-Batch Training
        <https://arxiv.org/abs/1812.06162>`_, 2018, for the noise scale.
    """
    _checks.check_choice("clip_scope", clip_scope, ("tensor", "global"))
    vr, momentum = _find(state)
    is_exact = vr.last_grad is None
    if is_exact != isinstance(updates, MarsGrads):
        raise ValueError(
            f"`updates` must be {'a MarsGrads pair' if is_exact else 'one gradient tree'} for this "
            f"state, got {type(updates).__name__}: pass what the optimizer takes."
        )
    grad, previous = updates if is_exact else (updates, vr.last_grad)
    try:
        trees = [_masked_like(momentum, tree) for tree in (grad, previous)]
    except ValueError as error:
        raise ValueError(
            "`updates` must have the tree structure of the state's momentum: take both from the "
            f"same parameters. ({error})"
        ) from error
    numbers = resolve(weight_dimension_numbers, trees[0])
    g, p, m = (_wide(tree) for tree in (*trees, momentum))
    if callable(gamma):
        gamma = gamma(vr.count)
    k = _correction_scale(gamma, b1)

    # Until the first step the momentum is zero, and so is its correction's denominator.
    unbiased = 1 / jnp.where(vr.count == 0, 1, 1 - jnp.asarray(b1, jnp.float32) ** vr.count)
    m = [unbiased * x for x in m]
    difference, lag = _subtract(g, p), _subtract(g, m)
    gg, pp, gp = _dot(g, g), _dot(p, p), _dot(g, p)
    squared_difference, squared_lag = _dot(difference, difference), _dot(lag, lag)
    removed = None
    if is_exact:
        rest = [x - gamma * y for x, y in zip(lag, difference, strict=True)]
        removed = _ratio(squared_lag - _dot(rest, rest), squared_lag)
        gm = _dot(g, m)
        noise_scale = _ratio(jnp.maximum(gg - gm, 0), gm, jnp.inf)
    else:
        noise_scale = _ratio(squared_difference / 2, gp, jnp.inf)
    return MarsDiagnostics(
        correction=k * jnp.sqrt(_ratio(squared_difference, gg)),
        cosine=_ratio(gp, jnp.sqrt(gg) * jnp.sqrt(pp)),
        clipped=_clipped_share(g, p, k, clip_norm, clip_scope, numbers),
        momentum_distance=jnp.sqrt(_ratio(squared_lag, gg)),
        noise_scale=noise_scale,
        removed=removed,
    )


def _find(state: Any) -> tuple[MarsVRState, Any]:
    """The MARS state and the momentum in the same chain."""

    def is_sought(x):
        return isinstance(x, MarsVRState) or any(
            name in getattr(x, "_fields", ()) for name in _MOMENTA
        )

    found, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_sought)
    states = [(path, x) for path, x in found if isinstance(x, MarsVRState)]
    if len(states) != 1:
        raise ValueError(
            f"`state` must hold one MarsVRState, got {len(states)}: pass the state of an optimizer "
            "with one `mars_vr` in it. Without the clip most optimizers keep one buffer instead; "
            'clip_norm=float("inf") keeps the last gradient.'
        )
    path, vr = states[0]
    momenta = [
        getattr(x, name)
        for other, x in found
        for name in _MOMENTA
        if other[: len(path) - 1] == path[:-1] and hasattr(x, name) and x is not vr
    ]
    if not momenta:
        raise ValueError(
            f"`state` has no momentum ({', '.join(_MOMENTA)}) beside its MarsVRState: chain "
            "`mars_vr` with a transformation that keeps one, such as `optax.scale_by_adam`."
        )
    return vr, momenta[0]


def _wide(tree: Any) -> list[jax.Array]:
    """The leaves in float32 or wider."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    return [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in leaves]


def _subtract(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _dot(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    """The real part of the inner product, over all leaves."""
    parts = [jnp.sum(jnp.real(x.conj() * y)) for x, y in zip(a, b, strict=True)]
    return jnp.sum(jnp.stack(parts)) if parts else jnp.zeros([])


def _ratio(a: jax.Array, b: jax.Array, otherwise: float = 0.0) -> jax.Array:
    """a / b, or `otherwise` where b is not positive."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), otherwise)


def _clipped_share(
    g: list, p: list, k: Any, clip_norm: Any, scope: str, numbers: list
) -> jax.Array:
    if clip_norm is None:
        return jnp.zeros([])
    if scope == "global":
        numbers = [None] * len(g)
    squared_norms = [
        _squared_norm(_correct(x, y, k), spec) for x, y, spec in zip(g, p, numbers, strict=True)
    ]
    if scope == "global":
        squared_norms = [jnp.asarray(sum(squared_norms))]
    return jnp.mean(jnp.concatenate([jnp.ravel(jnp.sqrt(n) > clip_norm) for n in squared_norms]))
