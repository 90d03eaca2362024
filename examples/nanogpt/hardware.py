"""What is known of accelerators, and the work of a training step."""

import ctypes
import sys
from typing import NamedTuple

import jax

from examples.nanogpt.model import GPTConfig

GIB = 2**30


class Chip(NamedTuple):
    """Of one JAX device."""

    flops: float  # dense bfloat16 operations a second
    memory: int  # bytes


# By the beginning of `device_kind`; from the makers' data sheets.
CHIPS = {
    "TPU v4": Chip(275e12, 32 * GIB),
    "TPU v5 lite": Chip(197e12, 16 * GIB),
    "TPU v5": Chip(459e12, 95 * GIB),
    "TPU v6 lite": Chip(918e12, 32 * GIB),
    "NVIDIA A100": Chip(312e12, 80 * GIB),
    "NVIDIA H100": Chip(989e12, 80 * GIB),
    "NVIDIA H200": Chip(989e12, 141 * 10**9),
}


# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Lets the next step reuse a step's memory, before JAX starts its threads; Linux only.

    A step's temporaries are one block, which glibc maps anew each time, page fault by page fault,
    unless it may keep as much; in one arena, since those of other threads end at 64 MiB.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)  # not in every libc
    mallopt(_M_ARENA_MAX, 1)
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        mallopt(option, GIB)


def chip(device: jax.Device) -> Chip | None:
    """None where nothing is known of this kind."""
    matches = [kind for kind in CHIPS if device.device_kind.startswith(kind)]
    return CHIPS[max(matches, key=len)] if matches else None


def flops_per_token(config: GPTConfig, exact: bool) -> float:
    """Operations that training a token takes: 6 N + 12 L D T, twice that in exact mode.

    N counts the matrices (the tied head once); attention counts all T² pairs. What is computed
    again to save memory, and the optimizer, do not count: this is the usual numerator of MFU.
    """
    L, D, T = config.layers, config.width, config.context
    matrices = L * 12 * D**2 + config.padded_vocab * D
    return (2 if exact else 1) * (6 * matrices + 12 * L * D * T)


def utilization(
    config: GPTConfig, exact: bool, tokens_per_second: float, device: jax.Device, devices: int
) -> float | None:
    """MFU: the share of the devices' peak that the model's own operations take."""
    known = chip(device)
    if known is None:
        return None
    return tokens_per_second * flops_per_token(config, exact) / (known.flops * devices)
