"""What all tests share."""

import atexit
import os
import shutil
import tempfile

# Eight virtual devices for the sharding tests; must be set before JAX starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Many tests train the same tiny networks: the workers of one run and the programs that they start
# compile a program once.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="mars-optax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

import jax

if not hasattr(jax, "enable_x64"):  # the oldest supported JAX has it elsewhere
    from jax.experimental import enable_x64

    jax.enable_x64 = enable_x64
