"""What a training step of the demo costs on this machine: `python -m benchmarks.trainer_step`.

All arms run in turn, round after round, and medians are compared, so that a machine that slows down
does so for all of them. The goals: an exact step at most 2.05 times the approximate one, the
diagnostics at most 5 % of a run, start-up to the first step under 40 s.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np

from examples.nanogpt import data, hardware, model, sharding
from examples.nanogpt.config import Config, parse
from examples.nanogpt.step import make_train_step

RESULTS = Path(__file__).parent / "results"
NEVER = 10**9
ARMS = {
    "adamw": ["--optimizer", "adamw"],
    "mars_adamw": ["--optimizer", "mars_adamw"],
    "mars_adamw, no diagnostics": ["--optimizer", "mars_adamw", "--log-every", str(NEVER)],
    "mars_adamw, diagnostics at every step": ["--optimizer", "mars_adamw", "--log-every", "1"],
    "mars_adamw exact": ["--optimizer", "mars_adamw", "--exact", "--log-every", str(NEVER)],
    "mars_m": ["--optimizer", "mars_m"],
    "mars_m, no diagnostics": ["--optimizer", "mars_m", "--log-every", str(NEVER)],
    "mars_m exact": ["--optimizer", "mars_m", "--exact", "--log-every", str(NEVER)],
}


def stepper(flags: list[str], steps: int) -> Callable[[], float]:
    """A function that takes `steps` training steps and returns the seconds of one."""
    config, batches, graphdef, params = prepare(flags)
    optimizer = config.build_optimizer()
    state = jax.jit(optimizer.init)(params)
    step = make_train_step(graphdef, optimizer, config)
    tokens = batches.place(tokens_of(config))
    done = 0

    def run() -> float:
        nonlocal params, state, done
        start = time.perf_counter()
        for _ in range(steps):
            params, state, numbers = step(params, state, tokens, np.int32(done))
            done += 1
        jax.block_until_ready((params, state, numbers))
        return (time.perf_counter() - start) / steps

    run()  # compiles
    return run


def gradient_timer(flags: list[str], steps: int) -> Callable[[], float]:
    """The same for the loss and its gradient alone, micro-batch by micro-batch."""
    config, batches, graphdef, params = prepare(flags)
    tokens = batches.place(tokens_of(config))
    gradient = jax.jit(partial(accumulated, graphdef))

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            out = gradient(params, tokens)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / steps

    run()
    return run


def accumulated(graphdef, params, tokens):
    def add(total, micro):
        value = jax.value_and_grad(lambda p: model.loss(graphdef, p, micro))(params)
        return jax.tree.map(lambda a, b: a + b, total, value), None

    zeros = (np.float32(0), jax.tree.map(lambda p: 0 * p, params))
    return jax.lax.scan(add, zeros, tokens)[0]


def prepare(flags: list[str]):
    hardware.keep_freed_memory()
    config = parse([*flags, "--devices", "1", "--vocab-size", str(data.BYTES)])
    mesh = sharding.make_mesh(sharding.choose_devices(1), 1, config.model.width)
    batches = sharding.Batches(mesh, config.micro_batches(1), config.batch_size)
    graphdef, _ = model.define(config.model)
    return config, batches, graphdef, model.init(config.model, 0)


def tokens_of(config: Config) -> np.ndarray:
    draw = np.random.default_rng(0)
    shape = (config.batch_size, config.model.context + 1)
    return draw.integers(0, data.BYTES, shape, dtype=np.int32)


def start_up() -> float:
    """Seconds from the command to the first step's line in metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_bytes(bytes(np.random.default_rng(0).integers(32, 127, 100_000, np.uint8)))
        command = [sys.executable, "-m", "examples.nanogpt.train", "--data", str(text)]
        command += ["--out-dir", f"{folder}/run", "--checkpoint-every", "0"]
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=RESULTS.parent.parent
        )
        metrics = Path(folder) / "run" / "metrics.jsonl"
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise SystemExit("the trainer ended before its first step")
                time.sleep(0.02)
            return time.perf_counter() - start
        finally:
            process.kill()
            process.wait()


def circumstances() -> dict[str, str]:
    """When and where something was measured, and by what."""
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "command": " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of an arm in a round")
    options = parser.parse_args()
    arms = {name: stepper(flags, options.steps) for name, flags in ARMS.items()}
    arms["gradient alone"] = gradient_timer(ARMS["adamw"], options.steps)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(options.rounds):
        for name, run in arms.items():
            seconds[name].append(run())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    plain, often = median["mars_adamw, no diagnostics"], median["mars_adamw"]
    ratios = {
        "exact / approximate, mars_adamw": median["mars_adamw exact"] / plain,
        "exact / approximate, mars_m": median["mars_m exact"] / median["mars_m, no diagnostics"],
        "diagnostics at every tenth step, share of a run": often / plain - 1,
        "optimizer's share of a step, adamw": 1 - median["gradient alone"] / median["adamw"],
        "optimizer's share of a step, mars_adamw": 1 - median["gradient alone"] / plain,
        "optimizer's share of a step, mars_m": 1
        - median["gradient alone"] / median["mars_m, no diagnostics"],
    }
    first_step = start_up()
    for name, value in median.items():
        print(f"{name:48} {1e3 * value:8.2f} ms")
    for name, value in ratios.items():
        print(f"{name:48} {value:8.3f}")
    print(f"{'start-up to the first step':48} {first_step:8.1f} s")
    RESULTS.mkdir(exist_ok=True)
    versions = {"jax": jax.__version__, "python": platform.python_version()}
    (RESULTS / "trainer_step.json").write_text(
        json.dumps(
            {
                **circumstances(),
                "versions": versions,
                "seconds_of_a_step": seconds,
                "ratios": ratios,
                "seconds_to_first_step": first_step,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
