"""Gradient accumulation in exact mode: four micro-batches give the step of the whole batch."""

import jax
import jax.numpy as jnp
import optax

from mars_optax import mars_adamw, multi_steps, value_and_grads

whole = mars_adamw(1e-2, gamma=0.1, exact=True)
in_parts = multi_steps(mars_adamw(1e-2, gamma=0.1, exact=True), every_k_schedule=4)
start = {"kernel": jax.random.normal(jax.random.key(1), (4, 3)), "bias": jnp.zeros(3)}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["kernel"] + params["bias"]) - 0.5) ** 2)


def train(optimizer, batches):
    @jax.jit
    def step(params, state, batch):
        _, grads = value_and_grads(loss_fn)(params, batch, state=state)
        updates, state = optimizer.update(grads, state, params)  # zero until the fourth part
        return optax.apply_updates(params, updates), state

    params, state = start, optimizer.init(start)
    for batch in batches:
        params, state = step(params, state, batch)
    return params


data = jax.random.normal(jax.random.key(0), (5, 32, 4))  # five batches of 32
params = train(whole, data)
params_in_parts = train(in_parts, data.reshape(20, 8, 4))  # twenty of 8: five steps too
difference = jnp.max(jnp.abs(params["kernel"] - params_in_parts["kernel"]))
travelled = jnp.max(jnp.abs(params["kernel"] - start["kernel"]))
print(f"five steps moved the kernel by {travelled:.4f}")
print(f"whole batches and accumulated ones differ by {difference:.1e}")
