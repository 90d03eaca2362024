"""--compare: several runs on the same data, resumed and never replaced silently."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import test_nanogpt_train

from examples.nanogpt import compare, plot, train
from examples.nanogpt.config import parse

quick_compilation, text = test_nanogpt_train.quick_compilation, test_nanogpt_train.text

SHAPE = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--devices", "1"]
FLAGS = [*SHAPE, "--steps", "20", "--eval-every", "5", "--checkpoint-every", "5", "--warmup", "2"]
FLAGS += ["--eval-windows", "8", "--sample-tokens", "0", "--compare", "adamw,mars_adamw-exact"]


def test_each_is_trained_once_and_all_are_compared(text, tmp_path, monkeypatch, capsys):
    arguments = [*FLAGS, "--data", str(text), "--out-dir", str(tmp_path / "runs")]
    trained = []

    def counting(config):
        trained.append((config.name, config.resume))
        return train.train(config)

    compare.run(parse(arguments), arguments, counting)
    assert trained == [("demo-adamw", False), ("demo-mars_adamw-exact", False)]
    output = capsys.readouterr().out
    table = (tmp_path / "runs" / "comparison.md").read_text()
    assert table in output and table.count("\n") == 4
    assert (tmp_path / "runs" / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    first, second = (
        plot.read_metrics(tmp_path / "runs" / name / "metrics.jsonl")[0]["train_loss"]
        for name in ("adamw", "mars_adamw-exact")
    )
    assert first == pytest.approx(second, rel=1e-6)  # the same parameters and batch
    rates = [
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())["learning_rate"]
        for name in ("adamw", "mars_adamw-exact")
    ]
    assert rates == [6e-3, 1e-2]  # each optimizer's own

    compare.run(parse(arguments), arguments, counting)  # nothing is left to do
    assert len(trained) == 2
    # As if the second had been killed before its end.
    (tmp_path / "runs" / "mars_adamw-exact" / "summary.json").unlink()
    compare.run(parse(arguments), arguments, counting)
    assert trained[2:] == [("demo-mars_adamw-exact", True)]
    monkeypatch.setattr(sys, "argv", ["train", *arguments, "--seed", "1"])
    with pytest.raises(SystemExit, match="holds a run with seed = 0, not 1: pass --overwrite"):
        train.main()


def result(losses, speeds, final=None, size=2**20):
    rows = [{"step": 1, "tokens_per_second": 1.0}]
    rows += [{"step": 10 * i, "tokens_per_second": s} for i, s in enumerate(speeds, 1)]
    rows += [{"step": 10 * i, "validation_loss": loss} for i, loss in enumerate(losses, 1)]
    summary = {"batch_size": 4, "model": {"context": 25}, "steps": 40, "device_bytes": size}
    return compare.Result(rows, {**summary, "validation_loss": final or losses[-1]})


def test_the_table():
    runs = {
        "mars_m": result([3.0, 2.4, 2.0, 1.9], [1e4, 2e4, 1e4], size=3 * 2**20),
        "adamw": result([3.5, 3.0, 2.5, 2.6], [5e4, 5e4, 1e3]),
        "lion": result([3.5, 3.0, 2.8, 2.7], [5e4]),
    }
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in compare.table(runs).splitlines()
    ]
    assert rows[0][2] == "steps to adamw's best (2.5000)"
    assert rows[2] == ["mars_m", "1.9000", "20 (50%)", "10.0", "3"]
    assert rows[3] == ["adamw", "2.6000", "30 (75%)", "2.0", "1"]
    assert rows[4] == ["lion", "2.7000", "not reached", "2.0", "1"]
    without = compare.table({k: v for k, v in runs.items() if k != "adamw"})
    assert "steps to mars_m's best (1.9000)" in without
    assert np.isfinite(runs["lion"].best)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("adamw,sgd", "names 'sgd': use some of adamw, nadamw"),
        ("adamw-exact", "names 'adamw-exact'"),
        ("adamw,adamw", "names a run twice"),
    ],
)
def test_wrong_names(names, message, tmp_path):
    config = dataclasses.replace(parse([]), compare=names, out_dir=tmp_path)
    with pytest.raises(ValueError, match=message):
        compare.run(config, [], lambda _: pytest.fail("nothing is to be trained"))
