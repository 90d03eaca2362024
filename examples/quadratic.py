"""How far the momentum is from the full gradient, on a noisy quadratic where that is known.

Gamma 0 is the plain average. In exact mode a larger gamma removes its lag; in approximate mode it
moves weight to the newest gradient, and so adds noise.
"""

import jax
import jax.numpy as jnp
import optax

from mars_optax import exact, mars_vr, value_and_grads

CURVATURE = jnp.linspace(0.1, 1.0, 20)


def loss_fn(x, key):  # every batch draws its own curvature and its own minimum
    scale, shift = jax.random.exponential(key, (20,)), 0.1 * jax.random.normal(key, (20,))
    return 0.5 * jnp.sum(scale * CURVATURE * (x - 1.0) ** 2) + shift @ x


def mean_squared_error(gamma, is_exact, b1=0.95, rate=0.05, steps=200):
    vr = mars_vr(gamma, b1, clip_norm=None, exact=is_exact)
    momentum = optax.chain(vr, optax.ema(b1, debias=False))
    momentum = exact(momentum) if is_exact else momentum

    def step(carry, key):
        x, state = carry
        grad = jax.grad(loss_fn)(x, key)
        pair = value_and_grads(loss_fn)(x, key, state=state)[1] if is_exact else grad
        m, state = momentum.update(pair, state, x)
        return (x - rate * m, state), jnp.mean((m - CURVATURE * (x - 1.0)) ** 2)

    keys = jax.random.split(jax.random.key(0), steps)
    return jnp.mean(jax.lax.scan(step, (jnp.zeros(20), momentum.init(jnp.zeros(20))), keys)[1][50:])


for gamma in (0.0, 0.025, 0.1, 0.5, 1.0):
    values = [f"{mean_squared_error(gamma, mode):.1e}" for mode in (False, True)]
    print(f"gamma {gamma:5.3f}: squared error {values[0]} approximate, {values[1]} exact")
