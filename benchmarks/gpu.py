"""The trainer on one GPU, within ten minutes: `python -m benchmarks.gpu`, on a machine with one.

    pip install -e '.[examples]' 'jax[cuda12]' torch     # torch is optional
    python -m benchmarks.gpu                             # steps, then update
    python -m benchmarks.gpu --part train --minutes 28 --steps 300 --data FOLDER

`steps`: tokens per second and MFU of GPT-2 small's training step at 1024 tokens in bfloat16, with
AdamW, MARS-AdamW and MARS-M, beside PyTorch's step of the same shape (torch.compile, fused AdamW,
bfloat16 autocast) on the same card. The goals: 45 % MFU, and no slower than PyTorch's.
`update`: the table of benchmarks.update. `train`: the three optimizers at the papers' settings, by
the trainer's --compare, for as long as there is; the same command again goes on with it.

Whatever else is given are flags of the trainer. Each part is a process of its own, which ends when
the minutes are over; what was measured till then is in results/gpu.json and update_gpu.json.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SMALL = ["--preset", "small", "--dtype", "bfloat16", "--devices", "1"]
# 32 sequences at once fit a card of 80 GB, all their logits too.
STEP = [*SMALL, "--batch-size", "32", "--micro-batch-size", "32", "--loss-chunk", "0"]
TRAIN = [*SMALL, "--micro-batch-size", "32", "--steps", "150"]
TRAIN += ["--compare", "adamw,mars_adamw,mars_m", "--out-dir", "runs/gpu-compare"]
ARMS = {
    "adamw": ["--optimizer", "adamw"],
    "torch.compile, adamw": ["--optimizer", "adamw"],
    "mars_adamw": ["--optimizer", "mars_adamw"],
    "mars_m": ["--optimizer", "mars_m"],
    "adamw, layers unrolled": ["--optimizer", "adamw", "--unroll"],
}
WARM_UP, ROUNDS, STEPS = 3, 5, 10
GRACE = 20  # seconds in which a process may end by itself


def steps(flags: list[str], out: Path) -> None:
    """Measures one arm after the other; each is written at once."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too
    import jax

    from examples.nanogpt import hardware
    from examples.nanogpt.config import parse

    device = jax.devices()[0]
    packages = [p for p in ("jax", "torch") if installed(p)]
    report: dict[str, Any] = {
        "device": f"{device.platform}: {device.device_kind}",
        "versions": {p: importlib.metadata.version(p) for p in packages},
        "flags": [*STEP, *flags],
        "results": {},
    }
    for name, own in ARMS.items():
        if name.startswith("torch") and "torch" not in packages:
            print(f"{name}: skipped, since torch is not installed", flush=True)
            continue
        config = parse([*STEP, *flags, *own])
        try:
            start = time.perf_counter()
            run = (torch_stepper if name.startswith("torch") else stepper)(config)
            ready = time.perf_counter() - start
            seconds = [run(STEPS) / STEPS for _ in range(ROUNDS)]
            speed = config.batch_size * config.model.context / statistics.median(seconds)
            mfu = hardware.utilization(config.model, config.exact, speed, device, 1)
            row = {"tokens_per_second": speed, "mfu": mfu}
            row |= {"seconds_to_compile": ready, "seconds_of_a_step": seconds}
            shown = "MFU unknown" if mfu is None else f"MFU {mfu:.1%}"
            print(f"{name:24} {speed:11,.0f} tokens/s, {shown}", flush=True)
        except Exception as error:  # too little memory, a kernel that is missing: go on with others
            row = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:500]}
            print(f"{name:24} {row['failed']}", flush=True)
        run = None  # its memory is the next arm's
        report["results"][name] = row
        out.write_text(json.dumps(report, indent=1) + "\n")


def stepper(config: Any) -> Callable[[int], float]:
    """A function that takes so many steps of ours and returns the seconds."""
    import jax
    import numpy as np

    from examples.nanogpt import model, sharding
    from examples.nanogpt.step import make_train_step

    mesh = sharding.make_mesh(jax.devices()[:1], 1, config.model.width)
    batches = sharding.Batches(mesh, config.micro_batches(1), config.batch_size)
    graphdef, _ = model.define(config.model)
    optimizer = config.build_optimizer()
    params = model.init(config.model, 0)
    training = (params, jax.jit(optimizer.init)(params))
    train_step = make_train_step(graphdef, optimizer, config)
    tokens, done = batches.place(tokens_of(config)), 0

    def run(count: int) -> float:
        nonlocal training, done
        start = time.perf_counter()
        for _ in range(count):
            *training, _ = train_step(*training, tokens, np.int32(done))
            done += 1
        jax.block_until_ready(training)
        return time.perf_counter() - start

    run(WARM_UP)  # compiles
    return run


def torch_stepper(config: Any) -> Callable[[int], float]:
    """The same of PyTorch's."""
    import torch

    from benchmarks.trainer_torch import GPT

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    network = GPT(config.model).to(device)
    compiled = torch.compile(network)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, (0.9, 0.95), fused=True)
    tokens = torch.from_numpy(tokens_of(config)).long().to(device)
    micro = tokens.chunk(config.micro_batches(1))

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            for part in micro:
                with torch.autocast(device, torch.bfloat16):
                    loss = compiled(part) / len(micro)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(WARM_UP)
    return run


def tokens_of(config: Any) -> Any:
    import numpy as np

    shape = (config.batch_size, config.model.context + 1)
    draw = np.random.default_rng(0)
    return draw.integers(0, config.model.vocab_size, shape, dtype=np.int32)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def within(seconds: float, *command: str) -> None:
    """Runs a module; when its time is over it is asked to end, as the trainer can, then ended."""
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=RESULTS.parent.parent)
    try:
        code = process.wait(max(0.0, seconds - GRACE))
        if code:
            print(f"{command[0]} ended with {code}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"the time for {command[0]} is over", flush=True)
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--part", choices=("steps", "update", "train"), help="this alone")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.inside:
        return steps(flags, args.out)
    end = time.monotonic() + 60 * args.minutes
    left = lambda: end - time.monotonic()  # noqa: E731
    if args.part in (None, "steps"):
        out = str(args.out.absolute())
        within(left(), "benchmarks.gpu", "--inside", "--out", out, *flags)
    if args.part in (None, "update"):
        torch = ["--torch"] if installed("pytorch_optimizer") else []
        within(left(), "benchmarks.update", *torch, *(flags if args.part else []))
    if args.part == "train":
        within(left(), "examples.nanogpt.train", *TRAIN, *flags)


if __name__ == "__main__":
    main()
