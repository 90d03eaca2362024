"""Every table and figure of docs/results.md, from the committed raw results.

    python -m benchmarks.experiments.report

A table stands on the page between `<!-- table: NAME -->` and `<!-- end -->`, a figure's link
between `<!-- figure: NAME -->` and `<!-- end -->`, its image in docs/assets/. What has no results
yet is left out.

Runs are as language_model.py and vision.py write them: {"arm": label, "rate", "seed",
"final_loss" (None: diverged), "curve": [[step, loss], ...], "gradients" per step,
"seconds_per_step", "optimizer": {"gamma", "exact", ...}} and the task's size, steps and batch.
"""

import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.experiments import cost, variance_reduction

Run = dict[str, Any]
ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = pathlib.Path(__file__).parent / "results"
PAGE, ASSETS = ROOT / "docs" / "results.md", ROOT / "docs" / "assets"
TASK = ("size", "steps", "batch")
BASELINE = "AdamW"  # of the arms whose labels begin so, the best
SHOWN_CURVES = ("AdamW (.9, .95)", "NAdamW (.9, .95)", "Muon", "MARS-AdamW", "MARS-M")
FACTORS = (2, 4, 8, 16)  # of the best rate, in the table of stability


# --- what runs say --------------------------------------------------------------------------------


def final_loss(run: Run) -> float:
    """Infinite where the run diverged."""
    loss = run["final_loss"]
    return math.inf if loss is None or math.isnan(loss) else loss


def setting(run: Run, name: str) -> Any:
    """A setting of the run, or of its optimizer."""
    return run.get("optimizer", {}).get(name, run.get(name))


def group(runs: Iterable[Run], *names: str) -> dict[tuple, list[Run]]:
    """Runs by these settings, in the order in which they first appear."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(setting(run, name) for name in names), []).append(run)
    return groups


def by_rate(runs: Iterable[Run]) -> dict[float, dict[int, float]]:
    """{rate: {seed: final loss}}, in ascending order."""
    return {
        rate: {run["seed"]: final_loss(run) for run in own}
        for (rate,), own in sorted(group(runs, "rate").items())
    }


class Tuned(NamedTuple):
    """An arm at its best rate."""

    rate: float
    inside: bool  # whether lower and higher rates have been tried
    losses: dict[int, float]  # by seed
    curve: np.ndarray  # (step, loss) [N, 2], the mean over seeds
    seconds: float  # a step
    gradients: float  # of a whole batch, a step

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.losses.values())))

    @property
    def spread(self) -> float:
        return deviation(list(self.losses.values()))


def deviation(values: list[float]) -> float:
    """The standard deviation over seeds; NaN for one seed."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def tune(runs: list[Run]) -> Tuned:
    """The best rate by the seeds that every rate has; a seed that only some have favours none."""
    losses = by_rate(runs)
    shared = set.intersection(*(set(seeds) for seeds in losses.values()))
    if not shared:
        raise ValueError(
            f"the rates of {runs[0]['arm']} share no seed: run each with one in common."
        )
    best = min(losses, key=lambda rate: sum(losses[rate][seed] for seed in shared))
    own = [run for run in runs if run["rate"] == best]
    if any(math.isinf(loss) for loss in losses[best].values()):
        raise ValueError(f"{runs[0]['arm']} diverges at its best rate, {best:g}: tune it further.")
    return Tuned(
        best,
        min(losses) < best < max(losses),
        losses[best],
        np.mean([run["curve"] for run in own], axis=0),
        float(np.median([run["seconds_per_step"] for run in own])),
        own[0]["gradients"],
    )


def tune_arms(runs: Iterable[Run]) -> dict[str, Tuned]:
    return {arm: tune(own) for (arm,), own in group(runs, "arm").items()}


def baseline(arms: dict[str, Tuned]) -> str:
    """The best AdamW's label."""
    return min((a for a in arms if a.startswith(BASELINE)), key=lambda a: arms[a].mean)


def difference(arm: Tuned, other: Tuned) -> tuple[float, float]:
    """Mean and deviation over the seeds that both have, which share their batches."""
    seeds = sorted(arm.losses.keys() & other.losses.keys())
    values = [arm.losses[seed] - other.losses[seed] for seed in seeds]
    return float(np.mean(values)), deviation(values)


def steps_to(curve: np.ndarray, loss: float) -> float:
    """The step at which the curve first comes to this loss, by linear interpolation; NaN: never."""
    below = np.flatnonzero(curve[:, 1] <= loss)
    if not below.size:
        return math.nan
    if (i := below[0]) == 0:
        return float(curve[0, 0])
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return float(x0 + (x1 - x0) * (y0 - loss) / (y0 - y1))


def best_rate_between(runs: list[Run]) -> float:
    """Where the parabola through the best rate and its neighbours has its least; else the best."""
    losses = {rate: float(np.mean(list(seeds.values()))) for rate, seeds in by_rate(runs).items()}
    rates = list(losses)
    i = rates.index(tune(runs).rate)
    three = rates[max(0, i - 1) : i + 2]
    if len(three) < 3 or not np.isfinite([losses[rate] for rate in three]).all():
        return rates[i]
    a, b, _ = np.polyfit(np.log2(three), [losses[rate] for rate in three], 2)
    return float(2 ** np.clip(-b / (2 * a), *np.log2(three)[[0, 2]])) if a > 0 else rates[i]


# --- tables ---------------------------------------------------------------------------------------


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is a header, the first column stands to the left."""
    lines = [rows[0], ["---"] + ["--:"] * (len(rows[0]) - 1), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float, digits: int = 3, sign: str = "") -> str:
    return "–" if math.isnan(value) else f"{value:{sign}.{digits}f}".replace("-", "−")


def with_spread(value: float, spread: float, digits: int = 3, sign: str = "") -> str:
    text = number(value, digits, sign)
    return text if math.isnan(spread) else f"{text} ± {spread:.{digits}f}"


def rate_text(arm: Tuned) -> str:
    return f"{arm.rate:g}" + ("" if arm.inside else " (edge)")


def of_tasks(runs: list[Run], make: Callable[[list[Run]], str], names: tuple = TASK) -> str:
    """One table for each task, with a title where there are several."""
    tasks = group(runs, *names)
    if len(tasks) == 1:
        return make(runs)
    titles = {
        key: ", ".join(
            f"{value} {name}" if name == "steps" else f"{name} {value}"
            for name, value in zip(names, key, strict=True)
        )
        for key in tasks
    }
    return "\n\n".join(f"**{titles[key]}**\n\n{make(own)}" for key, own in tasks.items())


def comparison(runs: list[Run]) -> str:
    """Arms from the least loss to the greatest, beside the best AdamW."""
    arms = tune_arms(runs)
    reference = arms[baseline(arms)]
    total = reference.curve[-1, 0]

    def row(label: str, arm: Tuned) -> list[str]:
        share = steps_to(arm.curve, reference.mean) / total
        return [
            f"**{label}**" if arm is reference else label,
            rate_text(arm),
            with_spread(arm.mean, arm.spread),
            str(len(arm.losses)),
            "" if arm is reference else with_spread(*difference(arm, reference), sign="+"),
            number(share, 2),
            number(share * arm.seconds / reference.seconds, 2),
        ]

    header = ["", "best rate", "final loss", "seeds", "− AdamW", "steps", "time"]
    ranked = sorted(arms.items(), key=lambda item: item[1].mean)
    return table([header, *(row(label, arm) for label, arm in ranked)])


def pivot(runs: list[Run], row: str, column: str) -> str:
    """Final losses at the best rate of each cell, which is given in parentheses."""
    cells = {key: tune(own) for key, own in group(runs, row, column).items()}
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))

    def cell(r: Any, c: Any) -> str:
        if (arm := cells.get((r, c))) is None:
            return "–"
        return f"{with_spread(arm.mean, arm.spread)} ({rate_text(arm)})"

    header = ["", *(f"{column} {c}" if column == "batch" else c for c in columns)]
    return table([header, *([str(r), *(cell(r, c) for c in columns)] for r in rows)])


def by_gamma(runs: list[Run]) -> str:
    return pivot(
        [run | {"series": series(run), "γ": gamma_text(run)} for run in runs], "γ", "series"
    )


def gamma_text(run: Run) -> str:
    end = setting(run, "gamma_end")
    return f"{gamma(run):g}" + ("" if end is None else f" to {end:g}")


def gamma(run: Run) -> float:
    value = setting(run, "gamma")
    return 0.025 if value is None else value


def series(run: Run) -> str:
    """The optimizer and the mode, whatever γ is."""
    names = {"mars_adamw": "MARS-AdamW", "mars_m": "MARS-M"}
    name = setting(run, "optimizer")
    name = names.get(name, run["arm"])
    return f"{name}, exact" if setting(run, "exact") else name


def stability(runs: list[Run]) -> str:
    """What a rate too high costs."""
    arms = {arm: own for (arm,), own in group(runs, "arm").items()}
    reference = best_rate_between(arms[baseline(tune_arms(runs))])

    def row(label: str, own: list[Run]) -> list[str]:
        arm, losses, between = tune(own), by_rate(own), best_rate_between(own)
        shared = min(arm.losses)
        costs = []
        for factor in FACTORS:
            near = [rate for rate in losses if math.isclose(rate, factor * arm.rate, rel_tol=0.01)]
            loss = losses[near[0]].get(shared, math.nan) if near else math.nan
            cost = loss - arm.losses[shared]
            costs.append("diverges" if math.isinf(cost) else number(cost, sign="+"))
        ratio = f"{between:.2g} ({between / reference:.2f} ×)"
        return [label, with_spread(arm.mean, arm.spread), rate_text(arm), ratio, *costs]

    header = ["", "loss", "best rate", "between rates", *(f"at {f} ×" for f in FACTORS)]
    return table([header, *(row(*item) for item in arms.items())])


def per_gradient(runs: list[Run]) -> str:
    """Final losses beside what they cost, from the fewest gradients to the most."""
    rows = []
    for (label, steps), own in group(runs, "arm", "steps").items():
        arm = tune(own)
        spent = arm.gradients * steps
        text = [label, str(steps), f"{arm.gradients:.3g}", f"{spent:.0f}", rate_text(arm)]
        rows.append((spent, arm.mean, [*text, with_spread(arm.mean, arm.spread)]))
    header = ["", "steps", "gradients a step", "gradients", "best rate", "final loss"]
    return table([header, *(row for *_, row in sorted(rows))])


def of_images(runs: list[Run]) -> str:
    """As `comparison`, with what the test images say at the rate that validation chose."""
    arms = tune_arms(runs)
    reference = arms[baseline(arms)]

    def row(label: str, arm: Tuned) -> list[str]:
        own = [run for run in runs if run["arm"] == label and run["rate"] == arm.rate]
        tests = {name: [run[name] for run in own] for name in ("test_loss", "test_error")}
        errors = [100 * error for error in tests["test_error"]]
        return [
            label,
            rate_text(arm),
            with_spread(arm.mean, arm.spread),
            "" if arm is reference else with_spread(*difference(arm, reference), sign="+"),
            with_spread(float(np.mean(tests["test_loss"])), deviation(tests["test_loss"])),
            with_spread(float(np.mean(errors)), deviation(errors), 2),
        ]

    header = ["", "best rate", "validation loss", "− AdamW", "test loss", "test errors, %"]
    return table([header, *(row(*item) for item in arms.items())])


# --- figures --------------------------------------------------------------------------------------


def panels(count: int, width: float = 6, height: float = 4) -> tuple[Figure, list]:
    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def seeds_figure(runs: list[Run]) -> Figure:
    """Each arm's final losses at its best rate, a dot for a seed; one panel for each task."""
    tasks = group(runs, *TASK)
    most = max(len(group(own, "arm")) for own in tasks.values())
    figure, axes = panels(len(tasks), 5.5, 1.2 + 0.27 * most)
    for axis, (task, own) in zip(axes, tasks.items(), strict=True):
        arms = sorted(tune_arms(own).items(), key=lambda item: -item[1].mean)
        for place, (label, arm) in enumerate(arms):
            color = "C1" if label.startswith("MARS") else "C0"
            losses = list(arm.losses.values())
            axis.plot(losses, [place] * len(losses), "o", color=color, markersize=4, alpha=0.5)
            axis.plot([arm.mean], [place], "|", color=color, markersize=14, markeredgewidth=2)
        best = dict(arms)[baseline(dict(arms))]
        axis.axvline(best.mean, color="0.6", linewidth=1, linestyle="--")
        axis.set_yticks(range(len(arms)), [label for label, _ in arms], fontsize="small")
        axis.set_xlabel("final validation loss")
        if len(tasks) > 1:
            axis.set_title(f"{task[0]}, {task[1]} steps, batch {task[2]}", fontsize="medium")
    return figure


def curves_figure(runs: list[Run]) -> Figure:
    """Mean validation losses over the steps, without the first tenth."""
    tasks = group(runs, *TASK)
    figure, axes = panels(len(tasks), 5.5)
    for axis, (task, own) in zip(axes, tasks.items(), strict=True):
        for label, arm in tune_arms(r for r in own if r["arm"] in SHOWN_CURVES).items():
            step, loss = arm.curve[len(arm.curve) // 10 :].T
            axis.plot(step, loss, label=f"{label}: {arm.mean:.3f}", linewidth=1.5)
        axis.set(xlabel="step", ylabel="validation loss")
        axis.legend(frameon=False, fontsize="small")
        if len(tasks) > 1:
            axis.set_title(f"{task[0]}, {task[1]} steps, batch {task[2]}", fontsize="medium")
    return figure


def rates_figure(runs: list[Run]) -> Figure:
    """Final loss against the rate, by the seeds that all rates have; divergences are left out."""
    figure, (axis,) = panels(1, 7.5, 4.5)
    least, greatest = math.inf, -math.inf
    for place, ((label,), own) in enumerate(group(runs, "arm").items()):
        losses = by_rate(own)
        shared = set.intersection(*(set(seeds) for seeds in losses.values()))
        means = {r: float(np.mean([seeds[s] for s in shared])) for r, seeds in losses.items()}
        finite = {rate: loss for rate, loss in means.items() if math.isfinite(loss)}
        style = ("-", "--", ":")[place // 10]  # there are ten colours
        axis.plot(list(finite), list(finite.values()), style, marker="o", ms=3, label=label)
        least = min(least, *finite.values())
        greatest = max(greatest, min(finite.values()))
    axis.set_ylim(least - 0.02, greatest + 0.25)  # a rate far off is out of range, not of the data
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({run["rate"] for run in runs}))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.tick_params("x", labelsize="small", rotation=45)
    axis.set(xlabel="peak learning rate", ylabel="final validation loss")
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def gammas_figure(runs: list[Run]) -> Figure:
    """Final loss at the best rate against γ, one line for each optimizer and mode."""
    figure, (axis,) = panels(1, 7)
    constant = [run for run in runs if setting(run, "gamma_end") is None]
    lines: dict[str, list] = {}
    for (name, value), own in group(
        [run | {"series": series(run), "γ": gamma(run)} for run in constant], "series", "γ"
    ).items():
        lines.setdefault(name, []).append((value, tune(own)))
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        _errorbars(axis, points, name)
    axis.set_xscale("symlog", linthresh=1e-3, linscale=0.5)
    ticks = sorted({value for points in lines.values() for value, _ in points})
    axis.set_xticks(ticks, [f"{value:g}" for value in ticks], fontsize="small", rotation=45)
    axis.minorticks_off()
    axis.set(xlabel="γ", ylabel="final validation loss")
    axis.legend(frameon=False, fontsize="small")
    return figure


def batches_figure(runs: list[Run]) -> Figure:
    """Each arm's difference from AdamW at the same batch size, both at their best rates."""
    figure, (axis,) = panels(1, 7)
    lines: dict[str, list] = {}
    for (batch,), own in sorted(group(runs, "batch").items()):
        arms = tune_arms(own)
        reference = arms[baseline(arms)]
        for label, arm in arms.items():
            lines.setdefault(label, []).append((batch, *difference(arm, reference)))
    for label, points in lines.items():
        x, mean, spread = np.array(points).T
        axis.errorbar(x, mean, np.nan_to_num(spread), marker="o", ms=4, capsize=3, label=label)
    axis.set_xscale("log", base=2)
    ticks = sorted({run["batch"] for run in runs})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set(xlabel="sequences in a batch", ylabel="final loss − AdamW's")
    axis.legend(frameon=False, fontsize="small")
    return figure


def gradients_figure(runs: list[Run]) -> Figure:
    """Final loss against the gradients that a run took, one line for each arm's lengths."""
    figure, (axis,) = panels(1, 7)
    lines: dict[str, list] = {}
    for (label, steps), own in group(runs, "arm", "steps").items():
        arm = tune(own)
        lines.setdefault(label, []).append((steps * arm.gradients, arm))
    for label, points in lines.items():
        _errorbars(axis, sorted(points, key=lambda point: point[0]), label)
    axis.set(xlabel="gradients of a whole batch", ylabel="final validation loss")
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _errorbars(axis: Any, points: list[tuple[float, Tuned]], label: str) -> None:
    x = [value for value, _ in points]
    means = [arm.mean for _, arm in points]
    spreads = np.nan_to_num([arm.spread for _, arm in points])
    axis.errorbar(x, means, spreads, marker="o", ms=4, capsize=3, label=label)


def plotted(figure: Figure) -> list[list[list[float]]]:
    """The lines of a figure as [[x, ...], [y, ...]], to six digits."""
    return [
        [[float(f"{value:.6g}") for value in np.asarray(axis, float)] for axis in line.get_data()]
        for axes in figure.axes
        for line in axes.lines
    ]


def save(figure: Figure, file: Any) -> None:
    """The plotted numbers go with the image, so that a test can compare them with the results."""
    numbers = {"Plotted": json.dumps(plotted(figure))}
    figure.savefig(file, dpi=110, format="png", metadata=numbers)


# --- the page -------------------------------------------------------------------------------------


class Item(NamedTuple):
    results: str  # the file that it is made from
    make: Callable[[Any], Any]
    alt: str = ""  # of a figure


def _of_runs(make: Callable) -> Callable:
    return lambda results: make(results["runs"])


def _of_rows(make: Callable) -> Callable:
    return lambda results: table(make(results))


TABLES = {
    "variance_reduction": Item("variance_reduction", _of_rows(variance_reduction.least_errors)),
    "optimizers": Item("optimizers", _of_runs(lambda runs: of_tasks(runs, comparison))),
    "gamma": Item("gamma", _of_runs(lambda runs: of_tasks(runs, by_gamma))),
    "rates": Item("rates", _of_runs(lambda runs: of_tasks(runs, stability))),
    "batch": Item("batch", _of_runs(lambda runs: pivot(runs, "arm", "batch"))),
    "exact": Item("exact", _of_runs(per_gradient)),
    "details": Item("details", _of_runs(lambda runs: of_tasks(runs, comparison))),
    "vision": Item("vision", _of_runs(of_images)),
    "cost": Item("cost", _of_rows(cost.update_table)),
    "cost_of_steps": Item("cost", _of_rows(cost.share_table)),
}
FIGURES = {
    "variance_reduction": Item(
        "variance_reduction",
        variance_reduction.draw,
        "Errors of three estimators over their memory",
    ),
    "optimizers": Item("optimizers", _of_runs(seeds_figure), "Final losses of all optimizers"),
    "curves": Item("optimizers", _of_runs(curves_figure), "Validation losses over the steps"),
    "gamma": Item("gamma", _of_runs(gammas_figure), "Final loss against γ"),
    "rates": Item("rates", _of_runs(rates_figure), "Final loss against the learning rate"),
    "batch": Item("batch", _of_runs(batches_figure), "Distance to AdamW against the batch size"),
    "exact": Item("exact", _of_runs(gradients_figure), "Final loss against gradients taken"),
    "details": Item("details", _of_runs(seeds_figure), "Final losses of the variants"),
    "vision": Item("vision", _of_runs(rates_figure), "Validation loss against the learning rate"),
}


def read(name: str) -> Any:
    """The raw results, or None where there are none yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with these texts between the marks of their names, such as "table: cost"."""
    for name, text in parts.items():
        mark = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if len(mark.findall(page)) != 1:
            raise ValueError(f"the page must have <!-- {name} --> ... <!-- end --> once.")
        page = mark.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)  # noqa: B023
    return page


def main() -> None:
    parts = {}
    for name, item in TABLES.items():
        if (results := read(item.results)) is not None:
            parts[f"table: {name}"] = item.make(results)
    ASSETS.mkdir(exist_ok=True)
    for name, item in FIGURES.items():
        if (results := read(item.results)) is not None:
            save(item.make(results), ASSETS / f"results-{name}.png")
            parts[f"figure: {name}"] = f"![{item.alt}](assets/results-{name}.png)"
    PAGE.write_text(fill(PAGE.read_text(), parts))
    print("made " + ", ".join(parts))


if __name__ == "__main__":
    main()
