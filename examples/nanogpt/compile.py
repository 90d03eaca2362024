"""Compiles a whole training step for TPUs that are not there: `python -m examples.nanogpt.compile`.

It takes the trainer's flags and --topology, asks the real TPU compiler (the package libtpu), and
prints what the step needs: memory, operations, communication.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import time
from typing import NamedTuple

from examples.nanogpt.tpu import ENVIRONMENT

if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)  # before JAX starts

import jax
import numpy as np
from jax.experimental import topologies

from benchmarks import hlo
from examples.nanogpt import data, hardware, model, sharding
from examples.nanogpt.config import Config, parse
from examples.nanogpt.step import make_train_step

PROGRAM = "python -m examples.nanogpt.compile"


class Report(NamedTuple):
    """What a compiled step needs; bytes are those of one device."""

    parameters: int
    devices: int
    argument_bytes: int
    temporary_bytes: int  # all of them, though not all are alive at once
    peak_bytes: int  # arguments, results and temporaries that are alive at once
    flops: float  # of matrix products, on all devices together
    model_flops: float  # of the model alone
    collectives: dict[str, tuple[int, int]]  # by kind: how many, and their bytes
    compile_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(sys.argv[1:])
    if {"-h", "--help"} & set(rest):
        print("--topology v5e:2x4, v5e:16x16, v4:2x2x4, v5p:2x2x2, v6e:4x4, ...; --json for data\n")
    config = parse(rest, PROGRAM, fsdp=0)
    try:
        devices = topology(own.topology)
        report = compile_step(config, devices)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except jax.errors.JaxRuntimeError as error:  # most often a step that does not fit
        sys.exit(
            f"error: the TPU compiler refuses this step: {str(error).splitlines()[0]} Where memory "
            "is short: a smaller --micro-batch-size, --remat, a --loss-chunk, a larger --fsdp or "
            "topology."
        )
    if own.json:
        chip = hardware.chip(devices[0])
        about = {"topology": own.topology, "device": devices[0].device_kind, "name": config.name}
        about["device_bytes"] = chip.memory if chip else None
        print(json.dumps({**about, **report._asdict()}))
    else:
        print(describe(config, own.topology, devices[0], report))


def topology(name: str) -> list[jax.Device]:
    """The devices of a topology such as "v5e:2x4", which compile but cannot run."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "the TPU compiler is not installed: run `pip install libtpu` (in an environment of its "
            "own, since a plain `import jax` looks for a TPU where it is installed)."
        )
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # whatever the plugin raises
        raise ValueError(
            f"--topology {name} cannot be asked of the TPU compiler "
            f"({str(error).splitlines()[0]}): use a generation and its grid, such as v5e:2x4, "
            "v5e:16x16, v5p:2x2x2 or v6e:4x4."
        ) from error
    return list(described.devices)


def compile_step(config: Config, devices: list[jax.Device]) -> Report:
    """Compiles the training step of `config` for these devices."""
    config.check()
    shape = config.model
    if shape.attention == "auto":  # which asks the device at hand
        shape = dataclasses.replace(shape, attention="xla")
    if config.preset == "demo" and config.init_from is None:  # its corpus decides
        shape = dataclasses.replace(shape, vocab_size=data.BYTES)
    config = dataclasses.replace(config, model=shape)
    graphdef, params = model.define(shape)
    optimizer = config.build_optimizer()
    opt_state = jax.eval_shape(optimizer.init, params)
    mesh = sharding.make_mesh(devices, config.fsdp, shape.width)
    batches = sharding.Batches(mesh, config.micro_batches(mesh.size), config.batch_size)

    where = tuple(sharding.of_training(mesh, tree) for tree in (params, opt_state))
    place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)  # noqa: E731
    training = jax.tree.map(place, (params, opt_state), where)
    step = jax.ShapeDtypeStruct((), np.int32, sharding=sharding.replicated(mesh))
    train_step = make_train_step(graphdef, optimizer, config, (*where, sharding.replicated(mesh)))
    with jax.set_mesh(mesh):
        traced = train_step.trace(*training, batches.abstract(shape.context), step)
    start = time.perf_counter()
    compiled = traced.lower().compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Report(
        parameters=model.count(params),
        devices=mesh.size,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        flops=hlo.matrix_flops(traced.jaxpr.jaxpr),
        model_flops=config.batch_size
        * shape.context
        * hardware.flops_per_token(shape, config.exact),
        collectives=hlo.collective_traffic(compiled.as_text()),
        compile_seconds=seconds,
    )


def describe(config: Config, topology: str, device: jax.Device, report: Report) -> str:
    chip = hardware.chip(device)
    mib = lambda count: f"{count / 2**20:,.0f} MiB"  # noqa: E731
    lines = [
        f"{config.name} on {topology}: {report.devices} x {device.device_kind}, "
        f"{config.batch_size} x {config.model.context} tokens a step",
        f"parameters    {report.parameters:,}",
        f"memory        {mib(report.argument_bytes)} of arguments and "
        f"{mib(report.temporary_bytes)} of temporaries a device; peak {mib(report.peak_bytes)}"
        + (f" of {mib(chip.memory)} ({report.peak_bytes / chip.memory:.0%})" if chip else ""),
        f"operations    {report.flops:.3e} in matrix products a step, on all devices; loops count "
        "as often as they run, and what is computed twice counts twice "
        f"({report.model_flops:.3e} for the model alone, as MFU counts)",
    ]
    if chip:
        shortest = report.flops / report.devices / chip.flops
        lines.append(f"at least      {1e3 * shortest:.1f} ms a step, at the chip's bfloat16 peak")
    lines.append("collectives   a device and step, by kind: number, bytes")
    lines += [
        f"  {kind:19} {count:5,}  {mib(size)}"
        for kind, (count, size) in sorted(report.collectives.items())
    ] or ["  none"]
    lines.append(f"compiled in   {report.compile_seconds:.1f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
