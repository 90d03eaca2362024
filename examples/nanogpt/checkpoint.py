"""Checkpoints by Orbax: written in the background, complete or not at all, the newest sound one
restored."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from examples.nanogpt import sharding

Training = Any  # (params, opt_state)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written; the message names the remedy."""


class Checkpoints:
    """The last `keep` checkpoints of a run, by the number of steps done."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, create=True
        )
        self.manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, training: Training, settings: dict[str, Any]) -> None:
        """Copies the arrays and writes them in the background; they may be donated at once."""
        if step in self.manager.all_steps():
            return
        with self._explaining_failures():
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    training=ocp.args.StandardSave(_by_number(training)),
                    settings=ocp.args.JsonSave(settings),
                ),
                force=True,
            )

    def restore(self, like: Training) -> tuple[int, Training, dict[str, Any]] | None:
        """(step, training, settings) of the newest checkpoint that can be read, or None.

        One that cannot be read is set aside, saying so. `like` has the arrays to be replaced:
        shapes, dtypes and shardings are theirs.
        """
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _by_number(like)
        )
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                saved = self.manager.restore(
                    step,
                    args=ocp.args.Composite(
                        training=ocp.args.StandardRestore(wanted), settings=ocp.args.JsonRestore()
                    ),
                )
                reason = ""
            except Exception as error:  # whatever a damaged file makes of Orbax's readers
                reason = _first_line(error)
            if _any_process(bool(reason)):
                self._set_aside(step, reason or "another process could not read its part")
                continue
            leaves = [saved.training[name] for name in sorted(saved.training)]
            return step, jax.tree.unflatten(jax.tree.structure(like), leaves), saved.settings
        return None

    def _set_aside(self, step: int, reason: str) -> None:
        damaged = self.directory / f"damaged-{step}"
        if jax.process_index() == 0:
            (self.directory / str(step)).rename(damaged)
            print(f"checkpoint {step} cannot be read and is now {damaged}: {reason}")
        sharding.wait_for_all(f"checkpoint {step} is set aside")
        self.manager.reload()

    @contextlib.contextmanager
    def _explaining_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise what the file system makes of it
            raise CheckpointError(
                f"a checkpoint cannot be written to {self.directory}: {_first_line(error)}. Make "
                f"room or mend what it says, then go on with --resume from the last whole one"
                f"{self._newest()}."
            ) from error

    def _newest(self) -> str:
        steps = [int(path.name) for path in self.directory.glob("*") if path.name.isdigit()]
        return f", step {max(steps):,}" if steps else ", if there is one"

    def close(self) -> None:
        """Waits for what is being written."""
        with self._explaining_failures():
            self.manager.wait_until_finished()
        self.manager.close()


def _any_process(this: bool) -> bool:
    return (
        bool(np.any(multihost_utils.process_allgather(this))) if jax.process_count() > 1 else this
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _by_number(training: Training) -> dict[str, Any]:
    """Leaves under their numbers: Orbax need not know the optimizer's containers."""
    return {f"{i:05}": leaf for i, leaf in enumerate(jax.tree.leaves(training))}
