"""Trains a GPT-2: `python -m examples.nanogpt.train --help`."""

import argparse
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from tqdm import tqdm

from examples.nanogpt import data, model, optimizers, plot, sample, sharding
from examples.nanogpt.checkpoint import Checkpoints
from mars_optax import value_and_grads

PROGRAM = "python -m examples.nanogpt.train"
StepFn = Callable[..., tuple[model.Params, optax.OptState, dict[str, jax.Array]]]
CACHE_DIR = Path(os.environ.get("MARS_OPTAX_CACHE", "~/.cache/mars_optax"))


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a GPT-2. Defaults depend on --preset and --optimizer; those of yours are shown."""

    model: model.GPTConfig
    steps: int
    batch_size: int
    """Sequences a step."""
    micro_batch_size: int
    """Sequences at a time on a device, at most; the gradients of a step's parts are averaged."""
    learning_rate: float
    """The peak of the schedule."""
    warmup: int
    """Steps of linear warm-up."""
    weight_decay: float
    """Decoupled, of matrices only."""
    eval_every: int
    """Steps between validations."""
    checkpoint_every: int
    """Steps between checkpoints; 0 for none."""

    preset: Literal["demo", "small", "medium", "large", "xl"] = "demo"
    optimizer: optimizers.Name = "mars_m"
    exact: bool = False
    """Correct by the gradient at the previous parameters: two gradients a step (MARS only)."""
    gamma: float = 0.025
    """Scale of the MARS correction."""
    schedule: optimizers.ScheduleName = "cosine"
    final_rate: float = 0.0
    """The last learning rate as a share of the peak."""

    data: str = "shakespeare"
    """"shakespeare", a text file, a folder of text, or a folder of train*.bin and val*.bin."""
    cache_dir: Path = CACHE_DIR
    """Where Shakespeare is kept; MARS_OPTAX_CACHE sets it too."""
    seed: int = 0
    out_dir: Path | None = None
    """For metrics and plot; runs/<preset>-<optimizer> by default."""
    overwrite: bool = False
    """Replace the run in out_dir."""
    resume: bool = False
    """Go on with the unfinished run in out_dir from its newest checkpoint, to the same numbers."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep."""
    devices: int = 0
    """How many devices to use; 0 for all."""
    fsdp: int = 1
    """How many of them to split parameters and optimizer state over (and the batch, as always)."""
    max_skipped: int = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    eval_windows: int = 256
    """Fixed windows of held-out text that a validation averages over."""
    sample_tokens: int = 400
    """Length of the text drawn at the end; 0 for none."""
    prompt: str | None = None
    """What that text begins with; by default it suits the corpus."""
    temperature: float = 0.8
    """Of that text; 0 takes the likeliest token."""

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.optimizer}{'-exact' if self.exact else ''}"

    @property
    def directory(self) -> Path:
        return self.out_dir or Path("runs") / self.name

    def micro_batches(self, devices: int) -> int:
        """How many parts a step's batch is taken in."""
        own = self.batch_size // devices
        micro = min(self.micro_batch_size, own)
        if self.batch_size % devices or own % micro:
            raise ValueError(
                f"--batch-size {self.batch_size} on {devices} devices is not a multiple of "
                f"--micro-batch-size {self.micro_batch_size} on each: change one of them."
            )
        return own // micro

    @property
    def settings(self) -> dict[str, Any]:
        """What the numbers of a run depend on, in JSON's types."""
        shown = dataclasses.asdict(self)
        return json.loads(
            json.dumps({k: v for k, v in shown.items() if k not in _FREE_TO_CHANGE}, default=str)
        )

    def check(self) -> None:
        positive = ("steps", "batch_size", "micro_batch_size", "log_every", "eval_every")
        for name in (*positive, "eval_windows", "keep_checkpoints", "max_skipped"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is {getattr(self, name)}: use a number of at least 1.")
        if self.prompt == "":
            raise ValueError("--prompt is empty: give at least one character, or leave it out.")


# Settings that a resumed run may change.
_FREE_TO_CHANGE = {"cache_dir", "out_dir", "overwrite", "resume", "keep_checkpoints", "max_skipped"}
_FREE_TO_CHANGE |= {"checkpoint_every", "eval_every", "eval_windows", "log_every"}
_FREE_TO_CHANGE |= {"sample_tokens", "prompt", "temperature", "devices", "fsdp"}


def default_config(preset: str = "demo", optimizer: str = "mars_m") -> Config:
    small = preset == "demo"
    return Config(
        model=model.PRESETS[preset],
        steps=2000 if small else 100_000,
        batch_size=8 if small else 480,
        # A demo step of 8 takes 64 MiB of temporaries at once, which a CPU maps anew every time.
        micro_batch_size=4 if small else 8,
        learning_rate=optimizers.learning_rates(optimizer, preset)[0],
        warmup=100 if small else 2000,
        weight_decay=optimizers.RECIPES[optimizer].weight_decay,
        eval_every=250 if small else 1000,
        checkpoint_every=250 if small else 1000,
    )


def parse(arguments: Sequence[str]) -> Config:
    """The configuration of a command line; --preset and --optimizer choose the other defaults."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="demo")
    first.add_argument("--optimizer", default="mars_m")
    chosen, _ = first.parse_known_args(arguments)
    known = chosen.preset in model.PRESETS and chosen.optimizer in optimizers.NAMES
    default = default_config(chosen.preset, chosen.optimizer) if known else default_config()
    return tyro.cli(
        tyro.conf.OmitArgPrefixes[Config], default=default, args=arguments, prog=PROGRAM
    )


_WHEN_NOT_FINITE = "use a lower --learning-rate, a longer --warmup, or --dtype float32."


class TrainingError(RuntimeError):
    """A run that cannot go on; the message names the remedy."""


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformationExtraArgs,
    config: Config,
    shardings: Any = None,
) -> StepFn:
    """One optimizer step, compiled: (params, opt_state, tokens, step) -> the new ones, numbers.

    Tokens are [count, sequences, T + 1]: `count` micro-batches. `shardings` are those of the three
    results.
    """

    def loss_fn(params: model.Params, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        return model.loss(graphdef, params, tokens, key)

    def differentiate(params, opt_state, tokens, key):
        if config.exact:  # a pair: at these and at the previous parameters, same batch and dropout
            return value_and_grads(loss_fn)(params, tokens, key, state=opt_state)
        return jax.value_and_grad(loss_fn)(params, tokens, key)

    def accumulate(params, opt_state, micro, key):
        """The mean over micro-batches, each with its own dropout."""
        count = len(micro)
        one = partial(differentiate, params, opt_state)

        def add(total, inputs):
            tokens, i = inputs
            own_key = None if key is None else jax.random.fold_in(key, i)
            return jax.tree.map(jnp.add, total, one(tokens, own_key)), None

        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, micro[0], key)
        )
        total, _ = jax.lax.scan(add, zeros, (micro, jnp.arange(count)))
        return jax.tree.map(lambda x: x / count, total)

    def train_step(params, opt_state, tokens, step):
        key = None
        if config.model.dropout > 0:
            key = jax.random.fold_in(jax.random.key(config.seed), step)
        if len(tokens) == 1:
            loss, grads = differentiate(params, opt_state, tokens[0], key)
        else:
            loss, grads = accumulate(params, opt_state, tokens, key)
        updates, new_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        grad_norm = optax.tree.norm(grads.grad if config.exact else grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))  # of both, if a pair
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (new_params, new_state),
            (params, opt_state),
        )
        numbers = {"train_loss": loss, "grad_norm": grad_norm, "skipped": ~finite}
        return params, opt_state, numbers

    return jax.jit(train_step, donate_argnums=(0, 1), out_shardings=shardings)


class Metrics:
    """metrics.jsonl: one line per event, written at once."""

    def __init__(self, path: Path, resume_at: int = 0) -> None:
        """Starts a new file, or keeps the lines up to step `resume_at` of an old one."""
        rows = plot.read_metrics(path) if resume_at else []
        rows = [row for row in rows if row["step"] <= resume_at]
        self.path = path
        self.start = time.perf_counter() - (rows[-1]["seconds"] if rows else 0.0)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(self, step: int, **values: float) -> None:
        row = {"step": step, **values, "seconds": time.perf_counter() - self.start}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def train(config: Config) -> float:
    """Trains, writes metrics and plot, prints a sample; returns the last validation loss."""
    config.check()
    directory = prepare_directory(config)
    rate, fallback = (
        optimizers.schedule(config.schedule, peak, config.steps, config.warmup, config.final_rate)
        for peak in optimizers.learning_rates(config.optimizer, config.preset, config.learning_rate)
    )
    optimizer = optimizers.build(
        config.optimizer,
        rate,
        fallback,
        weight_decay=config.weight_decay,
        gamma=config.gamma,
        steps=config.steps,
        exact=config.exact,
    )
    corpus = data.load(config.data, config.cache_dir.expanduser(), config.model.vocab_size)
    shape = dataclasses.replace(config.model, vocab_size=corpus.vocab_size)
    config = dataclasses.replace(config, model=shape)
    for split in (corpus.train, corpus.validation):
        data.check_size(split, config.batch_size, shape.context)
    graphdef, _ = model.define(shape)
    mesh = sharding.make_mesh(config.devices, config.fsdp)
    config.micro_batches(mesh.size)  # raises where the batch cannot be split
    params = model.init(shape, config.seed)
    params = jax.device_put(params, sharding.of_training(mesh, params))
    devices = "" if mesh.size == 1 else f" ({mesh.size} devices, fsdp {config.fsdp})"
    print(
        f"{corpus.description}\n{corpus.train.size:,} training and {corpus.validation.size:,} "
        f"validation tokens; {model.count(params):,} parameters; {config.steps:,} steps of "
        f"{config.batch_size} x {shape.context} tokens with {config.name.split('-', 1)[1]} at "
        f"{config.learning_rate:g} on {jax.default_backend()}{devices}"
    )

    state_shardings = sharding.of_training(mesh, jax.eval_shape(optimizer.init, params))
    training = (params, jax.jit(optimizer.init, out_shardings=state_shardings)(params))
    checkpoints = Checkpoints(directory / "checkpoints", config.keep_checkpoints)
    start = 0
    if config.resume:
        start, training = restore(checkpoints, training, config)
        print(f"resuming after step {start:,}")
    metrics = Metrics(directory / "metrics.jsonl", resume_at=start)
    image = directory / "loss.png"
    try:
        params, loss = loop(
            config,
            graphdef,
            mesh,
            training,
            start,
            optimizer,
            rate,
            corpus,
            metrics,
            image,
            checkpoints,
        )
    finally:
        checkpoints.close()
    if config.sample_tokens:
        print(sample_text(config, graphdef, params, corpus))
    write_summary(directory, config, loss)
    print(f"final validation loss {loss:.4f} {unit(corpus)}\nplot     {image}")
    print(f"metrics  {metrics.path}")
    return loss


def restore(
    checkpoints: Checkpoints, training: Any, config: Config
) -> tuple[int, tuple[model.Params, optax.OptState]]:
    """The newest checkpoint's step and arrays, if it was made with these settings."""
    found = checkpoints.restore(training)
    if found is None:
        raise TrainingError(
            f"{config.directory} has no checkpoint to resume from: leave --resume out to start "
            "anew."
        )
    step, training, settings = found
    for name, value in config.settings.items():
        if settings.get(name) != value:
            raise TrainingError(
                f"the checkpoint was made with {name} = {settings.get(name)}, not {value}: resume "
                "with the same flags, or start anew in another --out-dir."
            )
    return step, training


def loop(
    config: Config,
    graphdef: nnx.GraphDef,
    mesh: jax.sharding.Mesh,
    training: tuple[model.Params, optax.OptState],
    start: int,
    optimizer: optax.GradientTransformationExtraArgs,
    rate: optax.Schedule,
    corpus: data.Corpus,
    metrics: Metrics,
    image: Path,
    checkpoints: Checkpoints,
) -> tuple[model.Params, float]:
    """The steps, logged and validated as they go: the last parameters and validation loss."""
    size, context, vocab = config.batch_size, config.model.context, corpus.vocab_size
    params, opt_state = training
    kept = tuple(sharding.of_training(mesh, tree) for tree in training)
    train_step = make_train_step(graphdef, optimizer, config, (*kept, sharding.replicated(mesh)))
    eval_loss = jax.jit(partial(model.loss, graphdef))
    pending: list[dict[str, jax.Array]] = []  # numbers not fetched from the device yet
    validation_loss, skipped_in_a_row = float("nan"), 0
    if start == config.steps:  # stopped between the last checkpoint and the end
        validation_loss = validate(config, eval_loss, params, corpus)
    terminated = catch_sigterm()
    bar = tqdm(
        total=config.steps,
        initial=start,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file wants fewer lines
    )
    started, timed = time.perf_counter(), 0
    with bar:
        for step in range(start, config.steps):
            tokens = data.batch(corpus.train, config.seed, step, size, context, vocab)
            micro = tokens.reshape(config.micro_batches(mesh.size), -1, context + 1)
            tokens = jax.device_put(micro, sharding.of_batch(mesh))
            params, opt_state, numbers = train_step(params, opt_state, tokens, np.int32(step))
            pending.append(numbers)
            timed += 1
            done = step + 1
            last = done == config.steps
            stopping = terminated.is_set()  # read once: it may come at any moment
            saves = config.checkpoint_every > 0 and (
                done % config.checkpoint_every == 0 or last or stopping
            )
            # Fetching waits for the device: not at every step.
            if done == 1 or done % config.log_every == 0 or last or saves:
                fetched = {
                    key: np.array([row[key] for row in jax.device_get(pending)])
                    for key in pending[0]
                }
                skipped_in_a_row = count_skipped(fetched["skipped"], skipped_in_a_row, done, config)
                speed = timed * size * context / (time.perf_counter() - started)
                means = mean_of_taken(fetched)
                metrics.write(
                    done, **means, learning_rate=float(rate(step)), tokens_per_second=speed
                )
                if "train_loss" in means:
                    bar.set_postfix_str(
                        f"loss {means['train_loss']:.3f}, {speed:,.0f} tokens/s", refresh=False
                    )
                pending, started, timed = [], time.perf_counter(), 0
            bar.update()
            if done % config.eval_every == 0 or last:
                validation_loss = validate(config, eval_loss, params, corpus)
                metrics.write(done, validation_loss=validation_loss)
                tqdm.write(f"step {done:6,}  validation loss {validation_loss:.4f}", sys.stdout)
                plot.draw(metrics.path, image, config.name, unit(corpus))
                started = time.perf_counter()
            if saves:  # after the metrics, which a resumed run takes over
                checkpoints.save(done, (params, opt_state), config.settings)
            if stopping and not last:
                raise Terminated(done, config)
    return params, validation_loss


class Terminated(Exception):
    """SIGTERM came: what is done is saved, and the program ends as if it had finished."""

    def __init__(self, done: int, config: Config) -> None:
        advice = f"a checkpoint is in {config.directory}: go on with --resume"
        if config.checkpoint_every == 0:
            advice = "checkpoints are off (--checkpoint-every 0), nothing is saved"
        super().__init__(f"stopped by SIGTERM after step {done:,}; {advice}.")


def catch_sigterm() -> threading.Event:
    """An event that SIGTERM sets, so that the loop can end between two steps."""
    event = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: event.set())
    return event


def count_skipped(skipped: np.ndarray, before: int, done: int, config: Config) -> int:
    """Steps in a row, up to step `done`, that were skipped; raises where they are too many."""
    in_a_row = before
    for i, this in enumerate(skipped):
        in_a_row = in_a_row + 1 if this else 0
        if in_a_row >= config.max_skipped:
            raise TrainingError(
                f"the loss or gradient of {in_a_row} steps in a row, the last being step "
                f"{done - len(skipped) + i + 1}, is not finite: {_WHEN_NOT_FINITE}"
            )
    return in_a_row


def mean_of_taken(fetched: dict[str, np.ndarray]) -> dict[str, float]:
    """Means over the steps that were taken; and how many were skipped, if any."""
    taken = ~fetched["skipped"]
    means = {
        key: float(values[taken].mean())
        for key, values in fetched.items()
        if key != "skipped" and taken.any()
    }
    return means if taken.all() else {**means, "skipped": float((~taken).sum())}


def validate(
    config: Config,
    eval_loss: Callable[[model.Params, np.ndarray], jax.Array],
    params: model.Params,
    corpus: data.Corpus,
) -> float:
    """Mean loss over the fixed windows."""
    size, context = config.batch_size, config.model.context
    windows = data.fixed_windows(
        corpus.validation, config.eval_windows, size, context, corpus.vocab_size
    )
    loss = float(np.mean(jax.device_get([eval_loss(params, tokens) for tokens in windows])))
    if not math.isfinite(loss):
        raise TrainingError(f"the validation loss is {loss}: {_WHEN_NOT_FINITE}")
    return loss


def sample_text(
    config: Config, graphdef: nnx.GraphDef, params: model.Params, corpus: data.Corpus
) -> str:
    """A prompt and its continuation; token ids where the corpus is not bytes of text."""
    text = corpus.prompt if config.prompt is None else config.prompt
    prompt = np.frombuffer(text.encode(), np.uint8) if corpus.is_text else np.zeros(1, np.int32)
    tokens = sample.generate(
        graphdef,
        params,
        config.model,
        prompt,
        config.sample_tokens,
        seed=config.seed,
        temperature=config.temperature,
    )
    if not corpus.is_text:
        return "sample (token ids): " + " ".join(map(str, tokens))
    continuation = tokens.astype(np.uint8).tobytes().decode(errors="replace")
    return f"{'-' * 30} sample {'-' * 30}{text}{continuation}\n{'-' * 68}"


def unit(corpus: data.Corpus) -> str:
    return "nats per byte" if corpus.is_text else "nats per token"


def prepare_directory(config: Config) -> Path:
    """Makes the run's directory; a run in it is an error unless it may be replaced or resumed."""
    directory = config.directory
    summary, checkpoints = directory / "summary.json", directory / "checkpoints"
    if not config.overwrite:
        if summary.exists():
            raise TrainingError(
                f"{directory} holds a finished run: pass --overwrite to replace it, or another "
                "--out-dir."
            )
        if not config.resume and checkpoints.is_dir() and any(checkpoints.iterdir()):
            raise TrainingError(
                f"{directory} holds an unfinished run: pass --resume to go on with it, --overwrite "
                "to replace it, or another --out-dir."
            )
    elif config.resume:
        raise TrainingError("--resume and --overwrite exclude each other: pass one of them.")
    directory.mkdir(parents=True, exist_ok=True)
    if config.overwrite:
        summary.unlink(missing_ok=True)
        shutil.rmtree(checkpoints, ignore_errors=True)
    return directory


def write_summary(directory: Path, config: Config, loss: float) -> None:
    """summary.json: the configuration and the last validation loss. It marks a finished run."""
    values: dict[str, Any] = {"validation_loss": loss, **dataclasses.asdict(config)}
    (directory / "summary.json").write_text(json.dumps(values, indent=1, default=str) + "\n")


def main() -> None:
    config = parse(sys.argv[1:])
    try:
        train(config)
    except Terminated as message:
        print(message)
    except (data.DataError, TrainingError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; what was measured is in {config.directory}")


if __name__ == "__main__":
    main()
