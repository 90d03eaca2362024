"""Time of an update on the matrices of GPT-2: AdamW, Muon and the five, interleaved in one run.

    python -m benchmarks.update                      # GPT-2 small, 85 million parameters
    python -m benchmarks.update --layers 2           # less
    python -m benchmarks.update --torch              # and PyTorch's AdamW, MARS and Muon
    python -m benchmarks.update --torch --authors mars.py   # and the authors' MARS, downloaded
    JAX_PLATFORMS=cuda python -m benchmarks.update   # the same table on a GPU

`--torch` needs torch and pytorch_optimizer beside this library: an environment of its own.
"""

import argparse
import json
import pathlib
import runpy
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks import gpt2

RESULTS = pathlib.Path(__file__).parent / "results"


def jax_steps(shapes: dict, only: list[str] | None) -> tuple[dict, dict]:
    """A function for each optimizer that makes one update, and what is known of its program."""

    def random(seed):
        rng = np.random.default_rng(seed)
        return {n: jax.numpy.asarray(rng.normal(size=s), "float32") for n, s in shapes.items()}

    steps, facts = {}, {}
    for name, optimizer in gpt2.optimizers().items():
        if only and name not in only:
            continue
        params, grads = random(0), random(1)
        state = jax.jit(optimizer.init)(params)
        jitted = jax.jit(gpt2.make_step(optimizer), donate_argnums=(0, 1))
        start = time.perf_counter()
        compiled = jitted.lower(params, state, grads).compile()
        facts[name] = {
            "compile_seconds": time.perf_counter() - start,
            "state_bytes_per_parameter": gpt2.state_bytes(optimizer, params),
            "peak_bytes_per_parameter": _peak_bytes(compiled) / gpt2.parameters(shapes),
        }

        def step(compiled=compiled, grads=grads, trees=[params, state]):  # noqa: B006  # its own
            trees[:] = compiled(*trees, grads)
            jax.block_until_ready(trees)

        steps[name] = step
        del params, state
    return steps, facts


def _peak_bytes(compiled) -> int:
    memory = compiled.memory_analysis()
    unaliased = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + unaliased + memory.temp_size_in_bytes


def torch_steps(
    shapes: dict, only: list[str] | None, authors: pathlib.Path | None
) -> tuple[dict, dict]:
    import pytorch_optimizer
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    factories = {
        "torch.optim.AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "pytorch_optimizer.MARS": lambda p: pytorch_optimizer.MARS(p, lr=1e-3),
        "pytorch_optimizer.Muon": lambda p: pytorch_optimizer.Muon(
            [{"params": p, "use_muon": True}], lr=1e-3
        ),
    }
    if authors:  # a file that the user has downloaded: MARS/optimizers/mars.py of AGI-Arena/MARS
        module = runpy.run_path(str(authors))
        factories["the authors' MARS"] = lambda p: module["MARS"](p, lr=1e-3)
    steps = {}
    for name, factory in factories.items():
        if only and name not in only:
            continue
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, device=device)) for s in shapes.values()]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = factory(params)

        def step(optimizer=optimizer):
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()

        steps[name] = step
    return steps, {name: {} for name in steps}


def interleaved(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, in turns, so that a disturbance meets all; the first ones warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--torch", action="store_true", help="PyTorch's optimizers too")
    parser.add_argument("--authors", type=pathlib.Path, help="the authors' mars.py")
    parser.add_argument("--only", nargs="+", help="names of optimizers; default: all")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()

    shapes = gpt2.shapes(args.layers, args.width)
    packages = ("torch", "pytorch_optimizer") if args.torch else ()
    steps, results = jax_steps(shapes, args.only)
    if args.torch:
        more, facts = torch_steps(shapes, args.only, args.authors)
        steps, results = steps | more, results | facts
    for name, seconds in interleaved(steps, args.rounds).items():
        results[name] |= {"median_seconds": statistics.median(seconds), "seconds": seconds}

    first = next(iter(results.values()))["median_seconds"]
    for name, row in results.items():
        row["ratio_to_first"] = row["median_seconds"] / first
        print(
            f"{name:34} {1e3 * row['median_seconds']:9.1f} ms {row['ratio_to_first']:7.2f} x"
            + (f"  compiled in {row['compile_seconds']:5.1f} s" if "compile_seconds" in row else "")
        )
    report = {
        **gpt2.about(*packages),
        "matrices": f"GPT-2, {args.layers} layers of width {args.width}, float32, state donated",
        "results": results,
    }
    name = f"update_{jax.default_backend()}.json"
    (args.out or RESULTS / name).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
