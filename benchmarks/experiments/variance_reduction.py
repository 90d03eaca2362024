"""Does the correction bring the momentum nearer to the full gradient?

    python -m benchmarks.experiments.variance_reduction

Problems whose full gradient is known. Three estimators of it: the EMA of the gradients, and the
momentum behind approximate and exact MARS, all without the clip.

Open loop: the parameters move on a given straight line, the same for all; the error of the
momentum m is split into bias² = |mean(m) - grad F|² and variance, over independent runs. Closed
loop: descent along m itself, whose tail suboptimality F - F* is compared.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from benchmarks.experiments.store import RESULTS, Store
from mars_optax import mars_vr

GAMMAS = (0.025, 0.1, 0.3, 1.0)
DECAYS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
MODES = ("approximate", "exact")
DRAWN = {0.025: "C0", 0.3: "C1", 1.0: "C3"}  # the figure's γ and their colours
TAIL_TICKS = (0.001, 0.002, 0.005, 0.01)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A stochastic objective; the same key is the same batch."""

    gradient: Callable[[jax.Array, jax.Array], jax.Array]  # (x, key)
    objective: Callable[[jax.Array], jax.Array]
    start: jax.Array
    optimum: jax.Array
    rate: float  # of descent in the closed loop


def quadratic(noise: str, size: int = 20, level: float = 0.2) -> Problem:
    """F = sum h x² / 2; noise is added to the gradient, or multiplies the curvature h."""
    h = jnp.logspace(-1, 0, size)

    def gradient(x, key):
        xi = level * jax.random.normal(key, (size,))
        return h * x + xi if noise == "additive" else h * x * (1 + xi)

    return Problem(gradient, lambda x: jnp.sum(h * x**2) / 2, jnp.ones(size), jnp.zeros(size), 0.05)


def logistic_regression(batch: int = 16, penalty: float = 1e-2) -> Problem:
    """Multinomial logistic regression on scikit-learn's 1,797 digits, with an L2 penalty."""
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    features, labels = jnp.asarray(features / 16, jnp.float32), jnp.asarray(labels)
    shape = (features.shape[1], 10)

    def loss(x, chosen):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            features[chosen] @ x.reshape(shape), labels[chosen]
        )
        return losses.mean() + penalty * jnp.sum(x**2) / 2

    everything = jnp.arange(len(labels))
    objective = lambda x: loss(x, everything)  # noqa: E731

    def gradient(x, key):
        return jax.grad(loss)(x, jax.random.randint(key, (batch,), 0, len(labels)))

    start = jnp.zeros(shape[0] * shape[1])
    descend = lambda _, x: x - 1.0 * jax.grad(objective)(x)  # noqa: E731
    optimum = jax.jit(lambda x: jax.lax.fori_loop(0, 4000, descend, x))(start)
    return Problem(gradient, objective, start, optimum, 0.1)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "quadratic, additive noise": partial(quadratic, "additive"),
    "quadratic, multiplicative noise": partial(quadratic, "multiplicative"),
    "logistic regression on digits": logistic_regression,
}


def momentum(gamma: float, b1: Any, exact: bool) -> optax.GradientTransformationExtraArgs:
    vr = mars_vr(gamma, b1, clip_norm=None, exact=exact)
    return optax.chain(vr, optax.ema(b1, debias=False))


def _update(tx, problem, exact, x, previous, key, state):
    grad = problem.gradient(x, key)
    extra = {"prev_grad": problem.gradient(previous, key)} if exact else {}
    return tx.update(grad, state, **extra)


def open_loop(
    problem: Problem, gamma: float, b1: Any, exact: bool, runs: int, steps: int
) -> tuple[jax.Array, jax.Array]:
    """(bias², variance) of m, summed over parameters, averaged over the second half of the line."""
    path = problem.start + jnp.linspace(0, 1, steps + 1)[:, None] * (
        problem.optimum - problem.start
    )
    true = jax.vmap(jax.grad(problem.objective))(path[1:])
    tx = momentum(gamma, b1, exact)

    def run(seed):
        def step(state, inputs):
            x, previous, t = inputs
            m, state = _update(tx, problem, exact, x, previous, jax.random.fold_in(seed, t), state)
            return state, m

        # The EMA starts from the full gradient at the start of the line, not from zero.
        state = tx.init(problem.start)
        full = jax.grad(problem.objective)(problem.start)
        state = (state[0], state[1]._replace(ema=full))
        return jax.lax.scan(step, state, (path[1:], path[:-1], jnp.arange(steps)))[1]

    m = jax.vmap(run)(jax.random.split(jax.random.key(0), runs))[:, steps // 2 :]
    variance = jnp.var(m, axis=0, ddof=1)
    # The mean of n runs has a variance of its own, which is no bias.
    bias2 = (m.mean(axis=0) - true[steps // 2 :]) ** 2 - variance / runs
    return bias2.sum(-1).mean(), variance.sum(-1).mean()


def closed_loop(
    problem: Problem, gamma: float, b1: Any, exact: bool, runs: int, steps: int
) -> jax.Array:
    """F - F* over the last third of a descent along m, of each run; at every tenth step."""
    tx = momentum(gamma, b1, exact)
    least = problem.objective(problem.optimum)

    def run(seed):
        def step(carry, t):
            x, previous, state = carry
            m, state = _update(tx, problem, exact, x, previous, jax.random.fold_in(seed, t), state)
            return (x - problem.rate * m, x, state), None

        def ten_steps(carry, times):
            carry, _ = jax.lax.scan(step, carry, times)
            return carry, problem.objective(carry[0]) - least

        start = (problem.start, problem.start, tx.init(problem.start))
        _, excess = jax.lax.scan(ten_steps, start, jnp.arange(steps).reshape(-1, 10))
        return excess[-steps // 30 :].mean()

    return jax.vmap(run)(jax.random.split(jax.random.key(1), runs))


def variance_ratio(gamma: float, b1: float) -> float:
    """Of approximate MARS over the EMA, for gradients with independent noise."""
    share = 2 * gamma * (1 - gamma) * (1 - b1) + gamma**2
    return (1 - gamma) ** 2 + share * (1 + b1) / (1 - b1)


def measure(store: Store, name: str, problem: Problem, runs: int, steps: int) -> None:
    settings = [("EMA", 0.0)] + [(mode, gamma) for mode in MODES for gamma in GAMMAS]
    for mode, gamma in settings:
        exact = mode == "exact"
        opened = jax.jit(lambda b1, g=gamma, e=exact: open_loop(problem, g, b1, e, runs, steps))
        closed = jax.jit(
            lambda b1, g=gamma, e=exact: closed_loop(problem, g, b1, e, runs, 5 * steps)
        )

        def of_decay(b1: float, opened=opened, closed=closed) -> dict[str, float]:
            bias2, variance = opened(b1)
            tail = np.asarray(closed(b1))
            return {
                "bias2": float(bias2),
                "variance": float(variance),
                "tail": float(tail.mean()),
                "tail_standard_error": float(tail.std(ddof=1) / np.sqrt(runs)),
            }

        for b1 in DECAYS:
            key = {"problem": name, "estimator": mode, "gamma": gamma, "b1": b1}
            store.get(key, partial(of_decay, b1))


MEASURES: dict[str, Callable[[dict], float]] = {
    "open loop: |m − ∇F|²": lambda row: row["bias2"] + row["variance"],
    "closed loop: tail of F − F*": lambda row: row["tail"],
}


def draw(data: dict[str, Any]) -> Figure:
    """Above the open loop's errors, below the closed loop's, over the momentum's memory."""
    results = by_problem(data)
    figure = Figure(figsize=(3.4 * len(results), 6.6), layout="constrained")
    axes = figure.subplots(2, len(results), squeeze=False, sharex=True)
    curves = [("EMA", 0.0), *((mode, gamma) for mode in MODES for gamma in DRAWN)]
    for column, (name, rows) in enumerate(results.items()):
        for mode, gamma in curves:
            chosen = [r for r in rows if r["estimator"] == mode and r["gamma"] == gamma]
            horizon = [1 / (1 - r["b1"]) for r in chosen]
            # The EMA's line is wide, since that of a small γ lies on it.
            style = {"color": "0.75", "lw": 6} if mode == "EMA" else {"color": DRAWN[gamma]}
            style |= {"ls": "--"} if mode == "approximate" else {}
            label = mode if mode == "EMA" else f"{mode}, γ = {gamma:g}"
            for panel, measure in zip(axes[:, column], MEASURES.values(), strict=True):
                panel.loglog(horizon, list(map(measure, chosen)), label=label, **style)
        axes[0, column].set_title(name, fontsize="medium")
        axes[1, column].set_xlabel("1 / (1 − b1)")
    for panel in axes.flat:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xticks([2, 5, 10, 20, 50, 100, 200], ["2", "5", "10", "20", "50", "100", "200"])
        panel.tick_params(labelsize="small")
        panel.minorticks_off()
    for panel, label in zip(axes[:, 0], MEASURES, strict=True):
        panel.set_ylabel(label)
    for panel in (axes[1, 0], axes[1, 2]) if len(results) > 2 else ():
        panel.set_yticks(TAIL_TICKS, [f"{tick:g}" for tick in TAIL_TICKS])
        panel.set_ylim(7e-4, 1.2e-2)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize="small",
    )
    return figure


def least(data: dict[str, Any], measure: str) -> list[list[str]]:
    """Of a measure, the least over b1, as a multiple of the EMA's least."""
    problems = by_problem(data)

    def of(problem: str, mode: str, gamma: float) -> float:
        own = [r for r in problems[problem] if (r["estimator"], r["gamma"]) == (mode, gamma)]
        return min(map(MEASURES[measure], own))

    rows = [[measure.replace("|", "\\|"), *problems]]
    for mode, gamma in [(mode, gamma) for mode in MODES for gamma in GAMMAS]:
        ratios = [of(problem, mode, gamma) / of(problem, "EMA", 0.0) for problem in problems]
        rows.append([f"{mode}, γ = {gamma:g}", *(f"{ratio:.3g}" for ratio in ratios)])
    return rows


def by_problem(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    problems: dict[str, list[dict[str, Any]]] = {}
    for row in data["runs"]:
        problems.setdefault(row["problem"], []).append(row)
    return problems


def main(runs: int = 64, steps: int = 600) -> None:
    store = Store(RESULTS / "variance_reduction.json", runs=runs, steps=steps)
    for name, make in PROBLEMS.items():
        measure(store, name, make(), runs, steps)
    for what in MEASURES:
        for row in least({"runs": store.rows}, what):
            print(", ".join(row))


if __name__ == "__main__":
    main()
