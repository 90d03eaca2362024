"""Benchmarks that need another machine: what they write, at sizes that run anywhere."""

import json
import time

import pytest
import test_nanogpt_train

from benchmarks import compile_table, gpu

quick_compilation = test_nanogpt_train.quick_compilation
TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--vocab-size", "256"]
TINY += ["--batch-size", "4", "--micro-batch-size", "2"]


def test_the_gpu_script_writes_each_arm_and_goes_on_after_one_that_fails(
    tmp_path, monkeypatch, capsys
):
    arms = {
        "without a kernel": ["--optimizer", "adamw", "--attention", "cudnn"],
        "torch.compile, adamw": gpu.ARMS["torch.compile, adamw"],
        "adamw": gpu.ARMS["adamw"],
    }
    monkeypatch.setattr(gpu, "ARMS", arms)
    monkeypatch.setattr(gpu, "STEPS", 2)
    monkeypatch.setattr(gpu, "installed", lambda package: package == "jax")
    out = tmp_path / "gpu.json"
    gpu.steps(TINY, out)
    report = json.loads(out.read_text())
    failed, row = report["results"]["without a kernel"], report["results"]["adamw"]
    assert "failed" in failed and "mfu" not in failed
    assert len(row["seconds_of_a_step"]) == gpu.ROUNDS and row["mfu"] is None  # of a CPU
    median = sorted(row["seconds_of_a_step"])[gpu.ROUNDS // 2]
    assert row["tokens_per_second"] == pytest.approx(4 * 16 / median)
    assert "torch.compile, adamw: skipped, since torch is not installed" in capsys.readouterr().out


def test_a_part_of_the_gpu_script_ends_with_its_time(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "GRACE", 5)
    start = time.monotonic()
    gpu.within(gpu.GRACE + 1, "timeit", "-n1", "-r1", "import time; time.sleep(300)")
    assert time.monotonic() - start < 60
    assert "the time for timeit is over" in capsys.readouterr().out


def test_the_page_of_compiled_steps():
    row = {
        "device": "TPU v5 lite",
        "device_bytes": 16 * 2**30,
        "devices": 16,
        "parameters": 124_000_000,
        "argument_bytes": 100 * 2**20,
        "temporary_bytes": 3996 * 2**20,
        "peak_bytes": 4096 * 2**20,
        "flops": 5e13,
        "collectives": {"all-reduce": [2, 2**21], "all-gather": [13, 2**20]},
        "cpu_seconds": 61.2,
    }
    results = {
        "v5e:4x4 small-mars_m-exact": {"refused": "RESOURCE_EXHAUSTED"},
        "v5e:4x4 small-adamw": row,
    }
    page = compile_table.page({"versions": {"jax": "1.2"}, "results": results})
    table = [line for line in page.splitlines() if line.startswith("|")][2:]
    assert table == [
        "| small-adamw | 124 | 100 | 3,996 | 4,096 (25%) | 50 | "
        "all-gather 13, 1; all-reduce 2, 2 | 61 |",
        "| small-mars_m-exact | | | | does not fit | | | |",
    ]
    assert "v5e:4x4: 16 x TPU v5 lite of 16,384 MiB, 64 sequences" in page and "jax 1.2" in page
    assert (
        "Not compiled for v5e:4x4: small-mars_adamw, small-mars_m, small-mars_adamw-exact, "
        "xl, medium, large.\n" in page
    )
    assert "Not compiled for v6e:4x4: xl, small, medium, large." in page
    flags = compile_table.flags("v5e:16x16 xl-mars_m-exact")
    assert flags[-1] == "--exact" and flags[flags.index("--batch-size") + 1] == "512"
