"""The mesh, and which axis of which array lies on it: all rules in one place.

Two axes: over "data" only the batch is split; over "fsdp" parameters and optimizer state too.
"""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp")


def make_mesh(devices: int, fsdp: int) -> Mesh:
    """A mesh of the first `devices` devices (0: all), `fsdp` of them to a copy of the model."""
    available = len(jax.devices())
    count = devices or available
    if not 1 <= count <= available:
        raise ValueError(f"--devices is {devices}, but there are {available}: ask for no more.")
    if fsdp < 1 or count % fsdp:
        raise ValueError(
            f"--fsdp {fsdp} does not divide the {count} devices: use one of their divisors."
        )
    shape = (count // fsdp, fsdp)
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * 2, devices=jax.devices()[:count])


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


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
