"""Figures of runs, drawn from their metrics.jsonl."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

# The optimizer's numbers, drawn below the loss: each key of metrics.jsonl and its label.
NORMS = {
    "grad_norm": "‖gradient‖",
    "update_norm": "‖update‖",
    "noise_scale": "noise scale (batches)",
}
DIAGNOSTICS = {
    "correction": "‖k(g − g⁻)‖ / ‖g‖",
    "cosine": "cos(g, g⁻)",
    "momentum_distance": "‖m − g‖ / ‖g‖",
    "clipped": "clipped share",
    "removed": "error removed",
}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that was cut off while it was written is left out."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def series(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    """(step, value) [N, 2] of the rows that have the key."""
    return np.array([(row["step"], row[key]) for row in rows if key in row]).reshape(-1, 2)


def draw(metrics: Path, image: Path, title: str, unit: str) -> None:
    """Losses over steps, and below them what the optimizer does."""
    rows = read_metrics(metrics)
    train, validation = series(rows, "train_loss"), series(rows, "validation_loss")
    has_diagnostics = any("correction" in row for row in rows)
    figure = Figure(figsize=(7, 8 if has_diagnostics else 6), layout="constrained")
    heights = [3, 1, 1.5] if has_diagnostics else [3, 1]
    axes, *below = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    if len(train):
        axes.plot(*train.T, color="0.65", linewidth=1, label="training")
    if len(validation):
        axes.plot(*validation.T, "o-", color="C0", markersize=4, label="validation")
        step, loss = validation[-1]
        axes.annotate(
            f"{loss:.3f}", (step, loss), (0, 8), textcoords="offset points", ha="right", color="C0"
        )
        # The first steps fall from ln(V): leave them out of the range, not of the data.
        shown = np.concatenate([train[len(train) // 20 :, 1], validation[:, 1]])
        margin = 0.05 * (shown.max() - shown.min()) + 1e-3
        axes.set_ylim(shown.min() - margin, shown.max() + margin)
    axes.set(ylabel=f"loss ({unit})", title=title)
    for panel, keys in zip(below, (NORMS, DIAGNOSTICS), strict=False):
        for key, label in keys.items():
            if len(points := series(rows, key)):
                panel.plot(*points.T, linewidth=1, label=label)
    below[0].set_yscale("log")
    below[-1].set_xlabel("step")
    for panel in (axes, *below):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize="small", ncols=3 if panel in below else 1)
    save(figure, image)


def draw_comparison(runs: dict[str, list[dict[str, Any]]], image: Path, unit: str) -> None:
    """The validation losses of several runs, by their names."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    shown = []
    for name, rows in runs.items():
        points = series(rows, "validation_loss")
        axes.plot(*points.T, "o-", markersize=3, label=f"{name}: {points[-1, 1]:.3f}")
        shown.extend(points[len(points) // 10 :, 1])  # what falls from ln(V) is out of range
    margin = 0.05 * (max(shown) - min(shown)) + 1e-3
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set(xlabel="step", ylabel=f"validation loss ({unit})")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, image)


def save(figure: Figure, image: Path) -> None:
    """The image appears complete or not at all."""
    partial = image.with_name(f".{image.name}")
    figure.savefig(partial, dpi=120, format="png")
    os.replace(partial, image)
