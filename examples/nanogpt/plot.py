"""The loss curve of a run, drawn from its metrics.jsonl."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(metrics: Path, image: Path, title: str, unit: str) -> None:
    """Training and validation loss over steps; the image appears complete or not at all."""
    rows = read_metrics(metrics)
    train, validation = (
        np.array([(row["step"], row[key]) for row in rows if key in row])
        for key in ("train_loss", "validation_loss")
    )
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
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
    axes.set(xlabel="step", ylabel=f"loss ({unit})", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    partial = image.with_name(f".{image.name}")
    figure.savefig(partial, dpi=120, format="png")
    os.replace(partial, image)
