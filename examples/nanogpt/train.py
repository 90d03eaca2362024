"""Trains a GPT-2: `python -m examples.nanogpt.train --help`."""

import argparse
import dataclasses
import json
import os
import sys
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

from examples.nanogpt import data, model, optimizers, plot, sample
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
    """Sequences at a time, whose gradients are averaged."""
    learning_rate: float
    """The peak of the schedule."""
    warmup: int
    """Steps of linear warm-up."""
    weight_decay: float
    """Decoupled, of matrices only."""
    eval_every: int
    """Steps between validations."""

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
    """Replace a finished run in out_dir."""
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

    @property
    def micro_batches(self) -> int:
        return self.batch_size // self.micro_batch_size

    def check(self) -> None:
        positive = ("steps", "batch_size", "micro_batch_size", "log_every", "eval_every")
        for name in (*positive, "eval_windows"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is {getattr(self, name)}: use a number of at least 1.")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"--batch-size {self.batch_size} is not a multiple of --micro-batch-size "
                f"{self.micro_batch_size}: change one of them."
            )
        if self.prompt == "":
            raise ValueError("--prompt is empty: give at least one character, or leave it out.")


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


class TrainingError(RuntimeError):
    """A run that cannot go on; the message names the remedy."""


def make_train_step(
    graphdef: nnx.GraphDef, optimizer: optax.GradientTransformationExtraArgs, config: Config
) -> StepFn:
    """One optimizer step, compiled: (params, opt_state, tokens, step) -> the new ones, numbers."""

    def loss_fn(params: model.Params, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        return model.loss(graphdef, params, tokens, key)

    def differentiate(params, opt_state, tokens, key):
        if config.exact:  # a pair: at these and at the previous parameters, same batch and dropout
            return value_and_grads(loss_fn)(params, tokens, key, state=opt_state)
        return jax.value_and_grad(loss_fn)(params, tokens, key)

    def accumulate(params, opt_state, tokens, key):
        """The mean over micro-batches, each with its own dropout."""
        count = config.micro_batches
        micro = tokens.reshape(count, -1, tokens.shape[-1])
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

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, tokens, step):
        key = None
        if config.model.dropout > 0:
            key = jax.random.fold_in(jax.random.key(config.seed), step)
        compute = differentiate if config.micro_batches == 1 else accumulate
        loss, grads = compute(params, opt_state, tokens, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        grad_norm = optax.tree.norm(grads.grad if config.exact else grads)
        return params, opt_state, {"train_loss": loss, "grad_norm": grad_norm}

    return train_step


class Metrics:
    """metrics.jsonl: one line per event, written at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = time.perf_counter()
        path.write_text("")

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
    params = model.init(shape, config.seed)
    print(
        f"{corpus.description}\n{corpus.train.size:,} training and {corpus.validation.size:,} "
        f"validation tokens; {model.count(params):,} parameters; {config.steps:,} steps of "
        f"{config.batch_size} x {shape.context} tokens with {config.name.split('-', 1)[1]} at "
        f"{config.learning_rate:g} on {jax.default_backend()}"
    )

    metrics = Metrics(directory / "metrics.jsonl")
    image = directory / "loss.png"
    params, loss = loop(config, graphdef, params, optimizer, rate, corpus, metrics, image)
    if config.sample_tokens:
        print(sample_text(config, graphdef, params, corpus))
    write_summary(directory, config, loss)
    print(f"final validation loss {loss:.4f} {unit(corpus)}\nplot     {image}")
    print(f"metrics  {metrics.path}")
    return loss


def loop(
    config: Config,
    graphdef: nnx.GraphDef,
    params: model.Params,
    optimizer: optax.GradientTransformationExtraArgs,
    rate: optax.Schedule,
    corpus: data.Corpus,
    metrics: Metrics,
    image: Path,
) -> tuple[model.Params, float]:
    """The steps, logged and validated as they go: the last parameters and validation loss."""
    size, context, vocab = config.batch_size, config.model.context, corpus.vocab_size
    opt_state = jax.jit(optimizer.init)(params)
    train_step = make_train_step(graphdef, optimizer, config)
    eval_loss = jax.jit(partial(model.loss, graphdef))
    pending: list[dict[str, jax.Array]] = []  # numbers not fetched from the device yet
    validation_loss = float("nan")
    bar = tqdm(
        total=config.steps,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file wants fewer lines
    )
    started, timed = time.perf_counter(), 0
    with bar:
        for step in range(config.steps):
            tokens = data.batch(corpus.train, config.seed, step, size, context, vocab)
            params, opt_state, numbers = train_step(params, opt_state, tokens, np.int32(step))
            pending.append(numbers)
            timed += 1
            done = step + 1
            last = done == config.steps
            # Fetching waits for the device: not at every step.
            if done == 1 or done % config.log_every == 0 or last:
                fetched = {
                    key: np.array([row[key] for row in jax.device_get(pending)])
                    for key in pending[0]
                }
                check_finite(fetched["train_loss"], done)
                speed = timed * size * context / (time.perf_counter() - started)
                means = {key: float(values.mean()) for key, values in fetched.items()}
                metrics.write(
                    done, **means, learning_rate=float(rate(step)), tokens_per_second=speed
                )
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
    return params, validation_loss


def check_finite(losses: np.ndarray, done: int) -> None:
    """Raises where one of the last losses, the newest being that of step `done`, is not finite."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
        raise TrainingError(
            f"the loss of step {done - len(losses) + int(bad[0]) + 1} is {losses[bad[0]]}: use a "
            "lower --learning-rate, a longer --warmup, or --dtype float32."
        )


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
    return float(np.mean(jax.device_get([eval_loss(params, tokens) for tokens in windows])))


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
    """Makes the run's directory; a finished run in it is an error unless it may be replaced."""
    directory = config.directory
    summary = directory / "summary.json"
    if summary.exists() and not config.overwrite:
        raise TrainingError(
            f"{directory} holds a finished run: pass --overwrite to replace it, or another "
            "--out-dir."
        )
    directory.mkdir(parents=True, exist_ok=True)
    summary.unlink(missing_ok=True)
    return directory


def write_summary(directory: Path, config: Config, loss: float) -> None:
    """summary.json: the configuration and the last validation loss. It marks a finished run."""
    values: dict[str, Any] = {"validation_loss": loss, **dataclasses.asdict(config)}
    (directory / "summary.json").write_text(json.dumps(values, indent=1, default=str) + "\n")


def main() -> None:
    config = parse(sys.argv[1:])
    try:
        train(config)
    except (ValueError, TrainingError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; what was measured is in {config.directory}")


if __name__ == "__main__":
    main()
