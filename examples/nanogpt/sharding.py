"""The mesh, and which axis of which array lies on it: all rules in one place.

Two axes: over "data" only the batch is split; over "fsdp" parameters and optimizer state too.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.nanogpt.config import Config

AXES = ("data", "fsdp")


def start_processes(config: Config) -> None:
    """Connects this process to the others of a run over several hosts, if it is one of them.

    JAX finds them on TPU pods, under Slurm and MPI, and from JAX_COORDINATOR_ADDRESS.
    """
    if not config.distributed and config.coordinator is None:
        return
    try:
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
    except Exception as error:  # each way of finding the others fails in its own
        raise ValueError(
            f"the processes of this run do not find each other ({str(error).splitlines()[0]}): "
            "start the same command on every host; where JAX does not know the cluster, with "
            "--coordinator HOST:PORT --num-processes N --process-id I."
        ) from error


def wait_for_all(name: str) -> None:
    """Until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def make_mesh(devices: Sequence[jax.Device], fsdp: int, width: int) -> Mesh:
    """A mesh of devices, `fsdp` of them to a copy of the model; 0: as many as divide `width`."""
    count = len(devices)
    fsdp = fsdp or math.gcd(count, width)
    if fsdp < 1 or count % fsdp:
        raise ValueError(
            f"--fsdp {fsdp} does not divide the {count} devices: use one of their divisors."
        )
    shape = (count // fsdp, fsdp)
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * 2, devices=devices)


def choose_devices(count: int) -> Sequence[jax.Device]:
    """The first `count` of all devices; 0 for all."""
    available = len(jax.devices())
    if not 0 <= count <= available:
        raise ValueError(f"--devices is {count}, but there are {available}: ask for no more.")
    if jax.process_count() > 1 and count not in (0, available):
        raise ValueError(
            f"--devices is {count}, but processes on several hosts use all {available}: leave it "
            "out."
        )
    return jax.devices()[: count or available]


def spec(shape: tuple[int, ...], fsdp: int) -> PartitionSpec:
    """The longest axis that fsdp divides is split; what has none is replicated.

    Of a kernel [L, m, n] that is m or n, of an embedding [V, D] it is V: never the layers, which
    are taken one by one.
    """
    divisible = [axis for axis, length in enumerate(shape) if length and length % fsdp == 0]
    if fsdp == 1 or not divisible:
        return PartitionSpec()
    longest = max(divisible, key=lambda axis: shape[axis])
    return PartitionSpec(*(AXES[1] if axis == longest else None for axis in range(len(shape))))


def of_training(mesh: Mesh, tree: Any) -> Any:
    """Shardings of parameters or optimizer state, whose arrays have the parameters' shapes."""
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, spec(leaf.shape, mesh.shape[AXES[1]])), tree
    )


def of_batch(mesh: Mesh) -> NamedSharding:
    """Of micro-batches [count, sequences, tokens]: sequences over all devices."""
    return NamedSharding(mesh, PartitionSpec(None, AXES))


class Batches:
    """Places a batch of `size` sequences on the mesh, in micro-batches [count, sequences, T + 1].

    Every process reads its own rows alone, so a batch must be a function of what all know.
    """

    def __init__(self, mesh: Mesh, count: int, size: int) -> None:
        self.shape, self.sharding = (count, size // count), of_batch(mesh)
        shares = self.sharding.addressable_devices_indices_map((*self.shape, 1)).values()
        mine = np.zeros(self.shape, bool)
        for share in shares:
            mine[share[:2]] = True
        self.rows = np.flatnonzero(mine)

    def abstract(self, context: int) -> jax.ShapeDtypeStruct:
        """The shape of a batch on the mesh."""
        shape = (*self.shape, context + 1)
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self.sharding)

    def place(self, tokens: np.ndarray) -> jax.Array:
        """The global array, from this process's rows."""
        columns = self.rows[: len(self.rows) // self.shape[0]]  # of every micro-batch
        micro = tokens.reshape(self.shape[0], len(columns), -1)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            return micro[:, np.searchsorted(columns, np.arange(self.shape[1])[index[1]])]

        return jax.make_array_from_callback((*self.shape, micro.shape[-1]), self.sharding, read)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def local_copy(mesh: Mesh, tree: Any) -> Any:
    """All of a tree on the first device of this process; every process must call it."""
    whole = jax.jit(lambda x: x, out_shardings=replicated(mesh))(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)
