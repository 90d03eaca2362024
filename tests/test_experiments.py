"""The experiments' measurements agree with theory, and the committed results with their figures."""

import math

import jax
import pytest

from benchmarks.experiments import partial_exact
from benchmarks.experiments import variance_reduction as vr
from benchmarks.experiments.store import Store

B1 = 0.9


def open_loop(problem, gamma, exact):
    measured = jax.jit(lambda b1: vr.open_loop(problem, gamma, b1, exact, runs=128, steps=600))(B1)
    return tuple(map(float, measured))


@pytest.fixture(scope="module")
def additive():
    problem = vr.quadratic("additive")
    return problem, open_loop(problem, 0.0, exact=False)


@pytest.mark.parametrize("gamma", [0.1, 0.3, 1.0])
def test_bias_and_variance_are_those_of_theory(additive, gamma):
    problem, (ema_bias2, ema_variance) = additive
    bias2, variance = open_loop(problem, gamma, exact=True)
    assert bias2 / ema_bias2 == pytest.approx((1 - gamma) ** 2, abs=0.05)
    assert variance / ema_variance == pytest.approx(1.0, rel=1e-3)  # the noise cancels in g - g⁻
    _, variance = open_loop(problem, gamma, exact=False)
    assert variance / ema_variance == pytest.approx(vr.variance_ratio(gamma, B1), rel=0.05)


def test_exact_with_gamma_1_errs_less_than_the_ema_at_the_best_b1_of_each():
    problem = vr.quadratic("multiplicative")
    decays = (0.8, 0.9, 0.95, 0.98, 0.99)

    def least_error(gamma, exact):
        f = jax.jit(lambda b1: sum(vr.open_loop(problem, gamma, b1, exact, runs=64, steps=600)))
        return min(float(f(b1)) for b1 in decays)

    assert least_error(1.0, exact=True) < 0.6 * least_error(0.0, exact=False)


def test_descent_along_exact_with_gamma_1_ends_nearer_to_the_optimum():
    problem = vr.quadratic("additive")

    def least_tail(gamma, exact):
        f = jax.jit(lambda b1: vr.closed_loop(problem, gamma, b1, exact, runs=32, steps=3000))
        return min(float(f(b1).mean()) for b1 in (0.9, 0.95, 0.98, 0.99))

    assert least_tail(1.0, exact=True) < 0.7 * least_tail(0.0, exact=False)


def test_the_tables_ratios_are_of_each_estimators_least():
    def rows(mode, gamma, scale):
        made = [(0.9, 3, 1, 8), (0.99, 1, 1, 4)]  # least error 2, least tail 4
        keys = ("b1", "bias2", "variance", "tail")
        fixed = {"problem": "made", "estimator": mode, "gamma": gamma}
        return [fixed | dict(zip(keys, (b1, *map(scale, rest)), strict=True)) for b1, *rest in made]

    made = rows("EMA", 0.0, lambda x: x)
    for mode in vr.MODES:
        for gamma in vr.GAMMAS:
            made += rows(mode, gamma, lambda x, g=gamma: g * x)
    for measure in vr.MEASURES:
        table = vr.least({"runs": made}, measure)
        assert table[0][1:] == ["made"]
        assert table[1] == ["approximate, γ = 0.025", "0.025"]
        assert table[-1] == ["exact, γ = 1", "1"]
        assert len(table) == 9


def test_partial_corrections_are_priced_by_their_gradients(tmp_path, monkeypatch):
    def error(gamma, b1, parts, batch, runs, steps):
        return (b1 - 0.98) ** 2 + gamma + 100 / (parts or 1) + 1 / batch

    monkeypatch.setattr(partial_exact, "error", error)
    store = Store(tmp_path / "partial.json")
    partial_exact.measure(store, runs=1, steps=1)
    costs = {(r["estimator"], r["parts"]): r["gradients"] for r in store.rows if r["parts"]}
    assert costs == {("exact", n): 1 + 1 / n for n in (1, 2, 4, 8)}
    averages = [row["gradients"] for row in store.rows if row["estimator"] == "EMA"]
    assert averages == [1, 2, 1.5, 1.25, 1.125]  # of batches larger by as much
    assert {row["b1"] for row in store.rows} == {0.98}
    assert len(store.rows) == len(averages) + 4 * len(vr.GAMMAS)


def test_the_best_rate_for_images_lies_inside_the_grid(tmp_path, monkeypatch):
    vision = pytest.importorskip("benchmarks.experiments.vision")
    best = {"AdamW": 0.008, "Muon": 0.128}  # below and above where the search begins

    def run(arm, rate, seed):
        mine = best[{"adamw": "AdamW", "muon": "Muon"}[arm.optimizer]]
        return {"final_loss": math.log2(rate / mine) ** 2 + 0.1 * seed, "curve": []}

    monkeypatch.setattr(vision, "run", run)
    for label, rate in best.items():
        store = Store(tmp_path / f"{label}.json")
        vision.tune(store, label)
        rates = {row["rate"] for row in store.rows}
        assert {rate / 2, rate, 2 * rate} <= rates
        assert len(store.rows) == 3 * len(rates)
