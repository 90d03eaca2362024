"""Every table and figure of docs/results.md, from the committed raw results.

    python -m benchmarks.experiments.report

A table stands on the page between `<!-- table: NAME -->` and `<!-- end -->`, a figure's link
between `<!-- figure: NAME -->` and `<!-- end -->`, its image in docs/assets/. What has no results
yet is left out.

Runs are as language_model.py and vision.py write them: {"arm": label, "rate", "seed",
"final_loss" (None: diverged), "curve": [[step, loss], ...], "gradients" per step,
"optimizer": {"gamma", "exact", ...}} and the task's size, steps and batch. Times of steps are
those of results/step_times.json, which were taken side by side.
"""

import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.experiments import cost, variance_reduction
from benchmarks.experiments.store import RESULTS

Run = dict[str, Any]
ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE, ASSETS = ROOT / "docs" / "results.md", ROOT / "docs" / "assets"
TASK = ("size", "steps", "batch")
BASELINE = "AdamW"  # of the arms whose labels begin so, the best
SHOWN = (
    "AdamW (.9, .95)",
    "NAdamW (.9, .95)",
    "MARS-AdamW",
    "MARS-AdamW (.9, .95), γ .1",
    "Muon",
    "Muon, Nesterov",
    "MARS-M",
    "MARS-M, γ .1",
)
SIZES = "optimizers sizes"  # files of runs
LENGTHS = "optimizers sizes lengths long long_exact"
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


def share_of_steps(arm: Tuned, other: Tuned) -> float:
    """The steps to the other's loss, over the other's; NaN: never.

    Both curves without the last point, which averages over more held-out text than the others.
    """
    curve, reached = arm.curve[:-1], other.curve[:-1][-1]
    return steps_to(curve, reached[1]) / float(reached[0])


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


def of_sizes(runs: list[Run], make: Callable[[list[Run]], str]) -> str:
    """A table for the first task of each size."""
    return of_tasks([run for own in first_tasks(runs) for run in own], make)


def comparison(runs: list[Run]) -> str:
    """Arms from the least loss to the greatest, beside the best AdamW."""
    arms = tune_arms(runs)
    best = baseline(arms)
    reference = arms[best]
    seconds = (read("step_times") or {"seconds": {}})["seconds"].get(runs[0]["size"], {})
    timed = best in seconds

    def row(label: str, arm: Tuned) -> list[str]:
        share = share_of_steps(arm, reference)
        cells = [
            f"**{label}**" if arm is reference else label,
            rate_text(arm),
            with_spread(arm.mean, arm.spread),
            str(len(arm.losses)),
            "" if arm is reference else with_spread(*difference(arm, reference), sign="+"),
            number(share, 2),
        ]
        if timed:
            cells.append(number(share * seconds.get(label, math.nan) / seconds[best], 2))
        return cells

    header = ["", "best rate", "final loss", "seeds", "− AdamW", "steps", *["time"] * timed]
    ranked = sorted(arms.items(), key=lambda item: item[1].mean)
    return table([header, *(row(label, arm) for label, arm in ranked)])


def pivot(runs: list[Run], row: str, column: str) -> str:
    """Final losses at the best rate of each cell, which is given in parentheses."""
    cells = {key: tune(own) for key, own in group(runs, row, column).items()}
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))

    def cell(r: Any, c: Any) -> str:
        if (arm := cells.get((r, c))) is None:
            return "–"
        edge = "" if arm.inside else ", edge"
        return f"{with_spread(arm.mean, arm.spread)} ({arm.rate:g}{edge})"

    header = ["", *(f"{c} {column}" if column == "steps" else f"{c}" for c in columns)]
    return table([header, *([str(r), *(cell(r, c) for c in columns)] for r in rows)])


def by_batch(runs: list[Run]) -> str:
    """Final losses, and below them their differences from AdamW's at the same batch size."""
    named = [run | {"of": f"batch {run['batch']}"} for run in runs]
    batches = {batch: tune_arms(own) for (batch,), own in group(named, "of").items()}
    rows = [["− AdamW", *batches]]
    for label in next(iter(batches.values())):
        cells = [
            with_spread(*difference(arms[label], arms[baseline(arms)]), sign="+")
            if label in arms
            else "–"
            for arms in batches.values()
        ]
        rows.append([label, *cells])
    return pivot(named, "arm", "of") + "\n\n" + table(rows)


def by_length(runs: list[Run]) -> str | None:
    """Final losses of runs of several lengths, a table for each size."""
    several = of_several_lengths(runs)
    return of_tasks(several, lambda own: pivot(own, "arm", "steps"), ("size",)) if several else None


def of_several_lengths(runs: list[Run]) -> list[Run]:
    """Runs of the arms that have more than one length at their size."""
    arms = [own for own in group(runs, "size", "arm").values() if len(group(own, "steps")) > 1]
    return [run for own in arms for run in sorted(own, key=lambda run: run["steps"])]


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
        costs = []
        for factor in FACTORS:
            near = [rate for rate in losses if math.isclose(rate, factor * arm.rate, rel_tol=0.01)]
            added = [loss - arm.losses[s] for s, loss in losses[near[0]].items()] if near else []
            cost = float(np.mean(added)) if added else math.nan
            costs.append("diverges" if math.isinf(cost) else number(cost, sign="+"))
        ratio = f"{between:.2g} ({between / reference:.2f} ×)"
        return [label, with_spread(arm.mean, arm.spread), rate_text(arm), ratio, *costs]

    header = ["", "loss", "best rate", "between rates", *(f"at {f} ×" for f in FACTORS)]
    return table([header, *(row(*item) for item in arms.items())])


def by_gradients(runs: list[Run]) -> str:
    """Final losses at equal numbers of gradients; exact modes spend them on fewer steps."""
    columns = sorted({spent(run) for run in runs})
    named = [run | {"line": line(run), "spent": f"{spent(run):g} gradients"} for run in runs]
    named.sort(key=lambda run: columns.index(spent(run)))
    return pivot(named, "line", "spent")


def spent(run: Run) -> float:
    """Gradients of a whole batch in the run."""
    return run["steps"] * run["gradients"]


def line(run: Run) -> str:
    """The optimizer and mode, and γ in exact mode, whatever the part of the batch."""
    return series(run) + (f", γ {gamma(run):g}" if setting(run, "exact") else "")


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


def partial_errors(results: dict[str, Any]) -> list[list[str]]:
    """A line for each estimator, a column for each cost."""
    lines = partial_lines(results)
    costs = sorted({cost for own in lines.values() for cost in own})
    body = [[name, *(number(own.get(c, math.nan)) for c in costs)] for name, own in lines.items()]
    return [["error of m", *(f"{cost:g} gradients" for cost in costs)], *body]


def partial_lines(results: dict[str, Any]) -> dict[str, dict[float, float]]:
    """Least errors of the momentum at the cost of 1 + 1/n gradients, over the EMA's at cost 1."""
    rows = results["runs"]
    one = next(row["error"] for row in rows if row["gradients"] == 1)
    lines: dict[str, dict[float, float]] = {}
    for row in rows:
        is_ema = row["estimator"] == "EMA"
        label = "EMA, larger batch" if is_ema else f"exact, γ {row['gamma']:g}"
        lines.setdefault(label, {})[row["gradients"]] = row["error"] / one
    return lines


# --- figures --------------------------------------------------------------------------------------


def panels(count: int, width: float = 6, height: float = 4) -> tuple[Figure, list]:
    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend_beside(axis: Any) -> None:
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def seeds_figure(runs: list[Run]) -> Figure:
    """Each arm's final losses at its best rate, a dot for a seed, on the first task."""
    arms = sorted(tune_arms(first_tasks(runs)[0]).items(), key=lambda item: -item[1].mean)
    figure, (axis,) = panels(1, 7.5, 1.2 + 0.27 * len(arms))
    for place, (label, arm) in enumerate(arms):
        color = "C1" if label.startswith("MARS") else "C0"
        losses = list(arm.losses.values())
        axis.plot(losses, [place] * len(losses), "o", color=color, markersize=4, alpha=0.5)
        axis.plot([arm.mean], [place], "|", color=color, markersize=14, markeredgewidth=2)
    best = dict(arms)[baseline(dict(arms))]
    axis.axvline(best.mean, color="0.6", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(arms)), [label for label, _ in arms], fontsize="small")
    axis.set_xlabel("final validation loss")
    return figure


def first_tasks(runs: list[Run]) -> list[list[Run]]:
    """The runs of the first task of each size."""
    tasks = {key[0]: own for key, own in reversed(group(runs, *TASK).items())}
    return list(tasks.values())[::-1]


def shown(runs: list[Run]) -> list[Run]:
    return [run for run in runs if run["arm"] in SHOWN]


def curves_figure(runs: list[Run]) -> Figure:
    """Mean validation losses over the steps, without the first tenth; a panel for each size."""
    tasks = first_tasks(runs)
    figure, axes = panels(len(tasks), 4.7)
    for axis, own in zip(axes, tasks, strict=True):
        arms = tune_arms(shown(own))
        for place, label in enumerate(SHOWN):
            if (arm := arms.get(label)) is not None:
                step, loss = arm.curve[len(arm.curve) // 10 :].T
                axis.plot(step, loss, f"C{place}", label=f"{label}: {arm.mean:.3f}", linewidth=1.5)
        axis.set(xlabel="step", ylabel="validation loss")
        axis.legend(frameon=False, fontsize="small")
        axis.set_title(f"{own[0]['size']}, batch {own[0]['batch']}", fontsize="medium")
    return figure


def rates_figure(runs: list[Run]) -> Figure:
    """Final loss against the rate, by the seeds that all rates have; divergences are left out."""
    figure, (axis,) = panels(1, 7.5, 4.5)
    shown: list[list[float]] = []  # each arm's losses
    for place, ((label,), own) in enumerate(group(runs, "arm").items()):
        losses = by_rate(own)
        shared = set.intersection(*(set(seeds) for seeds in losses.values()))
        means = {r: float(np.mean([seeds[s] for s in shared])) for r, seeds in losses.items()}
        finite = {rate: loss for rate, loss in means.items() if math.isfinite(loss)}
        style = ("-", "--", ":")[place // 10]  # there are ten colours
        axis.plot(list(finite), list(finite.values()), style, marker="o", ms=3, label=label)
        shown.append(list(finite.values()))
    # A rate far off is left out of the range, not of the data.
    highest = min(max(map(max, shown)), max(map(min, shown)) + 0.25)
    axis.set_ylim(min(map(min, shown)) - 0.02, highest + 0.02)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({run["rate"] for run in runs}))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.tick_params("x", labelsize="small", rotation=45)
    axis.set(xlabel="peak learning rate", ylabel="final validation loss")
    legend_beside(axis)
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
    figure, (axis,) = panels(1, 8.5)
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
    legend_beside(axis)
    return figure


def lengths_figure(runs: list[Run]) -> Figure | None:
    """Final loss against the steps of the whole run, at the first size."""
    several = [run for run in of_several_lengths(runs) if run["size"] == runs[0]["size"]]
    if not several:
        return None
    figure, (axis,) = panels(1, 8.5)
    for (label,), own in group(several, "arm").items():
        _errorbars(axis, [(s, tune(r)) for (s,), r in group(own, "steps").items()], label)
    axis.set_xscale("log", base=2)
    ticks = sorted({run["steps"] for run in several})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set(xlabel="steps of the run", ylabel="final validation loss")
    legend_beside(axis)
    return figure


def gradients_figure(runs: list[Run]) -> Figure:
    """Final loss against the gradients that a run took; a panel for each optimizer."""
    named = [run | {"name": series(run).split(",")[0], "line": line(run)} for run in runs]
    optimizers = group(named, "name")
    figure, axes = panels(len(optimizers), 4.7)
    for axis, own in zip(axes, optimizers.values(), strict=True):
        for (label,), of_line in group(own, "line").items():
            points = [(spent(r[0]), tune(r)) for r in group(of_line, "arm", "steps").values()]
            _errorbars(axis, sorted(points, key=lambda point: point[0]), label)
        axis.set(xlabel="gradients of a whole batch", ylabel="final validation loss")
        axis.legend(frameon=False, fontsize="small")
    return figure


def partial_figure(results: dict[str, Any]) -> Figure:
    """The errors of `partial_lines` against their cost."""
    figure, (axis,) = panels(1, 7.5)
    for label, own in partial_lines(results).items():
        axis.plot(*zip(*sorted(own.items()), strict=True), marker="o", ms=4, label=label)
    axis.set(xlabel="gradients of a whole batch in a step", ylabel="error of m over the EMA's")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    legend_beside(axis)
    return figure


def flops_figure(results: dict[str, Any]) -> Figure | None:
    """Final loss against the FLOPs of whole runs, of all lengths; a panel for each size."""
    if (of_optimizers := read(LENGTHS)) is None:
        return None
    sizes = group(of_optimizers["runs"], "size")
    figure, axes = panels(len(sizes), 5)
    for axis, ((size,), own) in zip(axes, sizes.items(), strict=True):
        for place, (label, flops) in enumerate(cost.counted(results, "step", size).items()):
            lengths = group([run for run in own if run["arm"] == label], "steps")
            points = [(flops * steps, tune(runs)) for (steps,), runs in sorted(lengths.items())]
            _errorbars(axis, points, label, f"C{place}")
        axis.set(xlabel="FLOPs of the run", ylabel="final validation loss")
        axis.set_title(size, fontsize="medium")
    legend_beside(axes[-1])
    return figure


def _errorbars(
    axis: Any, points: list[tuple[float, Tuned]], label: str, color: str | None = None
) -> None:
    x = [value for value, _ in points]
    means = [arm.mean for _, arm in points]
    spreads = np.nan_to_num([arm.spread for _, arm in points])
    axis.errorbar(x, means, spreads, marker="o", ms=4, capsize=3, label=label, color=color)


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


def cost_of_losses(results: dict[str, Any]) -> str | None:
    """FLOPs of a step by the compiler, and those to AdamW's loss, over AdamW's."""
    if (of_optimizers := read(SIZES)) is None:
        return None
    rows = [["", "size", "FLOPs of a step", "FLOPs to AdamW's loss"]]
    for own in first_tasks(of_optimizers["runs"]):
        arms, flops = tune_arms(own), cost.counted(results, "step", own[0]["size"])
        adamw = next(name for name in flops if name.startswith(BASELINE))  # betas cost nothing
        for label in (name for name in flops if name in arms):
            ratio = flops[label] / flops[adamw]
            share = share_of_steps(arms[label], arms[baseline(arms)])
            rows.append([label, own[0]["size"], number(ratio, 2), number(ratio * share, 2)])
    return table(rows)


# --- the page -------------------------------------------------------------------------------------


class Item(NamedTuple):
    results: str  # the file that it is made from, or several
    make: Callable[[Any], Any]
    alt: str = ""  # of a figure


def _of_runs(make: Callable) -> Callable:
    return lambda results: make(results["runs"])


def _of_rows(make: Callable) -> Callable:
    return lambda results: table(make(results))


TABLES = {
    **{
        f"variance_reduction, {name.split(':')[0]}": Item(
            "variance_reduction",
            _of_rows(functools.partial(variance_reduction.least, measure=name)),
        )
        for name in variance_reduction.MEASURES
    },
    "optimizers": Item(SIZES, _of_runs(lambda runs: of_sizes(runs, comparison))),
    "lengths": Item(LENGTHS, _of_runs(by_length)),
    "gamma": Item("gamma", _of_runs(lambda runs: of_tasks(runs, by_gamma))),
    "rates": Item("rates", _of_runs(lambda runs: of_tasks(runs, stability))),
    "batch": Item("batch", _of_runs(by_batch)),
    "exact": Item("exact", _of_runs(by_gradients)),
    "partial_exact": Item("partial_exact", _of_rows(partial_errors)),
    "details": Item("details", _of_runs(lambda runs: of_tasks(runs, comparison))),
    "vision": Item("vision", _of_runs(of_images)),
    "cost": Item("cost", _of_rows(cost.update_table)),
    "cost_of_losses": Item("cost", cost_of_losses),
    "cost_of_steps": Item("cost", _of_rows(cost.share_table)),
}
FIGURES = {
    "variance_reduction": Item(
        "variance_reduction",
        variance_reduction.draw,
        "Errors of three estimators over their memory",
    ),
    "optimizers": Item(SIZES, _of_runs(seeds_figure), "Final losses of all optimizers"),
    "curves": Item(SIZES, _of_runs(curves_figure), "Validation losses over the steps"),
    "lengths": Item(
        LENGTHS,
        lambda results: lengths_figure(shown(results["runs"])),
        "Final loss against the run's length",
    ),
    "gamma": Item("gamma", _of_runs(gammas_figure), "Final loss against γ"),
    "rates": Item("rates", _of_runs(rates_figure), "Final loss against the learning rate"),
    "batch": Item("batch", _of_runs(batches_figure), "Distance to AdamW against the batch size"),
    "exact": Item("exact", _of_runs(gradients_figure), "Final loss against gradients taken"),
    "partial_exact": Item("partial_exact", partial_figure, "Errors of m against gradients taken"),
    "details": Item("details", _of_runs(seeds_figure), "Final losses of the variants"),
    "cost": Item("cost", flops_figure, "Final loss against FLOPs"),
    "vision": Item("vision", _of_runs(rates_figure), "Validation loss against the learning rate"),
}


def read(names: str) -> Any:
    """The raw results, the runs of several files together; None where there are none yet."""
    paths = [RESULTS / f"{name}.json" for name in names.split()]
    found = [json.loads(path.read_text()) for path in paths if path.is_file()]
    if len(found) < 2:
        return found[0] if found else None
    return found[0] | {"runs": [run for results in found for run in results["runs"]]}


def make(item: Item) -> Any:
    """The table's text or the figure; None where there are no results for it."""
    results = read(item.results)
    return None if results is None else item.make(results)


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with these texts between the marks of their names, such as "table: cost"."""
    for name, text in parts.items():
        mark = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        between = f"\n{text}\n\n" if text else ""
        if len(mark.findall(page)) != 1:
            raise ValueError(f"the page must have <!-- {name} --> ... <!-- end --> once.")
        page = mark.sub(lambda found: found[1] + between + found[2], page)  # noqa: B023
    return page


def main() -> None:
    parts = {f"table: {name}": make(item) or "" for name, item in TABLES.items()}
    ASSETS.mkdir(exist_ok=True)
    for name, item in FIGURES.items():
        image = ASSETS / f"results-{name}.png"
        if (figure := make(item)) is None:
            image.unlink(missing_ok=True)
            parts[f"figure: {name}"] = ""
        else:
            save(figure, image)
            parts[f"figure: {name}"] = f"![{item.alt}](assets/{image.name})"
    PAGE.write_text(fill(PAGE.read_text(), parts))
    print("made " + ", ".join(name for name, text in parts.items() if text))


if __name__ == "__main__":
    main()
