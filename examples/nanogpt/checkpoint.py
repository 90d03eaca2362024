"""Checkpoints by Orbax: written in the background, complete or not at all, the newest sound one
restored."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

Training = Any  # (params, opt_state)


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
        self.manager.save(
            step,
            args=ocp.args.Composite(
                training=ocp.args.StandardSave(_by_number(training)),
                settings=ocp.args.JsonSave(settings),
            ),
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
            except Exception as error:  # whatever a damaged file makes of Orbax's readers
                damaged = self.directory / f"damaged-{step}"
                (self.directory / str(step)).rename(damaged)
                self.manager.reload()
                reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
                print(f"checkpoint {step} cannot be read and is now {damaged}: {reason}")
                continue
            leaves = [saved.training[name] for name in sorted(saved.training)]
            return step, jax.tree.unflatten(jax.tree.structure(like), leaves), saved.settings
        return None

    def close(self) -> None:
        """Waits for what is being written."""
        self.manager.wait_until_finished()
        self.manager.close()


def _by_number(training: Training) -> dict[str, Any]:
    """Leaves under their numbers: Orbax need not know the optimizer's containers."""
    return {f"{i:05}": leaf for i, leaf in enumerate(jax.tree.leaves(training))}
