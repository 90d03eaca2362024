"""The language-model experiments: the search for the rate, resumption, the control optimizer."""

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

from benchmarks.experiments import language_model as experiment
from benchmarks.experiments.store import Store
from examples.nanogpt import data
from mars_optax import mars_vr, optimizers

ARM = experiment.Arm("adamw", 4e-3)
TASK = experiment.Task(steps=50)


def tiny_corpus() -> data.Corpus:
    return data.text_file(Path(optimizers.__file__))


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Replaces training by a parabola with its least loss at a rate of 0.032; above .1 diverges."""
    made = []

    def train(arm, task, rate, seed):
        made.append((rate, seed))
        loss = None if rate > 0.1 else 2 + math.log2(rate / 0.032) ** 2 + 0.01 * seed
        return {"final_loss": loss, "curve": []}

    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(experiment, "RESULTS", tmp_path)
    monkeypatch.setattr(experiment, "corpus", tiny_corpus)
    return made


def test_the_best_rate_lies_inside_the_grid_and_gets_the_seeds(calls):
    assert experiment.Question("q").tune("a", ARM, TASK, seeds=3) == pytest.approx(0.032)
    assert {rate for rate, seed in calls if seed == 0} >= {0.016, 0.032, 0.064}
    assert [rate for rate, seed in calls if seed > 0] == [0.032, 0.032]
    assert len(calls) == len(set(calls))


def test_runs_on_disk_are_not_run_again(calls, tmp_path):
    experiment.Question("q").tune("a", ARM, TASK)
    before = len(calls)
    question = experiment.Question("q")
    question.tune("a", ARM, TASK)
    assert len(calls) == before
    question.tune("a", ARM, TASK._replace(batch=4))
    assert len(calls) == 2 * before
    rows = json.loads((tmp_path / "q.json").read_text())["runs"]
    assert len(rows) == 2 * before and rows[0]["optimizer"]["optimizer"] == "adamw"


def test_other_tasks_begin_at_the_rate_that_is_best_on_the_first(calls, monkeypatch):
    monkeypatch.setattr(experiment, "ARMS", {"a": dataclasses.replace(ARM, start=1e-3)})
    experiment.compare_sizes(experiment.Question("sizes"))
    rows = {name: experiment.Question(name).store.rows for name in ("optimizers", "sizes")}
    assert {row["size"] for row in rows["sizes"]} == {"demo"}
    assert {row["rate"] for row in rows["sizes"]} == {0.016, 0.032, 0.064}
    assert len({row["rate"] for row in rows["optimizers"]}) > 3  # its own search began far below


def test_rows_made_with_other_settings_are_not_mixed_in(tmp_path):
    path = tmp_path / "results" / "q.json"
    Store(path, steps=3).get({"rate": 1.0}, lambda: {"loss": 2.0})
    before = path.read_text()
    assert Store(path, steps=3).get({"rate": 1.0}, dict) == {"rate": 1.0, "loss": 2.0}
    with pytest.raises(ValueError, match=r"q\.json was made with steps = 3, not 4: move it away"):
        Store(path, steps=4)
    assert path.read_text() == before


def test_diverged_runs_count_as_infinite(calls):
    question = experiment.Question("q")
    assert math.isinf(question.run("a", ARM, TASK, 0.2, 0))
    with pytest.raises(RuntimeError, match="diverges"):
        question.tune("a", dataclasses.replace(ARM, start=10.0), TASK)


def test_the_control_takes_its_momentum_from_c_and_its_second_moment_from_g():
    params = {"w": jnp.ones((3, 2))}
    plain, control = optax.scale_by_adam(0.9, 0.99), experiment.adam_of_two(0.9, 0.99, 0.0)
    vr = mars_vr(0.5, 0.9)
    mixed = experiment.adam_of_two(0.9, 0.99, 0.5)
    states = [tx.init(params) for tx in (plain, control, vr, mixed)]
    m = v = np.zeros((3, 2))
    for t in range(1, 4):
        g = {"w": jnp.asarray(np.random.default_rng(t).normal(0, 0.1, (3, 2)), jnp.float32)}
        a, states[0] = plain.update(g, states[0])
        b, states[1] = control.update(g, states[1])
        np.testing.assert_allclose(a["w"], b["w"], rtol=1e-5)
        c, states[2] = vr.update(g, states[2])
        m = 0.9 * m + 0.1 * np.asarray(c["w"])
        v = 0.99 * v + 0.01 * np.asarray(g["w"]) ** 2
        d, states[3] = mixed.update(g, states[3])
        want = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        np.testing.assert_allclose(d["w"], want, rtol=1e-5)


def test_an_arm_trains(monkeypatch):
    """The exact correction on a part of the batch, with a traced rate, through the real model."""
    monkeypatch.setattr(experiment, "corpus", tiny_corpus)
    monkeypatch.setattr(experiment, "EVALUATIONS", 2)
    monkeypatch.setattr(experiment, "WINDOWS", {"during": 16, "final": 16})
    arm = dataclasses.replace(experiment.MARS_M, exact=True, parts=4)
    result = experiment.train(arm, experiment.Task(steps=20), 8e-3, 0)
    assert arm.gradients == 1.25
    assert result["curve"][-1][0] == 20
    assert result["final_loss"] < result["curve"][0][1] < math.log(256)
