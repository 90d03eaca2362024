"""What the TPU compiler makes of an update: HBM bytes, FLOPs, collectives, memory, compile time.

    pip install -e '.[tpu]' && python -m benchmarks.tpu_compiler

No TPU is needed. All numbers but the compile times are deterministic for a version of libtpu.
"""

import argparse
import json
import os
import pathlib
import time

from examples.nanogpt.tpu import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # before JAX starts

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import gpt2, hlo

TOPOLOGY = "v5e:2x4"
RESULTS = pathlib.Path(__file__).parent / "results" / "tpu_compiler.json"


def mesh(devices: int = 1, mode: AxisType = AxisType.Auto) -> Mesh:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    return Mesh(np.array(topology.devices[:devices]), ("fsdp",), axis_types=(mode,))


def fsdp(shape: tuple[int, ...]) -> P:
    """The longest axis of a matrix is split."""
    longest = int(np.argmax(shape)) if len(shape) > 1 else None
    return P(*("fsdp" if axis == longest else None for axis in range(len(shape))))


def compile_update(optimizer: optax.GradientTransformation, shapes: dict, mesh: Mesh):
    """The compiled step; over several devices everything is sharded."""

    def of(leaf):
        spec = fsdp(leaf.shape) if mesh.size > 1 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = {n: of(jax.ShapeDtypeStruct(s, jnp.float32)) for n, s in shapes.items()}
    state = jax.tree.map(of, jax.eval_shape(optimizer.init, params))
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    auto = mesh.axis_types[0] == AxisType.Auto
    with jax.set_mesh(mesh):
        step = jax.jit(
            gpt2.make_step(optimizer), donate_argnums=(0, 1), out_shardings=out if auto else None
        )
        return step.lower(params, state, params).compile()


def measure(optimizer: optax.GradientTransformation, shapes: dict, mesh: Mesh) -> dict:
    """Per parameter of the whole model, on each device."""
    start = time.process_time()
    compiled = compile_update(optimizer, shapes, mesh)
    seconds = time.process_time() - start
    count = gpt2.parameters(shapes)
    text = compiled.as_text()
    sent = sum(size for _, size in hlo.collective_traffic(text).values())
    return {
        "hbm_bytes_per_parameter": hlo.hbm_bytes(text) / count,
        "flops_per_parameter": hlo.flops(compiled) / count,
        "collectives": hlo.collectives(text),
        "collective_bytes_per_parameter": sent / count,
        "temporary_bytes_per_parameter": compiled.memory_analysis().temp_size_in_bytes / count,
        "compile_cpu_seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=gpt2.LAYERS)
    parser.add_argument("--width", type=int, default=gpt2.WIDTH)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8], choices=range(1, 9))
    parser.add_argument("--only", nargs="+", help="names of optimizers; default: all")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()

    shapes = gpt2.shapes(args.layers, args.width)
    results = {}
    for devices in args.devices:
        for name, optimizer in gpt2.optimizers().items():
            if args.only and name not in args.only:
                continue
            results[f"{name}, {devices} devices"] = row = measure(optimizer, shapes, mesh(devices))
            print(
                f"{name:34} {devices} devices: "
                f"{row['hbm_bytes_per_parameter']:6.1f} bytes, "
                f"{row['flops_per_parameter']:8.0f} FLOPs, "
                f"{sum(row['collectives'].values()):4} collectives, "
                f"compiled in {row['compile_cpu_seconds']:.0f} s of a core",
                flush=True,
            )
    report = {
        **gpt2.about("libtpu"),
        "topology": TOPOLOGY,
        "matrices": f"GPT-2, {args.layers} layers of width {args.width}, float32, state donated",
        "results": results,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
