"""Does MARS train a small convolutional network better?

    python -m benchmarks.experiments.vision    # about 10 minutes on one core

scikit-learn's digits and examples/vision's SmallNet; convolutions are matrices through their
dimension numbers. Every arm tunes its peak rate on one grid, 1e-3 times powers of 2, with three
seeds at each rate, by the validation loss, until the best is inside the grid. All arms see the
same batches. The test loss and errors are those of the best rate.

Each run is written to results/vision.json at once, and one that is there is not run again. Seeds
run one after another: XLA makes grouped convolutions of convolutions under vmap, which on a CPU
takes longer.
"""

import functools
import math
import time
from typing import Any, NamedTuple

import jax
from flax import nnx

from benchmarks.experiments.store import RESULTS, Store
from examples.vision import data, model, train

GAMMAS = (0.001, 0.01, 0.025, 0.1)
EPOCHS, BATCH, DECAY = 12, 64, 0.1
SEEDS = range(3)
START = 5  # the search begins at 1e-3 * 2**START and its neighbours


class Arm(NamedTuple):
    optimizer: str
    gamma: float | None = None


ARMS = {
    "AdamW": Arm("adamw"),
    "Muon": Arm("muon"),
    **{f"MARS-AdamW, γ {gamma:g}": Arm("mars_adamw", gamma) for gamma in GAMMAS},
    **{f"MARS-M, γ {gamma:g}": Arm("mars_m", gamma) for gamma in GAMMAS},
}


@functools.cache
def digits() -> data.Data:
    return data.digits()


@functools.cache
def program(optimizer: str) -> Any:
    """(params, training state, rate, gamma, seed, epoch) of an optimizer, compiled once."""
    graphdef, _, _ = model.split(model.SmallNet(10, rngs=nnx.Rngs(0)))
    steps = EPOCHS * (len(digits().train.labels) // BATCH)
    build = lambda rate, gamma: train.build(  # noqa: E731
        optimizer, train.schedule(rate, steps), DECAY, gamma
    )

    def advance(training, images, rate, gamma, key):
        return train.epoch(graphdef, build(rate, gamma), training, images, key, BATCH)

    return graphdef, lambda params: build(1.0, 0.0).init(params), jax.jit(advance)


def run(arm: Arm, rate: float, seed: int) -> dict[str, Any]:
    """One training; losses in nats, None where they are not finite."""
    graphdef, init, advance = program(arm.optimizer)
    _, params, rest = model.split(model.SmallNet(10, rngs=nnx.Rngs(seed)))
    training = train.Training(params, rest, init(params))
    images, curve, seconds = jax.device_put(digits().train), [], []
    steps = len(digits().train.labels) // BATCH
    for number, key in enumerate(jax.random.split(jax.random.key(seed), EPOCHS), start=1):
        start = time.perf_counter()
        training, _ = jax.block_until_ready(advance(training, images, rate, arm.gamma or 0.0, key))
        seconds.append(time.perf_counter() - start)
        loss, _ = train.evaluate(graphdef, training.params, training.rest, digits().validation)
        if not math.isfinite(loss):
            return {"final_loss": None, "test_loss": None, "test_error": None, "curve": curve}
        curve.append([number * steps, round(loss, 5)])
    test_loss, test_error = train.evaluate(graphdef, training.params, training.rest, digits().test)
    return {
        "final_loss": curve[-1][1],
        "test_loss": round(test_loss, 5),
        "test_error": round(test_error, 5),
        "seconds_per_step": round(min(seconds) / steps, 5),
        "curve": curve,
    }


def mean_loss(store: Store, label: str, exponent: int) -> float:
    """The mean final loss over seeds at the rate 1e-3 * 2**exponent."""
    arm, rate = ARMS[label], 1e-3 * 2.0**exponent
    about = {"gradients": 1, "optimizer": arm._asdict()}
    rows = [
        store.get(
            {"arm": label, "rate": rate, "seed": seed},
            lambda seed=seed: about | run(arm, rate, seed),
        )
        for seed in SEEDS
    ]
    losses = [row["final_loss"] for row in rows]
    return math.inf if None in losses else sum(losses) / len(losses)


def tune(store: Store, label: str) -> None:
    """Widens the grid until the best rate is inside it."""
    losses = {e: mean_loss(store, label, e) for e in (START - 1, START, START + 1)}
    while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)):
        beyond = best - 1 if best == min(losses) else best + 1
        losses[beyond] = mean_loss(store, label, beyond)


def main() -> None:
    store = Store(
        RESULTS / "vision.json",
        data="scikit-learn's digits: 900 images to train, 447 to validate, 450 to test",
        epochs=EPOCHS,
        batch=BATCH,
        weight_decay=DECAY,
    )
    for label in ARMS:
        tune(store, label)


if __name__ == "__main__":
    main()
