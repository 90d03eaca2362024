"""What all tests share."""

import os

# Eight virtual devices for the sharding tests; must be set before JAX starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

if not hasattr(jax, "enable_x64"):  # the oldest supported JAX has it elsewhere
    from jax.experimental import enable_x64

    jax.enable_x64 = enable_x64
