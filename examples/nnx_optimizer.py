"""Exact MARS-M with Flax NNX: the model is split, so that the loss is a function of parameters."""

import jax
import jax.numpy as jnp
from flax import nnx

from mars_optax import mars_m, value_and_grads


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(2, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


model = MLP(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, mars_m(2e-2, weight_decay=0.0, exact=True), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, key):
    x = jax.random.uniform(key, (64, 2), minval=-2.0, maxval=2.0)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params):
        return jnp.mean((nnx.merge(graphdef, params, rest)(x)[:, 0] - jnp.prod(x, axis=1)) ** 2)

    loss, grads = value_and_grads(loss_fn)(params, state=optimizer.opt_state)
    optimizer.update(model, grads.grad, prev_grad=grads.prev_grad)
    return loss


for step, key in enumerate(jax.random.split(jax.random.key(1), 200), start=1):
    loss = train_step(model, optimizer, key)
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss:.4f}")
