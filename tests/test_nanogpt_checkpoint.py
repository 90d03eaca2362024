"""Runs that are stopped, killed or damaged go on to the numbers of a run that was not."""

import dataclasses
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import pytest
import test_nanogpt_train
from test_nanogpt_train import rows_of, tiny

from examples.nanogpt import data, metrics, plot, train

ROOT = pathlib.Path(__file__).parent.parent


# The same fixtures as in the trainer's own tests.
quick_compilation, text = test_nanogpt_train.quick_compilation, test_nanogpt_train.text


class Stop(Exception):
    pass


def losses(config):
    keys = ("step", "train_loss", "grad_norm", "validation_loss")
    return [[row.get(key) for key in keys] for row in rows_of(config)]


def run_and_stop(config, monkeypatch, at):
    """Trains until the batch of step `at` is asked for."""
    batch = data.batch

    def stopping(split, seed, step, *rest, **options):
        if step == at:
            raise Stop
        return batch(split, seed, step, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(data, "batch", stopping)
        with pytest.raises(Stop):
            train.train(config)


@pytest.mark.parametrize(("optimizer", "exact"), [("mars_m", False), ("mars_adamw", True)])
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(optimizer, exact, text, monkeypatch):
    config = tiny(text, optimizer, exact=exact, checkpoint_every=5)
    whole = train.train(config)
    stopped = dataclasses.replace(config, out_dir=text.parent / "stopped")
    run_and_stop(stopped, monkeypatch, at=13)
    assert train.train(dataclasses.replace(stopped, resume=True)) == whole
    assert losses(stopped) == losses(config)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(text, monkeypatch, capsys):
    config = tiny(text, "mars_m", checkpoint_every=5)
    whole = train.train(dataclasses.replace(config, out_dir=text.parent / "whole"))
    run_and_stop(config, monkeypatch, at=13)
    newest = config.directory / "checkpoints" / "10"
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    capsys.readouterr()
    assert train.train(dataclasses.replace(config, resume=True)) == whole
    output = capsys.readouterr().out
    assert "checkpoint 10 cannot be read and is now" in output
    assert "resuming after step 5" in output


def test_what_may_not_be_resumed_or_replaced(text, monkeypatch):
    config = tiny(text, "adamw", checkpoint_every=5)
    resumed = dataclasses.replace(config, resume=True)
    with pytest.raises(train.TrainingError, match="no checkpoint to resume from"):
        train.train(resumed)
    run_and_stop(config, monkeypatch, at=7)
    with pytest.raises(train.TrainingError, match="unfinished run: pass --resume"):
        train.train(config)
    with pytest.raises(train.TrainingError, match=r"made with learning_rate = 0\.006, not 0\.5"):
        train.train(dataclasses.replace(resumed, learning_rate=0.5))
    with pytest.raises(train.TrainingError, match="exclude each other"):
        train.train(dataclasses.replace(resumed, overwrite=True))
    train.train(dataclasses.replace(config, overwrite=True))
    with pytest.raises(train.TrainingError, match="finished run: pass --overwrite"):
        train.train(resumed)


# The command line of a run that would take minutes, with a checkpoint every few steps.
def start(folder, corpus, *flags, **environment):
    shape = ["--layers", "2", "--heads", "2", "--width", "16", "--context", "16"]
    command = [sys.executable, "-m", "examples.nanogpt.train", *shape, "--optimizer", "mars_m"]
    command += ["--data", str(corpus), "--out-dir", str(folder), "--sample-tokens", "0"]
    command += ["--log-every", "1", "--eval-every", "1000000", "--batch-size", "4", *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_step(folder, step, process):
    path = folder / "metrics.jsonl"
    for _ in range(3600):
        assert process.poll() is None, process.communicate()
        rows = plot.read_metrics(path) if path.exists() else []
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within three minutes")


def resumed_after(process):
    """The step from which a process says to go on."""
    line = process.stdout.readline()
    while "resuming after step" not in line:
        assert line, process.communicate()
        line = process.stdout.readline()
    return int(line.split()[-1].replace(",", ""))


def test_sigterm_saves_and_exits_with_0(text, tmp_path):
    folder = tmp_path / "terminated"
    process = start(folder, text, "--steps", "1000000", "--checkpoint-every", "1000000")
    wait_for_step(folder, 20, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert "stopped by SIGTERM after step" in output and "--resume" in output
    done = int(output.split("after step ")[1].split(";")[0].replace(",", ""))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(done)]


def test_the_handler_of_sigterm_is_restored():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("ours"))
    try:
        with pytest.raises(Stop), train.catching_sigterm() as stop_is_asked:
            assert not stop_is_asked(1)
            signal.raise_signal(signal.SIGTERM)
            assert stop_is_asked(2) and not heard
            raise Stop  # whatever ends the run
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["ours"]
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for(condition, process, seconds=180.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.001)


def checkpoints_in(folder):
    """The whole ones, and those in the making."""
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    return [int(n) for n in names if n.isdigit()], [n for n in names if not n.isdigit()]


@pytest.mark.slow
def test_kill_9_while_it_saves_leaves_the_checkpoint_before(text, tmp_path):
    folder = tmp_path / "killed"
    flags = ["--steps", "1000000", "--checkpoint-every", "20"]
    process = start(folder, text, *flags)
    for _ in range(20):  # a save takes milliseconds: some kills come too late
        wait_for(lambda: len(checkpoints_in(folder)[0]) > 0, process)
        wait_for(lambda: len(checkpoints_in(folder)[1]) > 0, process)
        process.kill()
        process.wait()
        whole, in_the_making = checkpoints_in(folder)
        process = start(folder, text, *flags, "--resume")
        assert resumed_after(process) == max(whole)
        if in_the_making:
            break
    process.kill()
    process.wait()
    assert in_the_making  # a kill did come during a save


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_a_disk_that_takes_no_more_leaves_the_checkpoint_before(text, tmp_path):
    """No file may grow beyond a limit set while it runs: writes fail as they do on a full disk."""
    folder = tmp_path / "full"
    flags = ["--steps", "1000000", "--checkpoint-every", "40"]
    process = start(folder, text, *flags)
    wait_for(lambda: len(checkpoints_in(folder)[0]) > 0, process)
    size = (folder / "metrics.jsonl").stat().st_size + 20_000
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 1
    last = errors.splitlines()[-1]  # Orbax's threads may print before it
    assert last.startswith("error: ") and "cannot be written" in last and "--resume" in last
    whole, _ = checkpoints_in(folder)
    process = start(folder, text, *flags, "--resume")
    assert resumed_after(process) == max(whole)
    process.kill()
    process.wait()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_a_full_disk_is_named_when_a_metric_cannot_be_written(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = metrics.Metrics.__new__(metrics.Metrics)
    log.path, log.start, log.board, log.writes = tmp_path / "metrics.jsonl", 0.0, None, True
    with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written \(No space left"):
        log.write(1, train_loss=2.0)


def test_a_line_cut_off_while_it_was_written_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "seconds": 1.0}\n{"step": 2, "sec')
    assert [row["step"] for row in plot.read_metrics(path)] == [1]
    metrics.Metrics(path, resume_at=5).write(3, train_loss=2.0)
    assert [row["step"] for row in plot.read_metrics(path)] == [1, 3]


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_more_than_the_steps_since_the_last_checkpoint(
    text, tmp_path
):
    """Killed again and again, some times while it saves, which it does after every second step."""
    steps, every = 120, 2
    flags = ("--steps", str(steps), "--checkpoint-every", str(every))
    whole = start(tmp_path / "whole", text, *flags)
    assert whole.wait(timeout=300) == 0
    folder = tmp_path / "killed"
    process = start(folder, text, *flags)
    for step in (15, 40, 66, 91):
        wait_for_step(folder, step, process)
        process.kill()
        process.wait()
        reached = plot.read_metrics(folder / "metrics.jsonl")[-1]["step"]
        process = start(folder, text, *flags, "--resume")
        # One checkpoint may be in the making, another waiting for it.
        assert resumed_after(process) >= reached - 3 * every
    assert process.wait(timeout=300) == 0
    ours, theirs = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (folder, tmp_path / "whole")
    )
    key = lambda row: (row["step"], row.get("train_loss"), row.get("validation_loss"))  # noqa: E731
    assert list(map(key, ours)) == list(map(key, theirs))
