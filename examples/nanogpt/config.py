"""The command line: what a run is."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import optax
import tyro

from examples.nanogpt import data as data_files
from examples.nanogpt import huggingface, model, optimizers, sample

PROGRAM = "python -m examples.nanogpt.train"
GAMMA = 0.025
# What a network's parameters depend on.
_SHAPE = ("layers", "heads", "width", "context", "vocab_size", "bias", "scale_by_layer")


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a GPT-2. Defaults depend on --preset and --optimizer; those of yours are shown."""

    model: model.GPTConfig
    steps: int
    batch_size: int
    """Sequences a step, over all devices of all hosts."""
    micro_batch_size: int
    """Sequences at a time on a device, at most; the gradients of a step's parts are averaged."""
    learning_rate: float
    """The peak of the schedule."""
    min_rate: float
    """The learning rate at the end of the schedule."""
    warmup: int
    """Steps of linear warm-up; by default a share of --steps."""
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
    gamma: float = GAMMA
    """Scale of the MARS correction."""
    gamma_end: float | None = None
    """Where given, gamma goes linearly to this value over the run."""
    schedule: optimizers.ScheduleName = "cosine"
    compare: str = ""
    """Train these instead of --optimizer, each in turn on the same data, and draw them in one
    figure: names separated by commas, such as adamw,mars_adamw,mars_m,mars_m-exact."""

    init_from: Path | None = None
    """Start from this Hugging Face GPT-2 folder's model, whose shape it takes; --preset and the
    optimizer still decide how it is trained."""
    data: str = "shakespeare"
    """"shakespeare", a text file, a folder of text, or a folder of train*.bin and val*.bin."""
    order: data_files.Order = "random"
    """Windows of text drawn at random, or all of them once an epoch."""
    cache_dir: Path = data_files.CACHE_DIR
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
    """How many of them to split parameters and optimizer state over (and the batch, as always);
    0 for as many as divide the model's width."""
    distributed: bool = False
    """One process of several, as on a TPU pod or under Slurm, where JAX finds the others."""
    coordinator: str | None = None
    """Elsewhere: host:port of process 0, the same on every host ..."""
    num_processes: int | None = None
    """... how many processes there are ..."""
    process_id: int | None = None
    """... and which of them this is, from 0."""
    max_skipped: int = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too (needs tensorboardX)."""
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
        if self.batch_size % devices:
            raise ValueError(
                f"--batch-size {self.batch_size} is not a multiple of the {devices} devices: "
                "change it, or use fewer --devices."
            )
        own = self.batch_size // devices
        at_most = min(self.micro_batch_size, own)
        return own // max(size for size in range(1, at_most + 1) if own % size == 0)

    @property
    def gammas(self) -> optax.ScalarOrSchedule:
        return optimizers.gamma_schedule(self.gamma, self.gamma_end, self.steps)

    def rates(self) -> tuple[optax.Schedule, optax.Schedule]:
        """The learning rate of every step, and the AdamW fallback's."""
        share = self.min_rate / self.learning_rate if self.learning_rate else 0.0
        rate, fallback = (
            optimizers.schedule(self.schedule, peak, self.steps, self.warmup, share)
            for peak in optimizers.learning_rates(self.optimizer, self.preset, self.learning_rate)
        )
        return rate, fallback

    def build_optimizer(self) -> optax.GradientTransformationExtraArgs:
        return optimizers.build(
            self.optimizer,
            *self.rates(),
            weight_decay=self.weight_decay,
            gamma=self.gammas,
            steps=self.steps,
            exact=self.exact,
            ns_dtype=self.model.dtype,
        )

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
        if self.sample_tokens:
            sample.check(self.sample_tokens, self.temperature)
        if not self.learning_rate > 0:
            raise ValueError(f"--learning-rate is {self.learning_rate:g}: use a number above 0.")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"--warmup {self.warmup} is not between 0 and --steps {self.steps}: shorten it."
            )
        if (self.gamma, self.gamma_end) != (GAMMA, None) and (
            self.optimizer not in optimizers.MARS and not self.compare
        ):
            raise ValueError(
                f"--gamma and --gamma-end are for MARS optimizers, not for {self.optimizer}: leave "
                "them out."
            )
        if not 0 <= self.min_rate <= self.learning_rate:
            raise ValueError(
                f"--min-rate {self.min_rate:g} is not between 0 and --learning-rate "
                f"{self.learning_rate:g}: lower it."
            )
        if self.init_from is not None:
            theirs = huggingface.read_config(self.init_from)
            for name in _SHAPE:
                mine, given = getattr(self.model, name), getattr(theirs, name)
                if mine != given:
                    raise ValueError(
                        f"{name} is {mine}, but {given} in the model of --init-from "
                        f"{self.init_from}: leave its flag out."
                    )
        hosts = (self.coordinator, self.num_processes, self.process_id)
        if any(h is not None for h in hosts) and None in hosts:
            raise ValueError(
                "--coordinator, --num-processes and --process-id go together: give all three, or "
                "--distributed alone where JAX finds the hosts by itself."
            )


# Settings that a resumed run may change.
_FREE_TO_CHANGE = {"cache_dir", "out_dir", "overwrite", "resume", "keep_checkpoints", "max_skipped"}
_FREE_TO_CHANGE |= {"checkpoint_every", "eval_every", "eval_windows", "log_every", "tensorboard"}
_FREE_TO_CHANGE |= {"sample_tokens", "prompt", "temperature", "devices", "fsdp", "compare"}
_FREE_TO_CHANGE |= {"distributed", "coordinator", "num_processes", "process_id"}


def default_config(
    preset: Any = "demo", optimizer: Any = "mars_m", steps: int | None = None
) -> Config:
    small = preset == "demo"
    steps = steps or (2000 if small else 100_000)
    rate, _ = optimizers.learning_rates(optimizer, preset)
    return Config(
        model=model.PRESETS[preset],
        steps=steps,
        batch_size=8 if small else 480,
        micro_batch_size=8,
        learning_rate=rate,
        min_rate=getattr(optimizers.MIN_RATES, preset),
        warmup=steps // (20 if small else 50),
        weight_decay=optimizers.RECIPES[optimizer].weight_decay,
        eval_every=250 if small else 1000,
        checkpoint_every=250 if small else 1000,
        preset=preset,
        optimizer=optimizer,
    )


def parse(arguments: Sequence[str], program: str = PROGRAM, **defaults: Any) -> Config:
    """The configuration of a command line; the other defaults depend on four of its flags."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="demo")
    first.add_argument("--optimizer", default="mars_m")
    first.add_argument("--steps", default="")
    first.add_argument("--init-from", type=Path)
    chosen, _ = first.parse_known_args(arguments)
    steps = int(chosen.steps) if chosen.steps.isdecimal() else None
    known = chosen.preset in model.PRESETS and chosen.optimizer in optimizers.NAMES
    names = (chosen.preset, chosen.optimizer) if known else ()
    default = dataclasses.replace(default_config(*names, steps=steps), **defaults)
    if chosen.init_from is not None:
        try:
            theirs = huggingface.read_config(chosen.init_from)
            shape = {name: getattr(theirs, name) for name in _SHAPE}
            default = dataclasses.replace(
                default, model=dataclasses.replace(default.model, **shape)
            )
        except (ValueError, OSError) as error:
            sys.exit(f"error: --init-from: {error}")
    return tyro.cli(
        tyro.conf.OmitArgPrefixes[Config],
        default=default,
        args=arguments,
        prog=program,
    )
