"""`mars_vr` in front of preconditioners of your choice: Optax's Muon, and one written here."""

import jax
import jax.numpy as jnp
import optax

from mars_optax import mars_vr


@optax.stateless
def scale_by_row_norms(updates, params):
    return jax.tree.map(lambda u: u / (jnp.linalg.norm(u, axis=1, keepdims=True) + 1e-8), updates)


PRECONDITIONERS = {
    "Optax's Muon": optax.contrib.scale_by_muon(beta=0.95, nesterov=False),
    "row norms": optax.chain(optax.ema(0.95, debias=False), scale_by_row_norms),
}
TARGET = jax.random.normal(jax.random.key(0), (8, 4))
RATE = optax.scale_by_learning_rate(optax.cosine_decay_schedule(0.1, 200))


def final_distance(gamma, preconditioner):
    optimizer = optax.chain(mars_vr(gamma, b1=0.95), preconditioner, RATE)

    def step(carry, key):
        w, state = carry
        x = jax.random.normal(key, (16, 8))
        grad = jax.grad(lambda w: jnp.mean((x @ (w - TARGET)) ** 2))(w)
        updates, state = optimizer.update(grad, state)
        return (w + updates, state), jnp.mean((w - TARGET) ** 2)

    start = jnp.zeros((8, 4)), optimizer.init(jnp.zeros((8, 4)))
    return jax.lax.scan(step, start, jax.random.split(jax.random.key(1), 200))[1][-1]


for name, preconditioner in PRECONDITIONERS.items():
    distances = [final_distance(gamma, preconditioner) for gamma in (0.0, 0.025)]
    print("{:12s}: distance {:.1e} without MARS, {:.1e} with it".format(name, *distances))
