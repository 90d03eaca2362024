"""Does MARS train a language model better? Ten questions, each a command that can be resumed:

    python -m benchmarks.experiments.language_model optimizers
    python -m benchmarks.experiments.language_model times    # of steps, side by side

The others are sizes, lengths, long, long_exact, gamma, rates, batch, exact and details.

Byte-level GPTs on Shakespeare's plays, whole plays held out. Every arm tunes one thing, its peak
rate, on the same grid (1e-3 times powers of 2), with one seed, until the best is inside the grid;
then the best rate is run with further seeds. All arms see the same batches, a global clip of 1.0,
40 % of warm-up and a cosine to zero. With 5 % of warm-up, final losses of one rate lay up to 0.2
nats apart (results/short_warmup.json), with 40 % about 0.03.

Each run is written to results/<question>.json at once, and one that is there is not run again.
"""

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mars_optax
from benchmarks.experiments.store import RESULTS, VERSIONS, Store
from benchmarks.update import interleaved
from examples.nanogpt import data, model, optimizers

SIZES = {
    "tiny": model.GPTConfig(2, 4, 64, context=64, vocab_size=data.BYTES, bias=False, unroll=True),
    "demo": dataclasses.replace(model.PRESETS["demo"], vocab_size=data.BYTES),
}
EVALUATIONS = 25  # in a run
WINDOWS = {"during": 128, "final": 512}  # of held-out text that validations average over
STEPS = 600  # of the tiny size, where a question does not say otherwise
WARMUP = 0.4  # of the steps
GAMMA = 0.025
DECAY = 0.1
CLIP = optax.clip_by_global_norm(1.0)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One optimizer; what is None is left at the library's default."""

    optimizer: str
    start: float  # where the search for the rate begins
    b1: float | None = None
    b2: float | None = None
    gamma: float | None = None
    gamma_end: float | None = None  # of a linear schedule
    exact: bool = False
    parts: int | None = None  # the exact correction on one of so many parts of the batch
    clip: str | None = "tensor"  # of MARS: "tensor", "global" or None
    everything: bool = False  # MARS for all parameters, not for matrices alone
    first_step: bool = True  # whether the first step is corrected, against a gradient of zero
    plain_v: bool = False  # MARS-AdamW whose second moment is built from g, not from c
    nesterov: bool = False  # of MARS: in AdamW for the parameters that are no matrices
    schedule: str = "cosine"

    @property
    def gradients(self) -> float:
        """Gradients of the whole batch that a step takes."""
        return 1 + self.exact / (self.parts or 1)


ADAMW = Arm("adamw", 4e-3, 0.9, 0.95)
MARS_ADAMW = Arm("mars_adamw", 8e-3, 0.95, 0.99)
MARS_M = Arm("mars_m", 8e-3)
ARMS = {
    "AdamW (.9, .95)": ADAMW,
    "AdamW (.95, .99)": Arm("adamw", 4e-3, 0.95, 0.99),
    "NAdamW (.9, .95)": Arm("adamw", 4e-3, 0.9, 0.95, nesterov=True),
    "NAdamW (.95, .99)": Arm("adamw", 4e-3, 0.95, 0.99, nesterov=True),
    "Lion": Arm("lion", 1e-3, 0.9, 0.99),
    "Adan": Arm("adan", 8e-3),
    "AdEMAMix": Arm("ademamix", 4e-3, 0.9, 0.999),
    "Muon": Arm("muon", 8e-3, 0.95),
    "Muon, Nesterov": Arm("muon", 8e-3, 0.95, nesterov=True),
    "MARS-AdamW": MARS_ADAMW,
    "MARS-AdamW (.9, .95), γ .1": Arm("mars_adamw", 8e-3, 0.9, 0.95, 0.1),
    "MARS-AdamW (.9, .95), γ .1, exact": Arm("mars_adamw", 1.6e-2, 0.9, 0.95, 0.1, exact=True),
    "MARS-AdamW exact": dataclasses.replace(MARS_ADAMW, exact=True),
    "MARS-AdamW exact, γ 1": dataclasses.replace(MARS_ADAMW, exact=True, gamma=1.0),
    "MARS-Lion": Arm("mars_lion", 1e-3),
    "MARS-Shampoo": Arm("mars_shampoo", 1.6e-2),
    "MARS-M": MARS_M,
    "MARS-M, γ .1": dataclasses.replace(MARS_M, gamma=0.1),
    "MARS-M exact": dataclasses.replace(MARS_M, exact=True),
    "MARS-M exact, γ 1": dataclasses.replace(MARS_M, exact=True, gamma=1.0),
    "MARS-SGDM": Arm("mars_sgdm", 0.5),
}


def adam_of_two(b1: float, b2: float, gamma: float) -> optax.GradientTransformation:
    """MARS-AdamW's momentum over the root of AdamW's second moment: the control of `plain_v`."""
    vr = mars_optax.mars_vr(gamma, b1)

    def init(params):
        return (vr.init(params), *(optax.tree.zeros_like(params) for _ in range(2)))

    def update(grads, state, params=None):
        corrected, vr_state = vr.update(grads, state[0])
        m = optax.tree.update_moment(corrected, state[1], b1, 1)
        v = optax.tree.update_moment(grads, state[2], b2, 2)
        m_hat = optax.tree.bias_correction(m, b1, vr_state.count)
        v_hat = optax.tree.bias_correction(v, b2, vr_state.count)
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + 1e-8), m_hat, v_hat)
        return direction, (vr_state, m, v)

    return optax.GradientTransformation(init, update)


def build(arm: Arm, rate: Any, steps: int) -> optax.GradientTransformationExtraArgs:
    """The optimizer of an arm at a peak rate, which may be traced."""
    shape = optimizers.schedule(arm.schedule, 1.0, steps, int(WARMUP * steps), 0.0)  # type: ignore
    rates = lambda t: rate * shape(t)  # noqa: E731
    given = {"b1": arm.b1, "b2": arm.b2, "gamma": _gamma(arm, steps)}
    given = {name: value for name, value in given.items() if value is not None}
    decay: dict[str, Any] = {"weight_decay": DECAY, "mask": optimizers.is_matrix}
    if arm.plain_v:
        directions = adam_of_two(arm.b1, arm.b2, given.get("gamma", GAMMA))
        tx = optax.chain(
            CLIP,
            optax.partition(
                {"mars": directions, "adam": optax.scale_by_adam(*optimizers.FALLBACK_BETAS)},
                lambda p: jax.tree.map(lambda m: "mars" if m else "adam", optimizers.is_matrix(p)),
            ),
            optax.add_decayed_weights(DECAY, optimizers.is_matrix),
            optax.scale_by_learning_rate(rates),
        )
        return optax.with_extra_args_support(tx)
    match arm.optimizer:
        case "adamw":
            tx = optax.adamw(rates, nesterov=arm.nesterov, **given, **decay)
        case "lion":
            tx = optax.lion(rates, **given, **{**decay, "weight_decay": 10 * DECAY})
        case "adan":
            tx = optax.adan(rates, **given, **decay)
        case "ademamix":
            alpha = optax.linear_schedule(0.0, 5.0, steps)
            tx = optax.contrib.ademamix(rates, alpha=alpha, **given, **decay)
        case "muon":  # scaled as MARS-M is, so that one rate serves matrices and fallback
            tx = optax.contrib.muon(
                rates,
                beta=arm.b1,
                nesterov=arm.nesterov,
                weight_decay=DECAY,
                adam_b1=optimizers.FALLBACK_BETAS[0],
                adam_b2=optimizers.FALLBACK_BETAS[1],
                muon_weight_dimension_numbers=optimizers.kernel_dimensions,
                consistent_rms=0.2,
            )
        case _:
            return _mars(arm, rates, given)
    return optax.with_extra_args_support(optax.chain(CLIP, tx))


def _gamma(arm: Arm, steps: int) -> Any:
    if arm.gamma_end is not None:
        return optimizers.gamma_schedule(arm.gamma or 0.0, arm.gamma_end, steps)
    if not arm.first_step:
        gamma = GAMMA if arm.gamma is None else arm.gamma
        return lambda t: jnp.where(t > 0, gamma, 0.0)
    return arm.gamma


def _mars(arm: Arm, rates: optax.Schedule, given: dict) -> optax.GradientTransformationExtraArgs:
    orthogonal = arm.optimizer in ("mars_m", "mars_shampoo")
    name = arm.optimizer
    # Where the direction's size is not Adam's, the fallback keeps a fixed share of the rate.
    share = {"mars_lion": 4.0, "mars_shampoo": 0.3, "mars_sgdm": 0.01}.get(name, 1.0)
    numbers = optimizers.kernel_dimensions if orthogonal else optimizers.matrix_dimensions
    tx = getattr(mars_optax, name)(
        rates,
        weight_decay={"mars_lion": 10 * DECAY, "mars_sgdm": 1e-3 * DECAY}.get(name, DECAY),
        clip_norm=None if arm.clip is None else 1.0,
        clip_scope=arm.clip or "tensor",
        weight_decay_mask=optimizers.is_matrix,
        weight_dimension_numbers=None if arm.everything else numbers,
        mars_mask=True if arm.everything else None,
        adam_learning_rate=lambda t: share * rates(t),
        adam_b1=optimizers.FALLBACK_BETAS[0],
        adam_b2=optimizers.FALLBACK_BETAS[1],
        adam_weight_decay=DECAY,
        **given,
        **({"exact": True, "preprocess": CLIP} if arm.exact else {}),
    )
    if arm.nesterov:
        adam = optax.adamw(
            rates, *optimizers.FALLBACK_BETAS, weight_decay=DECAY, mask=optimizers.is_matrix,
            nesterov=True,
        )  # fmt: skip
        is_numbered = lambda p: jax.tree.map(lambda _, n: n is not None, p, numbers(p))  # noqa: E731
        tx = optax.partition({True: tx, False: adam}, is_numbered)
    return tx if arm.exact else optax.chain(CLIP, tx)


class Task(NamedTuple):
    """What is trained, and how long."""

    size: str = "tiny"
    steps: int = STEPS
    batch: int = 8


class Program(NamedTuple):
    """The compiled functions of an arm on a task."""

    init: Callable
    advance: Callable


@functools.lru_cache(maxsize=4)
def program(arm: Arm, task: Task) -> Program:
    config = SIZES[task.size]
    graphdef, _ = model.define(config)
    loss_fn = functools.partial(model.loss, graphdef)

    def init(seed_params, rate):
        return build(arm, rate, task.steps).init(seed_params)

    def advance(params, state, rate, batches):
        tx = build(arm, rate, task.steps)

        def step(carry, tokens):
            params, state = carry
            if arm.exact:
                pair = mars_optax.value_and_grads(loss_fn, micro_batches=arm.parts)
                value, grads = pair(params, tokens, state=state)
            else:
                value, grads = jax.value_and_grad(loss_fn)(params, tokens)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        (params, state), losses = jax.lax.scan(step, (params, state), batches)
        return params, state, losses.mean()

    return Program(jax.jit(init), jax.jit(advance, donate_argnums=(0, 1)))


@functools.cache
def initial(size: str, seed: int) -> model.Params:
    return model.init(SIZES[size], seed)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(size: str, params: model.Params, batches: jax.Array) -> jax.Array:
    graphdef, _ = model.define(SIZES[size])
    return jax.lax.map(lambda tokens: model.loss(graphdef, params, tokens), batches).mean()


@functools.cache
def corpus() -> data.Corpus:
    return data.load("shakespeare", data.CACHE_DIR.expanduser())


@functools.lru_cache(maxsize=8)
def batches(seed: int, task: Task) -> np.ndarray:
    context = SIZES[task.size].context
    rows = [
        data.batch(corpus().train, seed, step, task.batch, context, data.BYTES)
        for step in range(task.steps)
    ]
    return np.stack(rows).reshape(EVALUATIONS, -1, task.batch, context + 1)


@functools.cache
def windows(size: str, count: int) -> np.ndarray:
    context = SIZES[size].context
    return np.stack(list(data.fixed_windows(corpus().validation, count, 16, context, data.BYTES)))


def train(arm: Arm, task: Task, rate: float, seed: int) -> dict[str, Any]:
    """One run: its validation losses in nats per byte, None from where they are not finite."""
    compiled = program(arm, task)
    params = jax.tree.map(jnp.copy, initial(task.size, seed))  # it is donated
    state = compiled.init(params, rate)
    curve: list[list] = []
    for i, chunk in enumerate(batches(seed, task)):
        params, state, loss = compiled.advance(params, state, rate, chunk)
        last = i == EVALUATIONS - 1
        held_out = windows(task.size, WINDOWS["final" if last else "during"])
        value = float(evaluate(task.size, params, held_out))
        if not (math.isfinite(value) and math.isfinite(float(loss))):
            break
        curve.append([(i + 1) * task.steps // EVALUATIONS, round(value, 5)])
    done = len(curve) == EVALUATIONS
    return {"final_loss": curve[-1][1] if done else None, "curve": curve}


class Question:
    """The runs of one question, on disk."""

    def __init__(self, name: str) -> None:
        sizes = {name: dataclasses.asdict(config) for name, config in SIZES.items()}
        self.store = Store(
            RESULTS / f"{name}.json",
            corpus=corpus().description,
            sizes=sizes,
            weight_decay=DECAY,
            warmup=WARMUP,
        )

    def run(self, label: str, arm: Arm, task: Task, rate: float, seed: int) -> float:
        """The final loss, infinite where the run diverged."""
        about = {"gradients": arm.gradients, "optimizer": dataclasses.asdict(arm)}
        row = self.store.get(
            {"arm": label, **task._asdict(), "rate": rate, "seed": seed},
            lambda: about | train(arm, task, rate, seed),
        )
        return math.inf if row["final_loss"] is None else row["final_loss"]

    def tune(
        self, label: str, arm: Arm, task: Task, seeds: int = 3, start: float | None = None
    ) -> float:
        """Finds the best rate with seed 0, then runs it with the other seeds."""
        exponent = round(math.log2((start or arm.start) / 1e-3))
        losses: dict[int, float] = {}

        def loss(e):
            if e not in losses:
                losses[e] = self.run(label, arm, task, 1e-3 * 2.0**e, 0)
            return losses[e]

        best = min(range(exponent - 1, exponent + 2), key=loss)
        while best in (min(losses), max(losses)):
            loss(best - 1), loss(best + 1)
            best = min(losses, key=lambda e: losses[e])
            if math.isinf(losses[best]):
                raise RuntimeError(f"{label} diverges at all rates tried, {sorted(losses)}")
        rate = 1e-3 * 2.0**best
        for seed in range(1, seeds):
            self.run(label, arm, task, rate, seed)
        return rate


def variants(base: Arm, **changes: Any) -> Arm:
    return dataclasses.replace(base, **changes)


BASES = {"MARS-AdamW": MARS_ADAMW, "MARS-M": MARS_M}
ADAM = ("AdamW (.9, .95)", "AdamW (.95, .99)", "NAdamW (.9, .95)", "NAdamW (.95, .99)")
OURS = ("MARS-AdamW", "MARS-AdamW (.9, .95), γ .1", "MARS-M", "MARS-M, γ .1")
FOREMOST = (*ADAM, "Muon", "Muon, Nesterov", *OURS)


def compare_optimizers(question: Question) -> dict[str, float]:
    return {label: question.tune(label, arm, Task()) for label, arm in ARMS.items()}


def again(question: Question, labels: Iterable[str], *tasks: Task) -> None:
    """Arms on other tasks; the search begins at the rate that is best on the first one."""
    best = compare_optimizers(Question("optimizers"))
    for label in labels:
        for task in tasks:
            question.tune(label, ARMS[label], task, start=best[label])


def compare_sizes(question: Question) -> None:
    again(question, ARMS, Task("demo", STEPS // 2))


def compare_lengths(question: Question) -> None:
    """Without runs of a shortened length a speed-up is only read off a curve."""
    again(question, ARMS, Task(steps=STEPS // 2))
    again(question, FOREMOST, Task(steps=STEPS * 7 // 8), Task(steps=3 * STEPS // 2))
    shorter = (STEPS // 4, STEPS // 3, STEPS * 5 // 12)
    again(question, OURS, *(Task("demo", steps) for steps in shorter))


def compare_long(question: Question, exact: bool = False) -> None:
    again(question, [a for a in ARMS if ARMS[a].exact == exact], Task(steps=3 * STEPS))


def compare_gammas(question: Question) -> None:
    for name, base in BASES.items():
        question.tune(f"{name}, γ 0", variants(base, gamma=0.0), Task())
        for exact in (False, True):
            series = f"{name} exact" if exact else name
            for gamma in (0.001, 0.01, 0.025, 0.05, 0.1, 0.2, 1.0):
                arm = variants(base, gamma=gamma, exact=exact)
                question.tune(f"{series}, γ {gamma:g}", arm, Task())
            falling = variants(base, gamma=0.1, gamma_end=0.0, exact=exact)
            question.tune(f"{series}, γ .1 to 0", falling, Task())


BRIEF = Task(steps=STEPS // 2)


def compare_rates(question: Question) -> None:
    labels = ("MARS-AdamW", "Muon", "Muon, Nesterov", "MARS-M")
    arms = {label: ARMS[label] for label in (*ADAM, *labels)}
    arms["MARS-AdamW, v from g"] = variants(MARS_ADAMW, plain_v=True)
    for label, arm in arms.items():
        for exponent in range(-1, 7):
            for seed in range(2):
                question.run(label, arm, BRIEF, 1e-3 * 2.0**exponent, seed)


def compare_batches(question: Question) -> None:
    for batch in (4, 16, 64):
        for label in (*ADAM[:2], "NAdamW (.95, .99)", "MARS-AdamW", "MARS-M", "Muon"):
            question.tune(label, ARMS[label], BRIEF._replace(batch=batch), seeds=5)


def compare_exact(question: Question) -> None:
    """The correction on 1 of n parts; approximate MARS at as many gradients, over more steps."""
    for name, base in BASES.items():
        for parts in (4, 1, 2, 8):
            chunk = round(BRIEF.steps * (1 + 1 / parts) / EVALUATIONS)  # 350 steps for 337.5
            longer = BRIEF._replace(steps=chunk * EVALUATIONS)
            question.tune(name, base, longer)
            for gamma in (0.025, 0.1, 1.0):
                arm = variants(base, exact=True, gamma=gamma, parts=None if parts == 1 else parts)
                question.tune(f"{name} exact, γ {gamma:g}, 1 of {parts}", arm, BRIEF)
        question.tune(name, base, BRIEF)


def compare_details(question: Question) -> None:
    for name, base in BASES.items():
        changed = {
            "": base,
            ", global clip": variants(base, clip="global"),
            ", no clip": variants(base, clip=None),
            ", first step uncorrected": variants(base, first_step=False),
            ", WSD": variants(base, schedule="wsd"),
        }
        for what, arm in changed.items():
            question.tune(name + what, arm, BRIEF)
    # As Muon with Nesterov's momentum: optax.contrib.muon gives it to its AdamW too.
    for what, nesterov in {"": False, ", NAdamW for the rest": True}.items():
        arm = variants(MARS_M, gamma=0.05, nesterov=nesterov)
        question.tune(f"MARS-M, γ .05{what}", arm, BRIEF)
    question.tune("Muon, Nesterov", ARMS["Muon, Nesterov"], BRIEF)
    question.tune("MARS-AdamW, all parameters", variants(MARS_ADAMW, everything=True), BRIEF)
    for what, label in {"": "AdamW (.95, .99)", " (.9, .95)": "AdamW (.9, .95)"}.items():
        question.tune(f"AdamW{what}", ARMS[label], BRIEF)
        question.tune(f"AdamW{what}, WSD", variants(ARMS[label], schedule="wsd"), BRIEF)


def stepper(arm: Arm, task: Task) -> Callable[[], None]:
    """A function that takes the steps of one chunk of batches."""
    compiled, chunk = program(arm, task), batches(0, task)[0]
    params = jax.tree.map(jnp.copy, initial(task.size, 0))  # it is donated
    state = compiled.init(params, 1e-3)

    def steps() -> None:
        nonlocal params, state
        params, state, _ = jax.block_until_ready(compiled.advance(params, state, 1e-3, chunk))

    return steps


def measure_times(rounds: int = 7) -> None:
    """Seconds of a step, of all arms in turns, in results/step_times.json: on an idle machine."""
    found = {}
    for size in SIZES:
        task = Task(size)
        seconds = interleaved({label: stepper(arm, task) for label, arm in ARMS.items()}, rounds)
        count = len(batches(0, task)[0])
        found[size] = {label: float(np.median(own)) / count for label, own in seconds.items()}
        print(size, found[size], flush=True)
    settings = {"rounds": rounds, "batch": Task().batch, "versions": VERSIONS}
    text = json.dumps({"settings": settings, "seconds": found}, indent=1)
    (RESULTS / "step_times.json").write_text(text + "\n")


QUESTIONS = {
    "optimizers": compare_optimizers,
    "sizes": compare_sizes,
    "lengths": compare_lengths,
    "long": compare_long,
    "long_exact": functools.partial(compare_long, exact=True),
    "gamma": compare_gammas,
    "rates": compare_rates,
    "batch": compare_batches,
    "exact": compare_exact,
    "details": compare_details,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="+", choices=[*QUESTIONS, "times"])
    for name in parser.parse_args().questions:
        if name == "times":
            measure_times()
        else:
            QUESTIONS[name](Question(name))


if __name__ == "__main__":
    main()
