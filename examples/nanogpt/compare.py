"""`--compare`: several optimizers on the same data, in one figure and one table."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from examples.nanogpt import optimizers, plot
from examples.nanogpt.config import Config, parse


class Result(NamedTuple):
    rows: list[dict[str, Any]]  # of metrics.jsonl
    summary: dict[str, Any]

    def steps_to(self, loss: float) -> int | None:
        """The first validation that is no worse than `loss`."""
        points = plot.series(self.rows, "validation_loss")
        reached = points[points[:, 1] <= loss]
        return int(reached[0, 0]) if len(reached) else None

    @property
    def best(self) -> float:
        return float(plot.series(self.rows, "validation_loss")[:, 1].min())

    @property
    def seconds_per_step(self) -> float:
        """The median between lines of the log, without the first, which compiles."""
        speeds = [row["tokens_per_second"] for row in self.rows if "tokens_per_second" in row]
        tokens = self.summary["batch_size"] * self.summary["model"]["context"]
        return tokens / statistics.median(speeds[1:] or speeds)


def run(config: Config, arguments: Sequence[str], train: Callable[[Config], float]) -> None:
    """Trains what is not finished yet, each in a directory of its own, then compares."""
    root = config.out_dir or Path("runs") / f"{config.preset}-compare"
    results = {}
    for name in names(config.compare):
        one = single(name, root, arguments)
        if config.overwrite or not is_finished(one):
            if jax.process_index() == 0:
                print(f"--- {name}", flush=True)
            train(one)
        results[name] = read(one.directory)
    if jax.process_index() == 0:
        image = root / "comparison.png"
        plot.draw_comparison(
            {name: result.rows for name, result in results.items()},
            image,
            next(iter(results.values())).summary["unit"],
        )
        text = table(results)
        (root / "comparison.md").write_text(text)
        print(f"\n{text}\nplot     {image}")


def names(compare: str) -> list[str]:
    """The runs that --compare names."""
    found = [name.strip() for name in compare.split(",")]
    for name in found:
        optimizer, exact = name.removesuffix("-exact"), name.endswith("-exact")
        if optimizer not in (optimizers.MARS if exact else optimizers.NAMES):
            raise ValueError(
                f"--compare names {name!r}: use some of {', '.join(optimizers.NAMES)}, or one that "
                "begins with mars_ followed by -exact, separated by commas."
            )
    if len(set(found)) < len(found):
        raise ValueError(f"--compare {compare} names a run twice: name each once.")
    return found


def single(name: str, root: Path, arguments: Sequence[str]) -> Config:
    """The configuration of one of the runs: the command line's, with this optimizer's defaults."""
    own = ["--optimizer", name.removesuffix("-exact"), "--out-dir", str(root / name)]
    one = parse([*arguments, *own])
    if name.endswith("-exact"):
        one = dataclasses.replace(one, exact=True)
    checkpoints = one.directory / "checkpoints"
    unfinished = checkpoints.is_dir() and any(checkpoints.iterdir())
    return dataclasses.replace(one, compare="", resume=unfinished and not one.overwrite)


def is_finished(config: Config) -> bool:
    """Whether this run is done; raises where the one in its directory has other settings."""
    path = config.directory / "summary.json"
    if not path.exists():
        return False
    summary = json.loads(path.read_text())
    for key, value in config.settings.items():
        done = summary.get(key)
        if key == "model":  # the corpus decides on the vocabulary
            value, done = ({**v, "vocab_size": 0} for v in (value, done))
        if done != value:
            raise ValueError(
                f"{config.directory} holds a run with {key} = {done}, not {value}: pass "
                "--overwrite to replace it, or another --out-dir."
            )
    return True


def read(directory: Path) -> Result:
    return Result(
        plot.read_metrics(directory / "metrics.jsonl"),
        json.loads((directory / "summary.json").read_text()),
    )


def table(results: dict[str, Result]) -> str:
    """In Markdown. The yardstick is AdamW where it is among the runs, else the first."""
    yardstick = "adamw" if "adamw" in results else next(iter(results))
    goal = results[yardstick].best
    lines = [
        f"| optimizer | final loss | steps to {yardstick}'s best ({goal:.4f}) | ms a step | "
        "MiB a device |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        steps = result.steps_to(goal)
        share = "not reached"
        if steps is not None:
            share = f"{steps:,} ({steps / result.summary['steps']:.0%})"
        lines.append(
            f"| {name} | {result.summary['validation_loss']:.4f} | {share} | "
            f"{1e3 * result.seconds_per_step:.1f} | {result.summary['device_bytes'] / 2**20:.0f} |"
        )
    return "\n".join(lines) + "\n"
