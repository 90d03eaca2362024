"""metrics.jsonl and TensorBoard: the numbers of a run as it goes."""

import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.nanogpt import plot


class Metrics:
    """metrics.jsonl: one line per event, written at once (by process 0 alone)."""

    def __init__(self, path: Path, resume_at: int = 0, tensorboard: bool = False) -> None:
        """Starts a new file, or keeps the lines up to step `resume_at` of an old one."""
        self.path = path
        self.start = time.perf_counter()
        self.board: Any = None
        self.writes = jax.process_index() == 0
        if not self.writes:
            return
        rows = plot.read_metrics(path) if resume_at else []
        rows = [row for row in rows if row["step"] <= resume_at]
        self.start -= rows[-1]["seconds"] if rows else 0.0
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if tensorboard:
            self.board = _tensorboard(path.parent / "tensorboard")

    def write(self, step: int, **values: float) -> None:
        if not self.writes:
            return
        row = {"step": step, **values, "seconds": time.perf_counter() - self.start}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise OSError(
                f"{self.path} cannot be written ({error.strerror}): make room or mend what it "
                "says, then go on with --resume."
            ) from error
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _tensorboard(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "--tensorboard needs a package that is not installed: run `pip install tensorboardX`."
        ) from error
    return SummaryWriter(str(folder))


def mean_of_taken(fetched: dict[str, np.ndarray]) -> dict[str, float]:
    """Means over the steps that were taken; and how many were skipped, if any.

    NaN stands for what was not measured at a step.
    """
    taken = ~fetched["skipped"]
    means = {}
    for key, values in fetched.items():
        measured = values[taken & np.isfinite(values)]
        if key != "skipped" and measured.size:
            means[key] = float(measured.mean())
    return means if taken.all() else {**means, "skipped": float((~taken).sum())}
