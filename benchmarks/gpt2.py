"""The matrices of GPT-2, the optimizers compared on them, and what each report begins with."""

import datetime
import importlib.metadata
import math
import os
import platform
import shlex
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mars_optax

LAYERS, WIDTH = 12, 768


def shapes(layers: int = LAYERS, width: int = WIDTH) -> dict[str, tuple[int, int]]:
    """Kernels (in, out); 85 million parameters in 48 matrices for GPT-2 small."""
    kernels = {
        "attention": (width, 3 * width),
        "attention_out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    return {f"{name}_{i}": shape for i in range(layers) for name, shape in kernels.items()}


def parameters(of: dict[str, tuple[int, int]]) -> int:
    return sum(math.prod(shape) for shape in of.values())


def optimizers() -> dict[str, optax.GradientTransformation]:
    bf16 = {"ns_dtype": jnp.bfloat16}
    return {
        "optax.adamw": optax.adamw(1e-3),
        "optax.contrib.muon": optax.contrib.muon(1e-3),
        "mars_adamw": mars_optax.mars_adamw(1e-3),
        "mars_adamw, no clip": mars_optax.mars_adamw(1e-3, clip_norm=None),
        "mars_adamw, bfloat16 gradients": mars_optax.mars_adamw(1e-3, grad_dtype=jnp.bfloat16),
        "mars_lion": mars_optax.mars_lion(1e-3),
        "mars_sgdm": mars_optax.mars_sgdm(1e-3),
        "mars_sgdm, no clip": mars_optax.mars_sgdm(1e-3, clip_norm=None),
        "mars_shampoo": mars_optax.mars_shampoo(1e-3),
        "mars_m": mars_optax.mars_m(1e-3),
        "mars_m, no clip": mars_optax.mars_m(1e-3, clip_norm=None),
        "mars_m, bfloat16": mars_optax.mars_m(1e-3, **bf16),
        "mars_m, bfloat16, standard form": mars_optax.mars_m(1e-3, ns_gram=False, **bf16),
    }


def make_step(optimizer: optax.GradientTransformation) -> Any:
    """(params, state, grads) -> (params, state); donate the first two."""

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def about(*packages: str) -> dict[str, Any]:
    """How a report was made: the command, the machine's kind, the day and the versions."""
    device = jax.devices()[0]
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{_module()}", *sys.argv[1:]]),
        "device": f"{device.platform}: {cpu if device.platform == 'cpu' else device.device_kind}",
        "date": datetime.date.today().isoformat(),
        "versions": {p: importlib.metadata.version(p) for p in ("jax", "optax", *packages)},
    }


def _module() -> str:
    return os.path.splitext(os.path.basename(sys.argv[0]))[0]


def state_bytes(optimizer: optax.GradientTransformation, params: Any) -> float:
    """Per parameter; counters are left out."""
    leaves = [x for x in jax.tree.leaves(jax.eval_shape(optimizer.init, params)) if x.shape]
    count = sum(p.size for p in jax.tree.leaves(params))
    return sum(x.size * x.dtype.itemsize for x in leaves) / count
