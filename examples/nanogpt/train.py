"""Trains a GPT-2: `python -m examples.nanogpt.train --help`."""

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from tqdm import tqdm

from examples.nanogpt import (
    compare,
    data,
    hardware,
    huggingface,
    model,
    optimizers,
    plot,
    sample,
    sharding,
)
from examples.nanogpt.checkpoint import CheckpointError, Checkpoints
from examples.nanogpt.config import Config, parse
from examples.nanogpt.metrics import Metrics, mean_of_taken
from examples.nanogpt.step import make_train_step

_WHEN_NOT_FINITE = "use a lower --learning-rate, a longer --warmup, or --dtype float32."


class TrainingError(RuntimeError):
    """A run that cannot go on; the message names the remedy."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: Config
    corpus: data.Corpus
    graphdef: nnx.GraphDef
    mesh: jax.sharding.Mesh
    batches: sharding.Batches
    metrics: Metrics
    checkpoints: Checkpoints
    stop_is_asked: Callable[[int], bool]  # whether to end after this step

    @property
    def image(self) -> Path:
        return self.config.directory / "loss.png"

    @property
    def unit(self) -> str:
        return "nats per byte" if self.corpus.is_text else "nats per token"


def train(config: Config) -> float:
    """Trains, writes metrics and plot, prints a sample; returns the last validation loss."""
    config.check()
    optimizer = config.build_optimizer()
    mesh = sharding.make_mesh(
        sharding.choose_devices(config.devices), config.fsdp, config.model.width
    )
    batches = sharding.Batches(mesh, config.micro_batches(mesh.size), config.batch_size)
    check_directory(config)
    corpus = data.load(config.data, config.cache_dir.expanduser(), config.model.vocab_size)
    check_vocabulary(config, corpus)
    shape = dataclasses.replace(config.model, vocab_size=corpus.vocab_size)
    config = dataclasses.replace(config, model=shape)
    for split in (corpus.train, corpus.validation):
        data.check_size(split, config.batch_size, shape.context)
    graphdef, shapes = model.define(shape)
    say(describe(config, corpus, mesh, batches, shapes))
    given = None  # parameters from elsewhere, read before anything is written
    if config.init_from is not None and not config.resume:
        _, given = huggingface.read(config.init_from)
    prepare_directory(config)

    where = sharding.of_training(mesh, shapes)
    if given is None:
        params = jax.jit(partial(model.init, shape, config.seed), out_shardings=where)()
    else:
        params = jax.device_put(jax.tree.map(np.asarray, given), where)
    where = sharding.of_training(mesh, jax.eval_shape(optimizer.init, params))
    training = (params, jax.jit(optimizer.init, out_shardings=where)(params))
    checkpoints = Checkpoints(config.directory / "checkpoints", config.keep_checkpoints)
    start = 0
    if config.resume:
        start, training = restore(checkpoints, training, config)
        say(f"resuming after step {start:,}")
    metrics = Metrics(config.directory / "metrics.jsonl", start, config.tensorboard)
    with catching_sigterm() as stop_is_asked:
        run = Run(config, corpus, graphdef, mesh, batches, metrics, checkpoints, stop_is_asked)
        try:
            with jax.set_mesh(mesh):  # which tells the optimizer that it may share out its work
                params, measured = loop(run, training, start, optimizer)
        finally:
            metrics.close()
            checkpoints.close()
        if config.sample_tokens:
            local = sharding.local_copy(mesh, params)
            if jax.process_index() == 0:
                say(sample_text(config, graphdef, local, corpus))
        if jax.process_index() == 0:
            write_summary(config, {**measured, "unit": run.unit})
    loss = measured["validation_loss"]
    say(f"final validation loss {loss:.4f} {run.unit}\nplot     {run.image}")
    say(f"metrics  {metrics.path}")
    return loss


def say(text: str) -> None:
    """Prints, on the first of several hosts."""
    if jax.process_index() == 0:
        print(text, flush=True)


def describe(
    config: Config,
    corpus: data.Corpus,
    mesh: jax.sharding.Mesh,
    batches: sharding.Batches,
    params: model.Params,
) -> str:
    """What is about to be trained."""
    together = batches.shape[1]
    lines = [
        corpus.description,
        f"{corpus.train.size:,} training and {corpus.validation.size:,} validation tokens; "
        f"{model.count(params):,} parameters; {config.steps:,} steps of {config.batch_size} x "
        f"{config.model.context} tokens, {together} at a time, with "
        f"{config.name.split('-', 1)[1]} at {config.learning_rate:g} on {jax.default_backend()}"
        + (f" ({mesh.size} devices, fsdp {mesh.shape['fsdp']})" if mesh.size > 1 else ""),
    ]
    if config.init_from is not None:
        lines.append(f"starting from the model in {config.init_from}")
    elif (
        published := optimizers.PUBLISHED_LOSSES.get((config.preset, config.optimizer))
    ) is not None:
        lines.append(
            "To compare with: the MARS authors' best validation loss on OpenWebText was "
            f"{published[0]} by step 10,000 and {published[1]} by step 100,000."
        )
    return "\n".join(lines)


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
    run: Run,
    training: tuple[model.Params, optax.OptState],
    start: int,
    optimizer: optax.GradientTransformationExtraArgs,
) -> tuple[model.Params, dict[str, float]]:
    """The steps, logged and validated as they go: the last parameters, and what was measured."""
    config, corpus, batches = run.config, run.corpus, run.batches
    size, context, vocab = config.batch_size, config.model.context, corpus.vocab_size
    read = partial(data.batch, corpus.train, config.seed, order=config.order, rows=batches.rows)
    params, opt_state = training
    kept = tuple(sharding.of_training(run.mesh, tree) for tree in training)
    shardings = (*kept, sharding.replicated(run.mesh))
    train_step = (
        make_train_step(run.graphdef, optimizer, config, shardings)
        .lower(params, opt_state, batches.abstract(context), np.int32(0))
        .compile()
    )
    eval_loss = make_eval_loss(run)
    rate, _ = config.rates()
    pending: list[dict[str, jax.Array]] = []  # numbers not fetched from the device yet
    memory = train_step.memory_analysis()
    measured: dict[str, float] = {
        "validation_loss": math.nan,
        "device_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
    }
    skipped_in_a_row = 0
    if start == config.steps:  # stopped between the last checkpoint and the end
        measured["validation_loss"] = validate(run, eval_loss, params)
    bar = tqdm(
        total=config.steps,
        initial=start,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file wants fewer lines
        disable=jax.process_index() > 0,
    )
    started, timed = time.perf_counter(), 0
    with bar:
        for step in range(start, config.steps):
            tokens = batches.place(read(step, size, context, vocab))
            params, opt_state, numbers = train_step(params, opt_state, tokens, np.int32(step))
            pending.append(numbers)
            timed += 1
            done = step + 1
            last = done == config.steps
            stopping = run.stop_is_asked(done)  # once a step: it may come at any moment
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
                row = {**mean_of_taken(fetched), "learning_rate": float(rate(step))}
                row["tokens_per_second"] = speed
                mfu = hardware.utilization(
                    config.model, config.exact, speed, run.mesh.devices.flat[0], run.mesh.size
                )
                if mfu is not None:
                    row["mfu"] = mfu
                run.metrics.write(done, **row)
                bar.set_postfix_str(postfix(row), refresh=False)
                pending, started, timed = [], time.perf_counter(), 0
            bar.update()
            if done % config.eval_every == 0 or last:
                measured["validation_loss"] = loss = validate(run, eval_loss, params)
                run.metrics.write(done, validation_loss=loss)
                if not bar.disable:
                    tqdm.write(f"step {done:6,}  validation loss {loss:.4f}", sys.stdout)
                    plot.draw(run.metrics.path, run.image, config.name, run.unit)
                started = time.perf_counter()
            if saves:  # after the metrics, which a resumed run takes over
                run.checkpoints.save(done, (params, opt_state), config.settings)
            if stopping and not last:
                raise Terminated(done, config)
    return params, measured


def postfix(row: dict[str, float]) -> str:
    """The end of the progress bar."""
    parts = [f"loss {row['train_loss']:.3f}"] if "train_loss" in row else []
    parts += [f"lr {row['learning_rate']:.1e}", f"{row['tokens_per_second']:,.0f} tokens/s"]
    parts += [f"MFU {row['mfu']:.1%}"] if "mfu" in row else []
    return ", ".join(parts)


class Terminated(Exception):
    """SIGTERM came: what is done is saved, and the program ends as if it had finished."""

    def __init__(self, done: int, config: Config) -> None:
        advice = f"a checkpoint is in {config.directory}: go on with --resume"
        if config.checkpoint_every == 0:
            advice = "checkpoints are off (--checkpoint-every 0), nothing is saved"
        super().__init__(f"stopped by SIGTERM after step {done:,}; {advice}.")


@contextlib.contextmanager
def catching_sigterm() -> Iterator[Callable[[int], bool]]:
    """Tells at a step whether to end after it, because SIGTERM came; behind the last it is late."""
    if jax.process_count() > 1:  # JAX finds a step that suits all of them
        yield multihost_utils.reached_preemption_sync_point
    elif threading.current_thread() is not threading.main_thread():  # others hear no signals
        yield lambda step: False
    else:
        event = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: event.set())
        try:
            yield lambda step: event.is_set()
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


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


def make_eval_loss(run: Run) -> Callable[[model.Params, jax.Array], jax.Array]:
    """The mean loss over [count, sequences, T + 1], micro-batch by micro-batch, compiled."""

    def eval_loss(params: model.Params, tokens: jax.Array) -> jax.Array:
        one = partial(model.loss, run.graphdef, params)
        return jax.lax.map(one, tokens).mean() if len(tokens) > 1 else one(tokens[0])

    return jax.jit(eval_loss, out_shardings=sharding.replicated(run.mesh))


def validate(
    run: Run, eval_loss: Callable[[model.Params, jax.Array], jax.Array], params: model.Params
) -> float:
    """Mean loss over the fixed windows."""
    config, batches = run.config, run.batches
    windows = data.fixed_windows(
        run.corpus.validation,
        config.eval_windows,
        config.batch_size,
        config.model.context,
        run.corpus.vocab_size,
        batches.rows,
    )
    losses = [eval_loss(params, batches.place(tokens)) for tokens in windows]
    loss = float(np.mean(jax.device_get(losses)))
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


def check_vocabulary(config: Config, corpus: data.Corpus) -> None:
    """Raises where a model from elsewhere has other tokens than the corpus."""
    size = config.model.vocab_size
    if config.init_from is not None and corpus.vocab_size != size:
        raise TrainingError(
            f"{config.data} has a vocabulary of {corpus.vocab_size:,} tokens, but the model of "
            f"--init-from {config.init_from} one of {size:,}: prepare the text with that model's "
            "tokenizer (python -m examples.nanogpt.prepare), and pass the folder of .bin files to "
            "--data."
        )


def check_directory(config: Config) -> None:
    """Raises where a run is in the directory that may be neither replaced nor resumed."""
    directory = config.directory
    summary, checkpoints = directory / "summary.json", directory / "checkpoints"
    if config.overwrite and config.resume:
        raise TrainingError("--resume and --overwrite exclude each other: pass one of them.")
    if config.overwrite:
        return
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


def prepare_directory(config: Config) -> None:
    """Makes the run's directory, and empties it where it is to be replaced."""
    sharding.wait_for_all("all have checked the directory")
    if jax.process_index() == 0:
        try:
            config.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(
                f"the run's folder {config.directory} cannot be made ({error}): choose another "
                "--out-dir."
            ) from error
        if config.overwrite:
            (config.directory / "summary.json").unlink(missing_ok=True)
            shutil.rmtree(config.directory / "checkpoints", ignore_errors=True)
    sharding.wait_for_all("the directory is ready")


def write_summary(config: Config, measured: dict[str, Any]) -> None:
    """summary.json: the configuration and what was measured. It marks a finished run."""
    values = {**measured, **dataclasses.asdict(config)}
    path = config.directory / "summary.json"
    path.write_text(json.dumps(values, indent=1, default=str) + "\n")


def main() -> None:
    hardware.keep_freed_memory()
    arguments = sys.argv[1:]
    config = parse(arguments)
    try:
        config.check()
        sharding.start_processes(config)
        if config.compare:
            compare.run(config, arguments, train)
        else:
            train(config)
    except Terminated as message:
        say(str(message))
    except (data.DataError, TrainingError, CheckpointError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(
            f"stopped; what was measured is in {config.directory}, and --resume goes on from the "
            "last checkpoint, if there is one"
        )


if __name__ == "__main__":
    main()
