"""How good is the exact correction when it is taken on a part of the batch?

    python -m benchmarks.experiments.partial_exact

Logistic regression on scikit-learn's digits, along a given straight line from start to optimum
(the open loop of `variance_reduction`): the squared error of the momentum, the least over b1, for
the correction on 1 of n parts of a batch of 16, at the cost of 1 + 1/n gradients, and for an EMA
of gradients of batches that are larger by as much.
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.experiments.store import RESULTS, Store
from benchmarks.experiments.variance_reduction import (
    DECAYS,
    GAMMAS,
    logistic_regression,
    momentum,
)

BATCH = 16
PARTS = (1, 2, 4, 8)


def error(gamma: float, b1: Any, parts: int | None, batch: int, runs: int, steps: int) -> jax.Array:
    """Mean |m - grad F|² over the second half of the line; `parts` None: no correction."""
    problem = logistic_regression(batch)
    line = jnp.linspace(0, 1, steps + 1)[:, None]
    path = problem.start + line * (problem.optimum - problem.start)
    true = jax.vmap(jax.grad(problem.objective))(path[1:])
    tx = momentum(gamma, b1, exact=parts is not None)
    shares = logistic_regression(batch // (parts or 1)).gradient  # its draws are independent

    def run(seed):
        def step(state, inputs):
            x, previous, t = inputs
            keys = jax.random.split(jax.random.fold_in(seed, t), parts or 1)
            own = jax.vmap(lambda key: shares(x, key))(keys)
            grad, extra = own.mean(axis=0), {}
            if parts is not None:
                extra["prev_grad"] = grad - (own[0] - shares(previous, keys[0]))
            m, state = tx.update(grad, state, **extra)
            return state, m

        state = tx.init(problem.start)
        full = jax.grad(problem.objective)(problem.start)
        state = (state[0], state[1]._replace(ema=full))
        return jax.lax.scan(step, state, (path[1:], path[:-1], jnp.arange(steps)))[1]

    m = jax.vmap(run)(jax.random.split(jax.random.key(0), runs))[:, steps // 2 :]
    return jnp.sum((m - true[steps // 2 :]) ** 2, axis=-1).mean()


def measure(store: Store, runs: int, steps: int) -> None:
    arms: list[tuple[str, float, int | None, int]] = [("EMA", 0.0, None, BATCH)]
    for parts in PARTS:
        arms.append(("EMA", 0.0, None, BATCH + BATCH // parts))
        arms += [("exact", gamma, parts, BATCH) for gamma in GAMMAS]
    for estimator, gamma, parts, batch in arms:
        cost = batch / BATCH if parts is None else 1 + 1 / parts
        key = {"estimator": estimator, "gamma": gamma, "parts": parts, "gradients": cost}

        def least(gamma=gamma, parts=parts, batch=batch) -> dict[str, Any]:
            of_decay = jax.jit(lambda b1: error(gamma, b1, parts, batch, runs, steps))
            errors = {b1: float(of_decay(b1)) for b1 in DECAYS}
            best = min(errors, key=lambda b1: errors[b1])
            return {"error": errors[best], "b1": best, "errors": errors}

        store.get(key, least)


def main(runs: int = 64, steps: int = 600) -> None:
    measure(Store(RESULTS / "partial_exact.json", runs=runs, steps=steps, batch=BATCH), runs, steps)


if __name__ == "__main__":
    main()
