"""Exact, approximate and no correction on a noisy quadratic whose full gradient is known.

Each batch draws its own curvature, so the noise of the gradient depends on the parameters. Printed
is the mean squared distance of the momentum from the full gradient, which is its error.
"""

import jax
import jax.numpy as jnp
import optax

from mars_optax import exact, mars_vr, value_and_grads

CURVATURE = jnp.linspace(0.1, 1.0, 20)


def loss_fn(x, key):
    return 0.5 * jnp.sum(jax.random.exponential(key, (20,)) * CURVATURE * (x - 1.0) ** 2)


def error(gamma, b1=0.9, rate=0.02, steps=2000):
    momentum = exact(
        optax.chain(mars_vr(gamma, b1, clip_norm=None, exact=True), optax.ema(b1, debias=False))
    )

    def step(carry, key):
        x, state = carry
        _, grads = value_and_grads(loss_fn)(x, key, state=state)
        m, state = momentum.update(grads, state, x)
        return (x - rate * m, state), jnp.mean((m - CURVATURE * (x - 1.0)) ** 2)

    x = jnp.zeros(20)
    keys = jax.random.split(jax.random.key(0), steps)
    _, errors = jax.lax.scan(step, (x, momentum.init(x)), keys)
    return jnp.mean(errors[20:200])


if __name__ == "__main__":
    print("gamma   error of the momentum")
    for gamma in (0.0, 0.025, 0.1, 0.5, 1.0):
        print(f"{gamma:5.3f}   {error(gamma):.2e}")
