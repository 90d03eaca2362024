"""The page of results: its summaries on made runs, and its tables and figures against the data."""

import io
import json
import math

import matplotlib
import numpy as np
import pytest
from PIL import Image

from benchmarks import gpt2
from benchmarks.experiments import cost, report

ASSETS, RESULTS = report.ASSETS, report.RESULTS


def run(arm, rate, seed, loss, **changes):
    """A curve that falls linearly from loss + 1 to the loss in 100 steps."""
    curve = [[step, loss + 1 - step / 100] for step in (25, 50, 75, 100)] if loss else []
    made = {"arm": arm, "rate": rate, "seed": seed, "final_loss": loss, "curve": curve}
    task = {"size": "tiny", "steps": 100, "batch": 16, "gradients": 1}
    return made | task | changes


def sweep(arm, losses, **changes):
    """Seed 0 at each of the rates .001, .002, ...; two more seeds at the best, .1 apart."""
    rates = [0.001 * 2**i for i in range(len(losses))]
    runs = [run(arm, *pair, **changes) for pair in zip(rates, [0] * 9, losses, strict=False)]
    best = min(range(len(losses)), key=lambda i: losses[i] or math.inf)
    more = [run(arm, rates[best], s, losses[best] + 0.1 * s, **changes) for s in (1, 2)]
    return runs + more


RUNS = [
    *sweep("AdamW (.9, .95)", [2.5, 2.0, 2.2, None]),
    *sweep("AdamW (.95, .99)", [2.7, 2.4, 2.6]),
    *sweep("MARS-M", [2.4, 2.1, 1.5, 1.9], gradients=2),
    *sweep("Lion", [2.5, 2.9]),
]


def test_an_arm_is_judged_at_the_best_rate_by_the_seed_that_all_rates_have():
    arm = report.tune([r for r in RUNS if r["arm"] == "AdamW (.9, .95)"])
    # Over all its seeds 0.002 has a mean of 2.1, and would lose to one lucky run of 2.05.
    assert (arm.rate, arm.inside, arm.mean) == (0.002, True, pytest.approx(2.1))
    assert arm.spread == pytest.approx(0.1)  # of 2.0, 2.1, 2.2
    np.testing.assert_allclose(arm.curve[:, 1], [2.85, 2.6, 2.35, 2.1])
    lucky = [*sweep("AdamW", [2.5, 2.0]), run("AdamW", 0.004, 0, 2.05)]
    assert report.tune(lucky).rate == 0.002
    assert not report.tune([r for r in RUNS if r["arm"] == "Lion"]).inside
    with pytest.raises(ValueError, match="share no seed"):
        report.tune([run("Lion", 0.001, 0, 1.0), run("Lion", 0.002, 1, 1.0)])


def test_steps_to_a_loss_are_interpolated():
    curve = np.array([[10, 3.0], [20, 2.0], [30, 2.5], [40, 1.5]])
    assert report.steps_to(curve, 2.25) == 17.5
    assert report.steps_to(curve, 3.5) == 10
    assert math.isnan(report.steps_to(curve, 1.4))


def test_the_best_rate_between_rates_is_the_parabolas():
    losses = [(math.log2(rate) + 8.3) ** 2 for rate in (2**-10, 2**-9, 2**-8, 2**-7)]
    runs = [run("AdamW", 2.0**e, 0, loss) for e, loss in zip(range(-10, -6), losses, strict=True)]
    assert math.log2(report.best_rate_between(runs)) == pytest.approx(-8.3)


def test_the_comparison_is_with_the_best_adamw_and_within_seeds(monkeypatch):
    seconds = {"AdamW (.9, .95)": 0.5, "AdamW (.95, .99)": 0.5, "Lion": 0.4, "MARS-M": 0.75}
    times = {"seconds": {"tiny": seconds}}
    monkeypatch.setattr(report, "read", lambda name: times if name == "step_times" else None)
    rows = report.comparison(RUNS).splitlines()
    assert len(rows) == 2 + 4
    # AdamW is at 2.35 at step 75, MARS-M at 25, with steps of 1.5 times the time.
    expected = "| MARS-M | 0.004 | 1.600 ± 0.100 | 3 | −0.500 ± 0.000 | 0.33 | 0.50 |"
    assert rows[2] == expected
    assert rows[3].startswith("| **AdamW (.9, .95)** | 0.002 | 2.100 ± 0.100 | 3 |  | 1.00 |")
    assert rows[5].startswith("| Lion | 0.001 (edge) | 2.600 ± 0.100 | 3 | +0.500 ± 0.000 | – |")
    del seconds["MARS-M"]  # not measured
    assert report.comparison(RUNS).splitlines()[2] == expected.replace(" 0.50 |", " – |")
    del seconds["AdamW (.9, .95)"]  # then there is nothing to compare with
    assert report.comparison(RUNS).splitlines()[2] == expected.removesuffix(" 0.50 |")


def test_other_tables():
    stability = report.stability(RUNS).splitlines()
    assert "| +0.200 | diverges | – | – |" in stability[2]  # 2 and 4 times AdamW's best rate
    assert "(1.00 ×)" in stability[2]
    exact = {"optimizer": "mars_m", "exact": True, "gamma": 1.0}
    plain = sweep("MARS-M", [2, 1.5, 1.6], optimizer={"optimizer": "mars_m"}, steps=200)
    runs = [
        *plain,
        *sweep("MARS-M exact, 1 of 4", [2, 1.8, 1.9], gradients=1.25, optimizer=exact),
        *sweep("MARS-M exact, 1 of 1", [2, 1.7, 1.9], gradients=2, optimizer=exact),
    ]
    rows = report.by_gradients(runs).splitlines()
    assert rows[0] == "|  | 125 gradients | 200 gradients |"
    assert rows[2] == "| MARS-M, exact, γ 1 | 1.900 ± 0.100 (0.002) | 1.800 ± 0.100 (0.002) |"
    assert rows[3] == "| MARS-M | – | 1.600 ± 0.100 (0.002) |"
    lines = report.gradients_figure(runs).axes[0].containers
    assert [list(one.lines[0].get_xdata()) for one in lines] == [[200], [125, 200]]

    small = [*sweep("AdamW", [3, 2, 3], batch=4), *sweep("MARS-M", [3, 1.9, 3], batch=4)]
    large = [*sweep("AdamW", [3, 1, 3], batch=64), *sweep("MARS-M", [3, 1.2, 3], batch=64)]
    rows = report.by_batch(small + large).splitlines()
    assert rows[3] == "| MARS-M | 2.000 ± 0.100 (0.002) | 1.300 ± 0.100 (0.002) |"
    assert rows[5] == "| − AdamW | batch 4 | batch 64 |"
    assert rows[-1] == "| MARS-M | −0.100 ± 0.000 | +0.200 ± 0.000 |"
    both = report.of_tasks(small + large, lambda runs: str(len(runs)))
    titles = [f"**size tiny, 100 steps, batch {batch}**\n\n10" for batch in (4, 64)]
    assert both == "\n\n".join(titles)

    longer = RUNS + sweep("Lion", [2, 1.8, 2], steps=200)
    rows = report.by_length(longer).splitlines()
    assert rows[0] == "|  | 100 steps | 200 steps |"
    assert rows[2:] == ["| Lion | 2.600 ± 0.100 (0.001, edge) | 1.900 ± 0.100 (0.002) |"]
    (bar,) = report.lengths_figure(longer).axes[0].containers
    assert list(bar.lines[0].get_xdata()) == [100, 200]
    demo = [r for n in (100, 200) for r in sweep("Lion", [4, 3, 4], steps=n, size="demo")]
    first, second = report.by_length(longer + demo).split("\n\n**size demo**\n\n")
    assert first == "**size tiny**\n\n" + "\n".join(rows)
    assert second.count("3.100") == 2
    (bar,) = report.lengths_figure(longer + demo).axes[0].containers
    assert list(bar.lines[0].get_ydata()) == [pytest.approx(2.6), pytest.approx(1.9)]
    gammas = [
        r
        for value in (0.0, 0.1)
        for exact in (False, True)
        for r in sweep(
            f"MARS-M, γ {value:g}, {exact}",
            [3, 2 - value, 3],
            optimizer={"optimizer": "mars_m", "gamma": value, "exact": exact},
        )
    ]
    rows = report.by_gamma(gammas).splitlines()
    assert rows[0] == "|  | MARS-M | MARS-M, exact |"
    assert rows[3] == "| 0.1 | 2.000 ± 0.100 (0.002) | 2.000 ± 0.100 (0.002) |"
    line = report.gammas_figure(gammas).axes[0].containers[0].lines[0]
    assert list(line.get_xdata()) == [0, 0.1]
    assert list(line.get_ydata()) == pytest.approx([2.1, 2.0])


def test_the_table_of_partial_corrections():
    keys = ("estimator", "gamma", "gradients", "error")
    made = [("EMA", 0, 1.0, 2.0), ("EMA", 0, 1.5, 1.6), ("exact", 0.1, 1.5, 1.0)]
    made = report.partial_errors({"runs": [dict(zip(keys, row, strict=True)) for row in made]})
    assert made == [
        ["error of m", "1 gradients", "1.5 gradients"],
        ["EMA, larger batch", "1.000", "0.800"],
        ["exact, γ 0.1", "–", "0.500"],
    ]


def test_other_figures():
    rates = report.rates_figure(RUNS)
    np.testing.assert_allclose(rates.axes[0].lines[0].get_ydata(), [2.5, 2.0, 2.2])  # no diverged
    batches = RUNS + [{**r, "batch": 4} for r in RUNS]
    lines = report.batches_figure(batches).axes[0].get_legend_handles_labels()
    assert lines[1] == ["AdamW (.9, .95)", "AdamW (.95, .99)", "MARS-M", "Lion"]
    curves = report.curves_figure(RUNS + [r | {"size": "demo"} for r in RUNS]).axes
    assert [line.get_label() for line in curves[0].lines] == [
        "AdamW (.9, .95): 2.100",
        "MARS-M: 1.600",
    ]
    same = matplotlib.colors.same_color
    assert all(map(same, [line.get_color() for line in curves[1].lines], ["C0", "C6"]))
    assert len(curves) == 2
    figure = report.seeds_figure(RUNS + sweep("AdamW, longer", [0.1, 0.2], steps=200))
    dots = report.plotted(figure)
    assert [[1.5, 1.6, 1.7], [3, 3, 3]] in dots
    assert len(dots) == 2 * 4 + 1


def test_parts_are_put_between_their_marks():
    page = "a\n<!-- table: x -->\nold\n<!-- end -->\nb\n<!-- table: xy -->\n<!-- end -->\n"
    filled = report.fill(page, {"table: x": r"new \1"})
    assert filled == page.replace("old\n", "\nnew \\1\n\n")
    assert report.fill(filled, {"table: x": r"new \1"}) == filled
    assert report.fill(filled, {"table: x": ""}) == page.replace("old\n", "")
    with pytest.raises(ValueError, match="table: z"):
        report.fill(page, {"table: z": ""})


def test_every_table_and_figure_has_its_place_on_the_page():
    page = report.PAGE.read_text()
    names = [f"table: {n}" for n in report.TABLES] + [f"figure: {n}" for n in report.FIGURES]
    assert report.fill(page, dict.fromkeys(names, "")).count("<!-- end -->") == len(names)


@pytest.mark.parametrize("name", report.TABLES)
def test_tables_of_the_page_are_those_of_the_data(name):
    text = report.make(report.TABLES[name]) or ""
    page = report.PAGE.read_text()
    assert report.fill(page, {f"table: {name}": text}) == page


@pytest.mark.parametrize("name", report.FIGURES)
def test_figures_of_the_page_are_those_of_the_data(name):
    figure = report.make(report.FIGURES[name])
    assert (f"(assets/results-{name}.png)" in report.PAGE.read_text()) == (figure is not None)
    if figure is None:
        assert not (ASSETS / f"results-{name}.png").exists()
        return
    with Image.open(ASSETS / f"results-{name}.png") as committed:
        drawn = json.loads(committed.text["Plotted"])
        assert [np.shape(line) for line in drawn] == [np.shape(x) for x in report.plotted(figure)]
        for line, again in zip(drawn, report.plotted(figure), strict=True):
            np.testing.assert_allclose(line, again, rtol=1e-4, atol=1e-6)
        if f"version{matplotlib.__version__}," in committed.text["Software"]:
            file = io.BytesIO()
            report.save(figure, file)
            with Image.open(file) as image:
                differing = np.any(np.asarray(image) != np.asarray(committed), axis=-1)
            assert differing.mean() < 1e-3


def test_a_layer_of_gpt2_takes_280_cubed_widths_and_the_papers_count_360():
    h, layers = 64, 3
    square, oblong = 5 * (2 + 2 + 2), [5 * (2 * n + 2 + 2 * n) for n in (3, 4, 4)]
    assert square + sum(oblong) == 280
    assert cost.of_shapes(layers, h) == 280 * h**3 * layers
    papers = cost.of_papers(layers, h)
    count = gpt2.parameters(gpt2.shapes(layers, h))
    assert count == 12 * h**2 * layers
    assert papers["Muon"] - papers["AdamW"] == (360 * h**3 + 240 * h**2) * layers


def test_the_compiler_agrees_with_the_shapes():
    counted = cost.of_compiler(cost.OPTIMIZERS["MARS-M, standard form"], 1, 64)
    count = gpt2.parameters(gpt2.shapes(1, 64))
    assert 20 < (counted - cost.of_shapes(1, 64)) / count < 60  # the elementwise rest
    adamw = cost.of_compiler(cost.OPTIMIZERS["AdamW"], 1, 64)
    assert adamw / count == pytest.approx(15, rel=0.01)
