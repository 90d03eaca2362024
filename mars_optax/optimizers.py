"""The five MARS optimizers, each a chain of public parts with an AdamW fallback beside it."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mars_optax import _checks
from mars_optax.dimension_numbers import WeightDimensionNumbers, resolve
from mars_optax.orthogonalization import STANDARD_COEFFS, Coefficients, scale_by_orthogonalization
from mars_optax.previous_iterate import exact as exact_wrapper
from mars_optax.previous_iterate import reject_pair
from mars_optax.variance_reduction import mars_momentum, mars_vr

MaskOrFn: TypeAlias = Any | Callable[[optax.Params], Any] | None


def keep_dtypes(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs an optimizer in float32 or wider, and keeps the dtypes of its state and parameters.

    Gradients and parameters are widened on the way in; updates are returned in the dtype of the
    parameters (of the gradients where `params` is not given), and every leaf of the new state in
    the dtype that it had. So bfloat16 parameters with float32 gradients, or float32
    hyperparameters injected into a bfloat16 optimizer, do not change dtypes under `jax.lax.scan`,
    and float16 does not lose `eps`.

    Args:
        inner: The optimizer.

    Returns:
        A `GradientTransformationExtraArgs` with the state of `inner`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from mars_optax import keep_dtypes
        >>> optimizer = keep_dtypes(optax.adam(1e-3))
        >>> params = jnp.ones(2, jnp.float16)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(jnp.zeros(2, jnp.float32), state, params)
        >>> print(updates.dtype, updates)  # plain Adam gives NaN: eps rounds to 0
        float16 [-0. -0.]
    """
    inner = optax.with_extra_args_support(inner)

    def widen(tree):
        return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)

    def update_fn(updates, state, params=None, **extra_args):
        wide_params = None if params is None else widen(params)
        new_updates, new_state = inner.update(widen(updates), state, wide_params, **extra_args)
        new_updates = optax.tree.cast_like(new_updates, updates if params is None else params)
        return new_updates, optax.tree.cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def mars_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: jax.typing.ArrayLike = 0.0,
    gamma: optax.ScalarOrSchedule = 0.025,
    *,
    clip_norm: jax.typing.ArrayLike | None = 1.0,
    clip_scope: Literal["tensor", "global"] = "tensor",
    exact: bool = False,
    preprocess: optax.GradientTransformation | None = None,
    grad_dtype: jax.typing.DTypeLike | None = None,
    weight_decay_mask: MaskOrFn = None,
    mars_mask: MaskOrFn = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike = 0.1,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-AdamW: AdamW on the corrected gradient of :func:`mars_optax.mars_vr`.

    .. math::
        m_t &= b_1 m_{t-1} + (1 - b_1) \tilde c_t \\
        v_t &= b_2 v_{t-1} + (1 - b_2) \tilde c_t^2 \\
        x_{t+1} &= x_t - \eta_t \left( \hat m_t / (\sqrt{\hat v_t} + \epsilon)
            + \lambda x_t \right)

    with bias-corrected :math:`\hat m_t, \hat v_t`. Parameters that are not matrices get plain
    AdamW, as in the authors' code. It is a chain of public parts for the matrices,
    ``optax.chain(mars_vr(gamma, b1), optax.scale_by_adam(b1, b2, eps),
    optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))``, in an
    `optax.partition`, in :func:`mars_optax.keep_dtypes`, and in :func:`mars_optax.exact` for
    ``exact=True``.

    Args:
        learning_rate: The step size :math:`\eta`, a number or a schedule. The authors train
            GPT-2 small at 6e-3, ten times their rate for AdamW.
        b1: Decay rate of the first moment, and of the correction, in [0, 1).
        b2: Decay rate of the second moment, in [0, 1).
        eps: Term added to the denominator.
        weight_decay: Decoupled decay :math:`\lambda`, multiplied by the learning rate as in Optax.
        gamma: Scale of the variance reduction, a number or a schedule; 0 gives AdamW.
        clip_norm: Largest norm of the corrected gradient; None turns the clip off.
        clip_scope: "tensor" or "global", see :func:`mars_optax.mars_vr`.
        exact: Whether to correct by the gradient at the previous parameters; `update` then takes a
            pair from :func:`mars_optax.value_and_grads`, or `prev_grad=`.
        preprocess: For ``exact=True``: a stateless transformation applied to each of the two
            gradients, such as ``optax.clip_by_global_norm(1.0)``. In approximate mode chain it in
            front instead.
        grad_dtype: Dtype of the stored gradient in approximate mode; default: the parameter's.
        weight_decay_mask: Which parameters decay (True), of all: a tree of bools (or a prefix of
            one), or a callable that makes it from the parameters. Default: all.
        mars_mask: Which parameters get MARS (True) and which the AdamW fallback (False): a tree of
            bools (or a prefix of one), or a callable that makes it from the parameters. Default:
            the matrices, which are the parameters with exactly 2 axes or, where
            `weight_dimension_numbers` are given, exactly those that have them.
        adam_learning_rate: Learning rate of the fallback; default: `learning_rate`.
        adam_b1: Decay rate of the fallback's first moment.
        adam_b2: Decay rate of the fallback's second moment.
        adam_eps: Term added to the fallback's denominator.
        adam_weight_decay: Decoupled decay of the fallback.
        weight_dimension_numbers: A tree (or a prefix of one, or a callable that makes it from the
            parameters) of `optax.contrib.MuonDimensionNumbers` or None. Axes in neither list are
            batch axes: each of their entries is a matrix of its own. None: no matrix.

    Returns:
        A `GradientTransformationExtraArgs`; `update` needs `params` and ignores unknown extra
        arguments. Updates and states keep the parameters' dtypes; arithmetic is in float32 or
        wider. Memory beside the parameters: 3 trees of their size for MARS parameters, 2 for the
        fallback's; in exact mode 2 and the copy of the previous parameters.

    Raises:
        ValueError: An argument is out of range; a mask or dimension numbers do not fit the
            parameters; in `update`, `params` or the previous gradient is missing, or trees do not
            match.
        TypeError: A parameter is not floating point, a mask holds other than bools, or a pair is
            handed to an approximate optimizer.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from mars_optax import mars_adamw
        >>> schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 10, 100)
        >>> optimizer = mars_adamw(schedule, weight_decay=0.01)
        >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> state = optimizer.init(params)
        >>> grads = {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}
        >>> updates, state = optimizer.update(grads, state, params)
        >>> params = optax.apply_updates(params, updates)

    References:
        Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2024, Algorithm 2.
    """
    _check_decays(b2=b2)
    _checks.check_non_negative("eps", eps)
    return _with_adamw_fallback(
        lambda _: optax.scale_by_adam(b1, b2, eps),
        of_momentum=False,
        learning_rate=learning_rate,
        b1=b1,
        weight_decay=weight_decay,
        gamma=gamma,
        clip_norm=clip_norm,
        clip_scope=clip_scope,
        exact=exact,
        preprocess=preprocess,
        grad_dtype=grad_dtype,
        weight_decay_mask=weight_decay_mask,
        mars_mask=mars_mask,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        weight_dimension_numbers=weight_dimension_numbers,
    )


def mars_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.0,
    gamma: optax.ScalarOrSchedule = 0.025,
    *,
    clip_norm: jax.typing.ArrayLike | None = 1.0,
    clip_scope: Literal["tensor", "global"] = "tensor",
    exact: bool = False,
    preprocess: optax.GradientTransformation | None = None,
    grad_dtype: jax.typing.DTypeLike | None = None,
    weight_decay_mask: MaskOrFn = None,
    mars_mask: MaskOrFn = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike = 0.1,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-Lion: the sign of the momentum of the corrected gradient.

    .. math::
        m_t &= b_1 m_{t-1} + (1 - b_1) \tilde c_t \\
        x_{t+1} &= x_t - \eta_t ( \operatorname{sign}(m_t) + \lambda x_t )

    It has one beta. A chain of :func:`mars_optax.mars_vr`, ``optax.ema(b1, debias=False)`` and
    ``optax.scale_by_sign()``. Without the clip, ``gamma=(b2 - lion_b1) / b2`` with ``b1=b2`` is
    Lion's own update with (lion_b1, b2).

    Args:
        learning_rate: The step size :math:`\eta`, a number or a schedule. Lion's rates
            suit it, about a tenth of AdamW's.
        b1: Decay rate of the momentum, and of the correction, in [0, 1).
        weight_decay: Decoupled decay :math:`\lambda`, multiplied by the learning rate.
        gamma: Scale of the variance reduction, a number or a schedule.
        clip_norm, clip_scope, exact, preprocess, grad_dtype, weight_decay_mask, mars_mask,
        adam_learning_rate, adam_b1, adam_b2, adam_eps, adam_weight_decay,
        weight_dimension_numbers: As in :func:`mars_optax.mars_adamw`.

    Returns:
        A `GradientTransformationExtraArgs`, as :func:`mars_optax.mars_adamw` returns. Memory beside
        the parameters: 2 trees of their size; 1 without the clip in approximate mode with `gamma` a
        number and no `grad_dtype`, where :func:`mars_optax.mars_momentum` does the same.

    Raises:
        ValueError, TypeError: As in :func:`mars_optax.mars_adamw`.

    Example:
        >>> import jax.numpy as jnp
        >>> from mars_optax import mars_lion
        >>> optimizer = mars_lion(3e-4, weight_decay=0.1)
        >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(params, state, params)

    References:
        Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2024, Algorithm 3.
    """
    return _with_adamw_fallback(
        lambda _: optax.scale_by_sign(),
        learning_rate=learning_rate,
        b1=b1,
        weight_decay=weight_decay,
        gamma=gamma,
        clip_norm=clip_norm,
        clip_scope=clip_scope,
        exact=exact,
        preprocess=preprocess,
        grad_dtype=grad_dtype,
        weight_decay_mask=weight_decay_mask,
        mars_mask=mars_mask,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        weight_dimension_numbers=weight_dimension_numbers,
    )


def mars_shampoo(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.0,
    gamma: optax.ScalarOrSchedule = 0.025,
    *,
    ns_steps: jax.typing.ArrayLike = 5,
    ns_coeffs: Coefficients = STANDARD_COEFFS,
    ns_dtype: jax.typing.DTypeLike | None = None,
    ns_gram: bool | None = None,
    clip_norm: jax.typing.ArrayLike | None = 1.0,
    clip_scope: Literal["tensor", "global"] = "tensor",
    exact: bool = False,
    preprocess: optax.GradientTransformation | None = None,
    grad_dtype: jax.typing.DTypeLike | None = None,
    weight_decay_mask: MaskOrFn = None,
    mars_mask: MaskOrFn = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike = 0.1,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-Shampoo: the orthogonalized momentum of the corrected gradient.

    .. math::
        m_t &= b_1 m_{t-1} + (1 - b_1) \tilde c_t \\
        x_{t+1} &= x_t - \eta_t \left( \sqrt{\max(1, \text{fan\_out} / \text{fan\_in})}
            \operatorname{NS}(m_t) + \lambda x_t \right)

    A chain of :func:`mars_optax.mars_vr`, ``optax.ema(b1, debias=False)`` and
    ``scale_by_orthogonalization(shape_factor="spectral")``. A 2-axis parameter is (in, out), as in
    Flax; name the axes of other layouts by `weight_dimension_numbers`.

    Args:
        learning_rate: The step size :math:`\eta`, a number or a schedule. Muon's rates suit
            it, such as 2e-2.
        b1: Decay rate of the momentum, and of the correction, in [0, 1).
        weight_decay: Decoupled decay :math:`\lambda`, multiplied by the learning rate.
        gamma: Scale of the variance reduction, a number or a schedule.
        ns_steps: Number of Newton–Schulz steps, see :func:`mars_optax.orthogonalize`.
        ns_coeffs: Their coefficients, (a, b, c) or one such row for each step.
        ns_dtype: Dtype of the iteration, such as `jnp.bfloat16`; default: that of the arithmetic.
        ns_gram: Whether it runs on the small Gram matrix; default: where that is less work.
        clip_norm, clip_scope, exact, preprocess, grad_dtype, weight_decay_mask, mars_mask,
        adam_learning_rate, adam_b1, adam_b2, adam_eps, adam_weight_decay,
        weight_dimension_numbers: As in :func:`mars_optax.mars_adamw`. Parameters under MARS must
            be matrices or have dimension numbers.

    Returns:
        A `GradientTransformationExtraArgs`, as :func:`mars_optax.mars_adamw` returns. Memory beside
        the parameters: 2 trees of their size; 1 without the clip in approximate mode with `gamma` a
        number and no `grad_dtype`, where :func:`mars_optax.mars_momentum` does the same.

    Raises:
        ValueError, TypeError: As in :func:`mars_optax.mars_adamw`.

    Example:
        >>> import jax.numpy as jnp
        >>> from mars_optax import mars_shampoo
        >>> optimizer = mars_shampoo(2e-2, weight_decay=0.01)
        >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(params, state, params)

    References:
        Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2024, Algorithm 4.
    """
    return _with_adamw_fallback(
        lambda numbers: scale_by_orthogonalization(
            ns_steps=ns_steps,
            ns_coeffs=ns_coeffs,
            ns_dtype=ns_dtype,
            ns_gram=ns_gram,
            weight_dimension_numbers=numbers,
            shape_factor="spectral",
        ),
        learning_rate=learning_rate,
        b1=b1,
        weight_decay=weight_decay,
        gamma=gamma,
        clip_norm=clip_norm,
        clip_scope=clip_scope,
        exact=exact,
        preprocess=preprocess,
        grad_dtype=grad_dtype,
        weight_decay_mask=weight_decay_mask,
        mars_mask=mars_mask,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        weight_dimension_numbers=weight_dimension_numbers,
    )


def mars_m(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.1,
    gamma: optax.ScalarOrSchedule = 0.025,
    *,
    ns_steps: jax.typing.ArrayLike = 5,
    ns_coeffs: Coefficients = STANDARD_COEFFS,
    ns_dtype: jax.typing.DTypeLike | None = None,
    ns_gram: bool | None = None,
    clip_norm: jax.typing.ArrayLike | None = 1.0,
    clip_scope: Literal["tensor", "global"] = "tensor",
    exact: bool = False,
    preprocess: optax.GradientTransformation | None = None,
    grad_dtype: jax.typing.DTypeLike | None = None,
    weight_decay_mask: MaskOrFn = None,
    mars_mask: MaskOrFn = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike = 0.1,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-M: Muon with variance reduction.

    .. math::
        m_t &= b_1 m_{t-1} + (1 - b_1) \tilde c_t \\
        x_{t+1} &= x_t - \eta_t \left( 0.2 \sqrt{\max(\text{fan\_in}, \text{fan\_out})}
            \operatorname{NS}(m_t) + \lambda x_t \right)

    without Nesterov's momentum. A chain of :func:`mars_optax.mars_vr`,
    ``optax.ema(b1, debias=False)`` and ``scale_by_orthogonalization(shape_factor="rms")``.
    Embeddings and the output head are matrices too, unless `mars_mask` leaves them to AdamW, as
    is usual for Muon.

    Args:
        learning_rate: The step size :math:`\eta`, a number or a schedule. Updates have the
            size of AdamW's, so AdamW's rates are a good start.
        b1: Decay rate of the momentum, and of the correction, in [0, 1).
        weight_decay: Decoupled decay :math:`\lambda`, multiplied by the learning rate.
        gamma: Scale of the variance reduction, a number or a schedule.
        ns_steps: Number of Newton–Schulz steps, see :func:`mars_optax.orthogonalize`.
        ns_coeffs: Their coefficients, (a, b, c) or one such row for each step.
        ns_dtype: Dtype of the iteration, such as `jnp.bfloat16`; default: that of the arithmetic.
        ns_gram: Whether it runs on the small Gram matrix; default: where that is less work.
        clip_norm, clip_scope, exact, preprocess, grad_dtype, weight_decay_mask, mars_mask,
        adam_learning_rate, adam_b1, adam_b2, adam_eps, adam_weight_decay,
        weight_dimension_numbers: As in :func:`mars_optax.mars_adamw`. Parameters under MARS must
            be matrices or have dimension numbers.

    Returns:
        A `GradientTransformationExtraArgs`, as :func:`mars_optax.mars_adamw` returns. Memory beside
        the parameters: 2 trees of their size; 1 without the clip in approximate mode with `gamma` a
        number and no `grad_dtype`, where :func:`mars_optax.mars_momentum` does the same.

    Raises:
        ValueError, TypeError: As in :func:`mars_optax.mars_adamw`.

    Example:
        >>> import jax.numpy as jnp
        >>> from mars_optax import mars_m
        >>> optimizer = mars_m(3e-3, weight_decay=0.1)
        >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(params, state, params)

    References:
        Liu et al., `MARS-M <https://arxiv.org/abs/2510.21800>`_, 2025, Algorithm 1.
    """
    return _with_adamw_fallback(
        lambda numbers: scale_by_orthogonalization(
            ns_steps=ns_steps,
            ns_coeffs=ns_coeffs,
            ns_dtype=ns_dtype,
            ns_gram=ns_gram,
            weight_dimension_numbers=numbers,
            shape_factor="rms",
        ),
        learning_rate=learning_rate,
        b1=b1,
        weight_decay=weight_decay,
        gamma=gamma,
        clip_norm=clip_norm,
        clip_scope=clip_scope,
        exact=exact,
        preprocess=preprocess,
        grad_dtype=grad_dtype,
        weight_decay_mask=weight_decay_mask,
        mars_mask=mars_mask,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        weight_dimension_numbers=weight_dimension_numbers,
    )


def mars_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.0,
    gamma: optax.ScalarOrSchedule = 0.025,
    *,
    clip_norm: jax.typing.ArrayLike | None = 1.0,
    clip_scope: Literal["tensor", "global"] = "tensor",
    exact: bool = False,
    preprocess: optax.GradientTransformation | None = None,
    grad_dtype: jax.typing.DTypeLike | None = None,
    weight_decay_mask: MaskOrFn = None,
    mars_mask: MaskOrFn = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike = 0.1,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-SGDM: gradient descent with the momentum of the corrected gradient.

    .. math::
        m_t &= b_1 m_{t-1} + (1 - b_1) \tilde c_t \\
        x_{t+1} &= x_t - \eta_t ( m_t + \lambda x_t )

    A chain of :func:`mars_optax.mars_vr` and ``optax.ema(b1, debias=False)``. In exact mode without
    the clip, ``gamma=1`` is STORM: :math:`m_t = g_t + b_1 (m_{t-1} - g^-_t)`.

    Args:
        learning_rate: The step size :math:`\eta`, a number or a schedule. It multiplies the
            gradient itself: rates of SGD, with an average instead of a sum of gradients.
        b1: Decay rate of the momentum, and of the correction, in [0, 1).
        weight_decay: Decoupled decay :math:`\lambda`, multiplied by the learning rate.
        gamma: Scale of the variance reduction, a number or a schedule.
        clip_norm, clip_scope, exact, preprocess, grad_dtype, weight_decay_mask, mars_mask,
        adam_learning_rate, adam_b1, adam_b2, adam_eps, adam_weight_decay,
        weight_dimension_numbers: As in :func:`mars_optax.mars_adamw`.

    Returns:
        A `GradientTransformationExtraArgs`, as :func:`mars_optax.mars_adamw` returns. Memory beside
        the parameters: 2 trees of their size; 1 without the clip in approximate mode with `gamma` a
        number and no `grad_dtype`, where :func:`mars_optax.mars_momentum` does the same.

    Raises:
        ValueError, TypeError: As in :func:`mars_optax.mars_adamw`.

    Example:
        >>> import jax.numpy as jnp
        >>> from mars_optax import mars_sgdm
        >>> optimizer = mars_sgdm(0.1, weight_decay=0.0)
        >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(params, state, params)

    References:
        Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2024, Algorithm 1.
    """
    return _with_adamw_fallback(
        lambda _: optax.identity(),
        learning_rate=learning_rate,
        b1=b1,
        weight_decay=weight_decay,
        gamma=gamma,
        clip_norm=clip_norm,
        clip_scope=clip_scope,
        exact=exact,
        preprocess=preprocess,
        grad_dtype=grad_dtype,
        weight_decay_mask=weight_decay_mask,
        mars_mask=mars_mask,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        weight_dimension_numbers=weight_dimension_numbers,
    )


def _check_decays(**decays: Any) -> None:
    for name, value in decays.items():
        _checks.check_decay(name, value)


def _with_adamw_fallback(
    preconditioner: Callable[[WeightDimensionNumbers], optax.GradientTransformation],
    *,
    of_momentum: bool = True,
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike,
    weight_decay: jax.typing.ArrayLike,
    gamma: optax.ScalarOrSchedule,
    clip_norm: jax.typing.ArrayLike | None,
    clip_scope: Literal["tensor", "global"],
    exact: bool,
    preprocess: optax.GradientTransformation | None,
    grad_dtype: jax.typing.DTypeLike | None,
    weight_decay_mask: MaskOrFn,
    mars_mask: MaskOrFn,
    adam_learning_rate: optax.ScalarOrSchedule | None,
    adam_b1: jax.typing.ArrayLike,
    adam_b2: jax.typing.ArrayLike,
    adam_eps: jax.typing.ArrayLike,
    adam_weight_decay: jax.typing.ArrayLike,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformationExtraArgs:
    """Variance reduction, preconditioner, decay and rate for matrices, AdamW for the others.

    The preconditioner takes the momentum, or with `of_momentum=False` the corrected gradient.
    """
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    _checks.check_learning_rate("learning_rate", learning_rate)
    _checks.check_learning_rate("adam_learning_rate", adam_learning_rate)
    _checks.check_non_negative("weight_decay", weight_decay)
    _checks.check_non_negative("adam_weight_decay", adam_weight_decay)
    _checks.check_non_negative("adam_eps", adam_eps)
    _check_decays(b1=b1, adam_b1=adam_b1, adam_b2=adam_b2)
    _checks.check_choice("exact", exact, (False, True))
    if preprocess is not None and not exact:
        raise ValueError(
            f"`preprocess` is for exact mode, got {preprocess!r} with exact=False: put it in front "
            "of the optimizer with `optax.chain`."
        )

    constant = all(isinstance(value, int | float | np.number) for value in (gamma, b1))

    def matrices(numbers: WeightDimensionNumbers, decayed: Any) -> optax.GradientTransformation:
        correction = mars_vr(
            gamma,
            b1,
            clip_norm=clip_norm,
            clip_scope=clip_scope,
            exact=exact,
            grad_dtype=grad_dtype,
            weight_dimension_numbers=numbers,
        )
        links = [correction]
        if of_momentum and not exact and clip_norm is None and grad_dtype is None and constant:
            links = [mars_momentum(gamma, b1)]
        elif of_momentum:
            links.append(optax.ema(b1, debias=False))
        return optax.chain(
            *links,
            preconditioner(numbers),
            optax.add_decayed_weights(weight_decay, decayed),
            optax.scale_by_learning_rate(learning_rate),
        )

    def others(decayed: Any) -> optax.GradientTransformation:
        return optax.adamw(
            adam_learning_rate,
            adam_b1,
            adam_b2,
            adam_eps,
            weight_decay=adam_weight_decay,
            mask=decayed,
        )

    def partitioned(params: optax.Params) -> optax.GradientTransformationExtraArgs:
        """Callables are called here, on all parameters: further in, they would see masked trees."""
        numbers = _numbers_of(weight_dimension_numbers, params)
        decayed = weight_decay_mask
        if decayed is not None:
            decayed = _mask_of("weight_decay_mask", decayed, params)
        is_mars = _is_mars(mars_mask, numbers, params)
        labels = jax.tree.map(lambda m: "mars" if m else "adamw", is_mars)
        # As a function: Optax would call a tree that is callable, as Equinox's modules are.
        mask = None if decayed is None else lambda _: decayed
        parts = {"mars": matrices(numbers, mask), "adamw": others(mask)}
        return keep_dtypes(optax.partition(parts, lambda _: labels))

    matrices(None, None)  # raises for invalid arguments

    def init_fn(params):
        _checks.check_inexact("params", params)
        return partitioned(params).init(params)

    def update_fn(updates, state, params=None, **extra_args):
        reject_pair(updates)
        if params is None:
            raise ValueError(
                "`params` is missing, got None: call `update(grads, state, params)`; weight decay "
                "needs them."
            )
        _checks.check_same_tree("updates", updates, "`params`", params)
        return partitioned(params).update(updates, state, params, **extra_args)

    optimizer = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return exact_wrapper(optimizer, preprocess=preprocess) if exact else optimizer


def _numbers_of(spec: WeightDimensionNumbers, params: Any) -> WeightDimensionNumbers:
    """Dimension numbers as a tree like `params`, or None where none are given."""
    if spec is None:
        return None
    structure = jax.tree.structure(params, is_leaf=_checks.is_none)
    return jax.tree.unflatten(structure, resolve(spec, params))


def _is_mars(mask: MaskOrFn, numbers: WeightDimensionNumbers, params: Any) -> Any:
    """A tree of bools like `params`: the parameters under MARS."""
    if mask is not None:
        return _mask_of("mars_mask", mask, params)
    if numbers is None:
        return jax.tree.map(lambda p: jnp.ndim(p) == 2, params)
    named = resolve(numbers, params)
    leaves = jax.tree.leaves(params, is_leaf=_checks.is_none)
    is_mars = [n is not None for n, p in zip(named, leaves, strict=True) if p is not None]
    return jax.tree.unflatten(jax.tree.structure(params), is_mars)


def _mask_of(name: str, mask: Any, params: Any) -> Any:
    """Resolves a mask (a tree, a prefix of one or a callable) to a tree of bools like `params`."""
    if not jax.tree.leaves(params):
        return jax.tree.map(lambda _: True, params)
    if _checks.is_function(mask):
        mask = mask(params)
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, bool | np.bool_):
            raise TypeError(
                f"`{name}` must hold bools, got {leaf!r}: write True or False for each parameter."
            )
    try:
        return jax.tree.map(lambda m, sub: jax.tree.map(lambda _: bool(m), sub), mask, params)
    except ValueError as error:
        raise ValueError(
            f"`{name}` must have the parameters' structure or be a prefix of it, got {mask!r}: "
            f"give each parameter True or False. ({error})"
        ) from error
