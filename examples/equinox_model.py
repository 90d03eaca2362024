"""Exact MARS-AdamW with Equinox: the arrays of the model are the parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from mars_optax import mars_adamw, value_and_grads

model = eqx.nn.MLP(2, 1, width_size=32, depth=1, activation=jnp.tanh, key=jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)  # other leaves become None
optimizer = mars_adamw(1e-2, exact=True)
state = optimizer.init(params)


def loss_fn(params, x):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(x)[:, 0] - jnp.prod(x, axis=1)) ** 2)


@jax.jit
def train_step(params, state, key):
    x = jax.random.uniform(key, (64, 2), minval=-2.0, maxval=2.0)
    loss, grads = value_and_grads(loss_fn)(params, x, state=state)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


for step, key in enumerate(jax.random.split(jax.random.key(1), 200), start=1):
    params, state, loss = train_step(params, state, key)
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss:.4f}")
