"""Exact MARS with Flax linen and TrainState: `apply_gradients` takes the pair of gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from mars_optax import mars_adamw, value_and_grads


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(32)(x)))


model = MLP()
params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
rate = optax.cosine_decay_schedule(3e-2, 200)
state = TrainState.create(apply_fn=model.apply, params=params, tx=mars_adamw(rate, exact=True))


@jax.jit
def train_step(state, key):
    x = jax.random.uniform(key, (64, 2), minval=-2.0, maxval=2.0)

    def loss_fn(params):
        return jnp.mean((state.apply_fn({"params": params}, x)[:, 0] - jnp.prod(x, axis=1)) ** 2)

    loss, grads = value_and_grads(loss_fn)(state.params, state=state.opt_state)
    return state.apply_gradients(grads=grads), loss


for key in jax.random.split(jax.random.key(1), 200):
    state, loss = train_step(state, key)
    if state.step % 50 == 0:
        print(f"step {int(state.step):3d}  loss {loss:.4f}")
