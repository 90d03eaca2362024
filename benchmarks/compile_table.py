"""What whole training steps of GPT-2 need on TPUs, by the TPU compiler; no TPU is needed.

    pip install -e '.[examples,tpu]' && python -m benchmarks.compile_table

compiles one after the other, the most telling first, each for one to three minutes, writes every
result at once into results/compile.json, skips those that are there, and writes docs/compile.md.
`--table` writes that page alone.
"""

import argparse
import importlib.metadata
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "compile.json"
PAGE = ROOT / "docs" / "compile.md"
BATCHES = {"v5e:4x4": 64, "v5e:16x16": 512, "v5p:2x2x4": 64, "v6e:4x4": 64}  # of 1024 tokens
PRESETS = ("small", "medium", "large", "xl")
VARIANTS = ("mars_adamw", "adamw", "mars_m", "mars_adamw-exact", "mars_m-exact")
FIRST = [
    ("v5e:4x4", "small"),
    ("v5e:4x4", "xl"),
    ("v5e:16x16", "xl"),
    ("v6e:4x4", "xl"),
    ("v5p:2x2x4", "xl"),
    ("v5e:4x4", "medium"),
    ("v5e:4x4", "large"),
]
PAIRS = FIRST + [(t, p) for p in PRESETS for t in BATCHES if (t, p) not in FIRST]
ALL = [f"{topology} {preset}-{variant}" for topology, preset in PAIRS for variant in VARIANTS]
INTRODUCTION = """\
# Training steps on TPUs that are not there

What the TPU compiler makes of a whole training step (forward and backward pass, clip, optimizer,
diagnostics) of GPT-2 with 1024 tokens a sequence, bfloat16 matrix products and float32 parameters,
sharded with `--fsdp 0`. `-exact` takes two gradients a step. Memory and collectives are those of a
chip; the peak is what is alive at once, of arguments and of temporaries, which may be more than
fit together. Operations are those of matrix products, on all chips, and count what is computed
again. A collective counts as often as its loop runs. Compilation took so many seconds of one CPU
core, with the program's start. No step has been run on a TPU.

Made by `python -m benchmarks.compile_table` with {versions}; raw numbers in
`benchmarks/results/compile.json`, single steps by
[`python -m examples.nanogpt.compile`](trainer.md#planning-without-the-machine).
"""


def flags(key: str) -> list[str]:
    """The trainer's flags of a result such as "v5e:4x4 xl-mars_m-exact"."""
    topology, name = key.split()
    preset, variant = name.split("-", 1)
    batch, optimizer = str(BATCHES[topology]), variant.removesuffix("-exact")
    found = ["--topology", topology, "--preset", preset, "--optimizer", optimizer]
    found += ["--batch-size", batch, "--dtype", "bfloat16"]
    return found + ["--exact"] * variant.endswith("-exact")


def measure(key: str) -> dict[str, Any]:
    """The report, or why the compiler refused, from a process of its own."""
    command = [sys.executable, "-m", "examples.nanogpt.compile", "--json", *flags(key)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        if "RESOURCE_EXHAUSTED" not in reason:
            sys.exit(f"{key}: {reason}")
        return {"refused": reason}
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout), "cpu_seconds": round(seconds, 1)}


def page(report: dict[str, Any]) -> str:
    """docs/compile.md: a table for every topology."""
    results = report["results"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [INTRODUCTION.format(versions=versions)]
    for topology, batch in BATCHES.items():
        keys = [f"{topology} {p}-{v}" for p in PRESETS for v in sorted(VARIANTS)]
        rows = {key.split()[1]: results[key] for key in keys if key in results}
        fitting = next((row for row in rows.values() if "refused" not in row), None)
        if fitting is None:
            continue
        memory = fitting["device_bytes"]
        lines += [
            f"## {topology}: {fitting['devices']} x {fitting['device']} of {mib(memory)} MiB, "
            f"{batch} sequences a step\n",
            "| step | parameters (million) | arguments (MiB) | temporaries (MiB) | peak (MiB) | "
            "operations (10¹²) | collectives: number, MiB | compiled in (s) |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [line(name, row, memory) for name, row in rows.items()]
        lines.append("")
    missing = {}
    for topology, preset in PAIRS:
        left = [v for v in VARIANTS if f"{topology} {preset}-{v}" not in results]
        named = [preset] if left == list(VARIANTS) else [f"{preset}-{v}" for v in left]
        missing.setdefault(topology, []).extend(named)
    lines += [
        f"Not compiled for {topology}: {', '.join(names)}.\n"
        for topology, names in missing.items()
        if names
    ]
    return "\n".join(lines)


def line(name: str, row: dict[str, Any], memory: int) -> str:
    if "refused" in row:
        return f"| {name} | | | | does not fit | | | |"
    moved = "; ".join(
        f"{kind} {count:,}, {mib(size)}"
        for kind, (count, size) in sorted(row["collectives"].items())
    )
    peak = row["peak_bytes"]
    share = f"{mib(peak)} ({peak / memory:.0%})" if peak else ""
    return (
        f"| {name} | {row['parameters'] / 1e6:,.0f} | {mib(row['argument_bytes'])} | "
        f"{mib(row['temporary_bytes'])} | {share} | {row['flops'] / 1e12:,.0f} | {moved} | "
        f"{row['cpu_seconds']:.0f} |"
    )


def mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="compile nothing")
    parser.add_argument("--only", nargs="+", default=ALL, choices=ALL, metavar="RESULT")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"results": {}}
    for key in () if args.table else args.only:
        row = found["results"].get(key)
        if row and ("refused" in row or row["peak_bytes"]):
            continue
        row = measure(key)
        found["versions"] = {p: importlib.metadata.version(p) for p in ("jax", "optax", "libtpu")}
        found["results"][key] = row
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{key}: {row.get('refused') or mib(row['peak_bytes']) + ' MiB'}", flush=True)
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
