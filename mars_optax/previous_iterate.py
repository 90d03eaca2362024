"""The gradient at the previous iterate on the current batch, which exact mode needs."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mars_optax import _checks


class _PairType(type):
    """Puts the remedy into JAX's error where a pair meets code that knows only gradients."""

    def __repr__(cls) -> str:
        return (
            f"{cls.__module__}.{cls.__qualname__} (a pair of gradients: hand it to an optimizer "
            "built with exact=True or mars_optax.exact, and accumulate it with "
            "mars_optax.multi_steps instead of optax.MultiSteps)"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarsGrads(metaclass=_PairType):
    """A pair of gradient trees taken on the same batch; a pytree.

    Attributes:
        grad: The gradient at the current parameters.
        prev_grad: The gradient at the previous parameters, a tree like `grad`.

    Example:
        >>> from mars_optax import MarsGrads
        >>> grad, prev_grad = MarsGrads(grad=1.0, prev_grad=2.0)
    """

    grad: optax.Updates
    prev_grad: optax.Updates

    def __iter__(self) -> Iterator[optax.Updates]:
        return iter((self.grad, self.prev_grad))


def reject_pair(updates: Any) -> None:
    """Raises where a pair reaches a transformation that takes one gradient."""
    if isinstance(updates, MarsGrads):
        raise TypeError(
            "`updates` must be one gradient tree here, got a `MarsGrads` pair: build the optimizer "
            "with `exact=True`, or wrap it in `mars_optax.exact`."
        )


class ExactState(NamedTuple):
    """State of :func:`exact`."""

    prev_params: optax.Params
    inner_state: optax.OptState


def exact(
    inner: optax.GradientTransformation,
    *,
    preprocess: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Supplies the previous-iterate gradient to an optimizer built on ``mars_vr(exact=True)``.

    It keeps the parameters of the step before, :math:`x_{t-1}`, so that
    :func:`mars_optax.value_and_grads` can take :math:`g^-_t = \nabla f(x_{t-1}, \xi_t)` on the
    current batch. Before the first step :math:`x_0 := x_1`, so :math:`c_1 = g_1`.

    Make it the outermost wrapper, so that it sees all parameters. What must see each of the two
    gradients goes into `preprocess`; a link in front of this wrapper would clip the pair by its
    joint norm, which is wrong and cannot be seen from inside. Accumulate gradients with
    :func:`mars_optax.multi_steps`: `optax.MultiSteps` raises on a pair, and averages only the
    gradients where `prev_grad=` is passed beside them, which is silently wrong.

    Non-finite gradients: guard with ``exact(optax.apply_if_finite(inner, n))``. A non-finite entry
    in either gradient, or a leaf whose sum overflows, then loses exactly that step: a bad
    `prev_grad` makes the gradient handed to `inner` NaN, so that the guard counts it, and
    `prev_params` stay. Where no guard inside rejects a step whose `prev_grad` alone is not finite
    (``optax.apply_if_finite(exact(inner), n)`` does not see it), the update is zero and the state
    stays.

    Args:
        inner: The optimizer, with ``mars_vr(exact=True)`` or another link in it that takes
            `prev_grad` as an extra argument; Optax's own links ignore it.
        preprocess: A stateless transformation applied to each of the two gradients on its own,
            such as ``optax.clip_by_global_norm(1.0)``.

    Returns:
        A `GradientTransformationExtraArgs`. `update` takes a :class:`MarsGrads` pair as `updates`,
        or gradients and `prev_grad=`; it needs `params`. The state is an `ExactState`:
        `prev_params` (a copy, safe to donate, like the parameters) and `inner_state`.

    Raises:
        ValueError: In `update`: `params` or the previous gradient is missing, it is given twice,
            trees do not match; in `init`: `preprocess` keeps a state.
        TypeError: A parameter is not floating point.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mars_optax import exact, mars_vr, value_and_grads
        >>> optimizer = exact(
        ...     optax.chain(mars_vr(0.1, exact=True), optax.adam(1e-1, b1=0.95)),
        ...     preprocess=optax.clip_by_global_norm(1.0),
        ... )
        >>> loss_fn = lambda params, batch: jnp.sum((params - batch) ** 2)
        >>> @jax.jit
        ... def step(params, state, batch):
        ...     loss, grads = value_and_grads(loss_fn)(params, batch, state=state)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     return optax.apply_updates(params, updates), state, loss
        >>> params = jnp.zeros(2)
        >>> state = optimizer.init(params)
        >>> for batch in (1.0, 1.2, 0.9):
        ...     params, state, loss = step(params, state, batch)

    References:
        Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2024, Algorithm 1.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        _checks.check_inexact("params", params)
        if preprocess is not None and jax.tree.leaves(preprocess.init(params)):
            raise ValueError(
                f"`preprocess` must be stateless, got {preprocess!r}, whose state would have to be "
                "kept for each gradient: put it inside `inner`."
            )
        return ExactState(jax.tree.map(_copy, params), inner.init(params))

    def update_fn(updates, state, params=None, *, prev_grad=None, **extra_args):
        grad, prev_grad = _as_pair(updates, prev_grad)
        if params is None:
            raise ValueError(
                "`params` is missing, got None: call `update(grads, state, params)`; they become "
                "the next step's previous parameters."
            )
        _checks.check_same_tree("updates", grad, "`params`", params)
        _checks.check_same_tree("prev_grad", prev_grad, "`updates`", grad)
        if preprocess is not None:
            grad, _ = preprocess.update(grad, preprocess.init(params), params)
            prev_grad, _ = preprocess.update(prev_grad, preprocess.init(params), params)
        grad_is_finite, prev_is_finite = all_finite(grad), all_finite(prev_grad)
        grad = jax.tree.map(lambda g: jnp.where(prev_is_finite, g, jnp.nan).astype(g.dtype), grad)
        updates, inner_state = inner.update(
            grad, state.inner_state, params, prev_grad=prev_grad, **extra_args
        )
        keep = grad_is_finite & ~prev_is_finite & ~all_finite(updates)
        updates = jax.tree.map(lambda u: jnp.where(keep, jnp.zeros_like(u), u), updates)
        inner_state = _where(keep, state.inner_state, inner_state)
        prev_params = _where(grad_is_finite & prev_is_finite, params, state.prev_params)
        return updates, ExactState(prev_params, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def value_and_grads(
    loss_fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    micro_batches: int | None = None,
) -> Callable[..., tuple[Any, MarsGrads]]:
    r"""`jax.value_and_grad` at two points: the current and the previous parameters.

    Computes :math:`\nabla f(x_t, \xi_t)` and :math:`\nabla f(x_{t-1}, \xi_t)`, on the same batch
    and with the same random keys, since all other arguments are shared. It costs two gradients.

    With `micro_batches` = n it costs 1 + 1/n: the batch is taken in n parts, and only the first,
    S, is evaluated at the previous parameters too. Then :math:`c_t = g + k_t (g_S - g^-_S)`, with g
    the mean over all parts; the pair is :math:`(g, g - (g_S - g^-_S))`. The correction is as
    unbiased as that of the whole batch, and noisier.

    Args:
        loss_fn: A function that returns a scalar loss, or (loss, aux) with `has_aux`. With
            `micro_batches`, the mean over its batch.
        argnums: Which arguments are the parameters, as in `jax.value_and_grad`; for a tuple, the
            optimizer's parameters are the tuple of these arguments.
        has_aux: Whether `loss_fn` returns auxiliary data too.
        micro_batches: How many parts the batch is taken in, one after another. The batch is all
            positional arguments but the parameters, split along their first axes (every n-th entry
            makes a part, so that a sharded batch stays where it is, if each part has an entry for
            every device); what all parts share goes in by keyword. None: both gradients on the
            whole batch.

    Returns:
        A function ``fn(*args, state, **kwargs) -> (value, MarsGrads)``, or ``((value, aux),
        MarsGrads)`` with `has_aux`; value and aux are those of the current parameters. `state` is
        the optimizer's state (or anything that holds it once), in which :func:`exact` keeps the
        previous parameters; it is not passed on to `loss_fn`. With `micro_batches` value is the
        mean, and aux has a new first axis of the parts.

    Raises:
        ValueError: `state` holds no exact state, or several, or one of other parameters;
            `micro_batches` is less than 1 or does not divide the first axis of the batch.

    Example:
        >>> import jax.numpy as jnp
        >>> from mars_optax import mars_adamw, value_and_grads
        >>> optimizer = mars_adamw(3e-3, exact=True)
        >>> params = {"w": jnp.ones((2, 2))}
        >>> state = optimizer.init(params)
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> loss, grads = value_and_grads(loss_fn)(params, jnp.ones((8, 2)), state=state)
        >>> updates, state = optimizer.update(grads, state, params)
        >>> cheap = value_and_grads(loss_fn, micro_batches=4)  # 1.25 gradients instead of 2
        >>> loss, grads = cheap(params, jnp.ones((8, 2)), state=state)
    """
    if micro_batches is not None:
        remedy = "use an integer of at least 1, or None for the whole batch"
        valid = lambda n: isinstance(n, int | np.integer) and bool(n >= 1)  # noqa: E731
        _checks.check_number("micro_batches", micro_batches, valid, remedy)
    value_and_grad = jax.value_and_grad(loss_fn, argnums, has_aux)
    grad_only = jax.grad(loss_fn, argnums, has_aux)

    def fn(*args: Any, state: optax.OptState, **kwargs: Any) -> tuple[Any, MarsGrads]:
        single = isinstance(argnums, int)
        if not args:
            raise ValueError(
                "the parameters are missing, got no positional argument: pass them so."
            )
        indices = [i % len(args) for i in ((argnums,) if isinstance(argnums, int) else argnums)]
        params = args[indices[0]] if single else tuple(args[i] for i in indices)
        prev_params = _prev_params_like(params, state)

        def pair(grad, args):
            """Beside `grad` that at the previous parameters, taken once `grad` is there.

            XLA may else interleave them, and hold the activations of both at once.
            """
            earlier = prev_params
            if len({varying(leaf) for leaf in jax.tree.leaves((grad, earlier))}) == 1:
                grad, earlier = jax.lax.optimization_barrier((grad, earlier))
            args = list(args)
            for i, value in zip(indices, (earlier,) if single else earlier, strict=True):
                args[i] = value
            prev_grad = grad_only(*args, **kwargs)
            return MarsGrads(grad, prev_grad[0] if has_aux else prev_grad)

        if micro_batches is None:
            value, grad = value_and_grad(*args, **kwargs)
            return value, pair(grad, args)

        batch = [None if i in indices else arg for i, arg in enumerate(args)]
        if not jax.tree.leaves(batch):
            raise ValueError(
                f"`micro_batches` is {micro_batches}, but no positional argument beside the "
                "parameters is there to split: pass the batch by position."
            )
        first, rest = _split(batch, micro_batches)

        def part(entries):
            both = zip(args, entries, strict=True)
            return [a if i in indices else e for i, (a, e) in enumerate(both)]

        def of_part(entries):
            value, grad = value_and_grad(*part(entries), **kwargs)
            loss, aux = value if has_aux else (value, None)
            return (loss, grad), jax.tree.map(jnp.asarray, aux)

        def add(total, entries):
            own, aux = of_part(entries)
            return jax.tree.map(jnp.add, total, own), aux

        own, aux_first = of_part(first)
        total, aux = jax.lax.scan(add, jax.tree.map(_widen, own), rest)
        loss, grad = jax.tree.map(
            lambda x, like: (x / micro_batches).astype(like.dtype), total, own
        )
        own_grad, own_prev = pair(own[1], part(first))
        grads = MarsGrads(grad, jax.tree.map(lambda g, s, p: g - (s - p), grad, own_grad, own_prev))
        aux = jax.tree.map(lambda a, more: jnp.concatenate([a[None], more]), aux_first, aux)
        return ((loss, aux) if has_aux else loss), grads

    return fn


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _split(batch: Any, count: int) -> tuple[Any, Any]:
    """The first of `count` parts of each leaf, and the others stacked."""

    def parts(path, leaf):
        length = np.shape(leaf)[0] if np.ndim(leaf) else None
        if length is None or length % count:
            raise ValueError(
                f"`micro_batches` is {count}, which does not divide the first axis of a positional "
                f"argument of shape {np.shape(leaf)} (at {jax.tree_util.keystr(path)}): choose a "
                "divisor, and pass what is no batch by keyword."
            )
        return jnp.moveaxis(leaf.reshape(length // count, count, *leaf.shape[1:]), 1, 0)

    split = jax.tree_util.tree_map_with_path(parts, batch)
    return jax.tree.map(lambda x: x[0], split), jax.tree.map(lambda x: x[1:], split)


def multi_steps(
    tx: optax.GradientTransformation,
    every_k_schedule: int | Callable[[jax.typing.ArrayLike], jax.typing.ArrayLike],
    *,
    use_grad_mean: bool = True,
    should_skip_update_fn: Callable[..., Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient accumulation that averages both gradients of a pair: `optax.MultiSteps` for exact.

    For an exact optimizer it accumulates :math:`g_t` and :math:`g^-_t` over the micro-batches, the
    latter at the parameters of one *optimizer* step before; any other optimizer is handed to
    `optax.MultiSteps` as it is.

    Do not use `optax.MultiSteps` for exact optimizers: it raises on a pair, and where `prev_grad=`
    is passed beside the gradients it averages the gradients but takes `prev_grad` of the last
    micro-batch alone, which is silently wrong and cannot be seen from inside.

    Args:
        tx: The optimizer; exact ones are wrapped in :func:`exact` already.
        every_k_schedule: How many micro-batches make a step: an int, or a function of the number
            of optimizer steps taken.
        use_grad_mean: Whether to average the gradients (else to sum them).
        should_skip_update_fn: Which micro-batches to drop, such as ``optax.skip_not_finite``, which
            then sees both gradients.

    Returns:
        A `GradientTransformationExtraArgs` whose `update` takes what that of `tx` takes. The state
        is an `optax.MultiStepsState`: `mini_step` is 0 right after an optimizer step. Gradients
        are accumulated in float32.

    Raises:
        ValueError: `every_k_schedule` is no positive integer; the previous gradient of an exact
            optimizer is missing or given twice.
        TypeError: A pair is handed to an optimizer that is not exact.

    Example:
        >>> import jax.numpy as jnp
        >>> from mars_optax import mars_adamw, multi_steps, value_and_grads
        >>> optimizer = multi_steps(mars_adamw(3e-3, exact=True), every_k_schedule=2)
        >>> params = {"w": jnp.ones((2, 2))}
        >>> state = optimizer.init(params)
        >>> loss_fn = lambda params, x: jnp.sum((x @ params["w"]) ** 2)
        >>> for micro_batch in jnp.ones((2, 1, 2)):
        ...     loss, grads = value_and_grads(loss_fn)(params, micro_batch, state=state)
        ...     updates, state = optimizer.update(grads, state, params)
        >>> int(state.mini_step), int(state.gradient_step)
        (0, 1)
    """
    remedy = "use an integer of at least 1 or a function of the step count"
    valid = lambda k: k >= 1 and k == int(k)  # noqa: E731
    _checks.check_number("every_k_schedule", every_k_schedule, valid, remedy)
    tx = optax.with_extra_args_support(tx)
    options = {"use_grad_mean": use_grad_mean, "should_skip_update_fn": should_skip_update_fn}
    plain = optax.MultiSteps(tx, every_k_schedule, **options)  # type: ignore[arg-type]

    # MultiSteps accumulates in trees like its parameters, and some versions expect updates like
    # them too: all three are pairs.
    def update_pair(updates, state, params=None, **extra_args):
        updates, state = tx.update(updates, state, params.grad, **extra_args)
        return MarsGrads(updates, updates), state

    of_pairs = optax.MultiSteps(
        optax.GradientTransformationExtraArgs(lambda pair: tx.init(pair.grad), update_pair),
        every_k_schedule,
        **options,  # type: ignore[arg-type]
    )

    def init_fn(params):
        if _exact_states(jax.eval_shape(tx.init, params)):
            return of_pairs.init(MarsGrads(params, params))
        return plain.init(params)

    def update_fn(updates, state, params=None, *, prev_grad=None, **extra_args):
        if not _exact_states(state):
            reject_pair(updates)
            if prev_grad is not None:
                extra_args["prev_grad"] = prev_grad
            return plain.update(updates, state, params, **extra_args)
        pair = MarsGrads(*_as_pair(updates, prev_grad))
        if params is None:
            raise ValueError("`params` is missing, got None: call `update(grads, state, params)`.")
        updates, state = of_pairs.update(pair, state, MarsGrads(params, params), **extra_args)
        return updates.grad, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def varying(x: Any) -> frozenset:
    """The axes of an enclosing `jax.shard_map` over which `x` differs; barriers want them alike."""
    kind: Any = jax.typeof(x)
    if hasattr(kind, "vma"):  # in older JAX
        return frozenset(kind.vma)
    return frozenset(kind.manual_axis_type.varying)


def all_finite(tree: Any) -> jax.Array:
    """Whether every entry of every leaf, and its sum, is finite; shape () and dtype bool."""
    finite = jnp.array(True)
    for leaf in jax.tree.leaves(tree):
        # A sum is not finite either then, and XLA's CPU backend computes it in one pass.
        total = jnp.sum(leaf, dtype=jnp.promote_types(leaf.dtype, jnp.float32))
        finite &= jnp.isfinite(total)
    return finite


def _where(condition: jax.Array, tree: Any, otherwise: Any) -> Any:
    """Selects whole trees; the dtypes of `otherwise` stay."""
    return jax.tree.map(
        lambda x, y: jnp.where(condition, jnp.asarray(x, y.dtype), y), tree, otherwise
    )


def _copy(leaf: Any) -> Any:
    # A state that aliases the parameters could not be donated beside them.
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.array(leaf, copy=True)


def _as_pair(updates: Any, prev_grad: Any) -> tuple[Any, Any]:
    if isinstance(updates, MarsGrads):
        if prev_grad is not None:
            raise ValueError(
                "`prev_grad` was given beside a `MarsGrads` pair, which holds it already: pass one "
                "of the two."
            )
        return updates.grad, updates.prev_grad
    if prev_grad is None:
        raise ValueError(
            "`prev_grad` is missing, got None: an exact optimizer needs the gradient at the "
            "previous parameters on the same batch; pass the pair from "
            "`mars_optax.value_and_grads(loss_fn)(params, ..., state=opt_state)` as `updates`, or "
            "pass `prev_grad=`."
        )
    return updates, prev_grad


def _exact_states(state: Any) -> list[ExactState]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ExactState))
    return [leaf for leaf in leaves if isinstance(leaf, ExactState)]


def _prev_params_like(params: Any, state: Any) -> Any:
    """The previous parameters in `state`, in the containers of `params` (nnx has its own)."""
    found = _exact_states(state)
    if len(found) != 1:
        raise ValueError(
            f"`state` must hold one exact state, got {len(found)}: build the optimizer with "
            "`exact=True` or `mars_optax.exact(inner)`, once, and pass its state."
        )
    leaves, structure = jax.tree.flatten(params)
    prev_leaves = jax.tree.leaves(found[0].prev_params)
    shapes, prev_shapes = [list(map(jnp.shape, tree)) for tree in (leaves, prev_leaves)]
    if shapes != prev_shapes:
        raise ValueError(
            "`state` belongs to other parameters than those given: its previous parameters have "
            f"shapes {prev_shapes}, the parameters {shapes}. Initialise the optimizer with the "
            "same tree, and make `mars_optax.exact` the outermost wrapper, so that it sees all "
            "of it."
        )
    return jax.tree.unflatten(structure, prev_leaves)
