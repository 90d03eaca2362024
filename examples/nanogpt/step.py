"""One training step: gradients of micro-batches, optimizer, what is measured."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.nanogpt import model, optimizers
from examples.nanogpt.config import Config
from mars_optax import value_and_grads

StepFn = Callable[..., tuple[model.Params, optax.OptState, dict[str, jax.Array]]]


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformationExtraArgs,
    config: Config,
    shardings: Any = None,
) -> StepFn:
    """One optimizer step, compiled: (params, opt_state, tokens, step) -> the new ones, numbers.

    Tokens are [count, sequences, T + 1]: `count` micro-batches. `shardings` are those of the three
    results. The optimizer's diagnostics are measured at every `log_every`-th step, NaN elsewhere.
    """

    def loss_fn(params: model.Params, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        if shardings is None:
            return model.loss(graphdef, params, tokens, key)
        # Left to itself, XLA would exchange activations of the whole batch instead.
        gather = lambda tree: jax.lax.with_sharding_constraint(tree, shardings[-1])  # noqa: E731
        return model.loss(graphdef, params, tokens, key, gather)

    def differentiate(params, opt_state, tokens, key):
        if config.exact:  # a pair: at these and at the previous parameters, same batch and dropout
            return value_and_grads(loss_fn)(params, tokens, key, state=opt_state)
        return jax.value_and_grad(loss_fn)(params, tokens, key)

    def accumulate(params, opt_state, micro, key):
        """The mean over micro-batches, each with its own dropout."""
        count = len(micro)
        one = partial(differentiate, params, opt_state)

        def add(total, inputs):
            tokens, i = inputs
            own_key = None if key is None else jax.random.fold_in(key, i)
            return jax.tree.map(jnp.add, total, one(tokens, own_key)), None

        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, micro[0], key)
        )
        total, _ = jax.lax.scan(add, zeros, (micro, jnp.arange(count)))
        return jax.tree.map(lambda x: x / count, total)

    def diagnose(opt_state, grads, step):
        measure = partial(optimizers.diagnose, config.optimizer, opt_state, grads, config.gammas)
        nothing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), jax.eval_shape(measure))
        # At the first step there is nothing to compare with.
        logged = ((step + 1) % config.log_every == 0) & (step > 0)
        return jax.lax.cond(logged, measure, lambda: nothing)

    def train_step(params, opt_state, tokens, step):
        key = None
        if config.model.dropout > 0:
            key = jax.random.fold_in(jax.random.key(config.seed), step)
        if len(tokens) == 1:
            loss, grads = differentiate(params, opt_state, tokens[0], key)
        else:
            loss, grads = accumulate(params, opt_state, tokens, key)
        updates, new_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))  # of both, if a pair
        numbers = {
            "train_loss": loss,
            "grad_norm": optax.tree.norm(grads.grad if config.exact else grads),
            "update_norm": optax.tree.norm(updates),
            "skipped": ~finite,
        }
        if config.optimizer in optimizers.MARS:
            numbers |= diagnose(opt_state, grads, step)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (new_params, new_state),
            (params, opt_state),
        )
        return params, opt_state, numbers

    return jax.jit(train_step, donate_argnums=(0, 1), out_shardings=shardings)
