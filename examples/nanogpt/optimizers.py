"""Optimizers and learning-rate schedules by name.

Which parameters are matrices is told by their path, never by their number of axes: the blocks'
parameters are stacked over layers, so that a kernel is [L, m, n], and a bias [L, n] is no matrix.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import optax
from optax.contrib import MuonDimensionNumbers

import mars_optax

Name = Literal[
    "adamw",
    "nadamw",
    "lion",
    "adan",
    "ademamix",
    "muon",
    "moonlight",
    "mars_adamw",
    "mars_lion",
    "mars_shampoo",
    "mars_m",
    "mars_sgdm",
]
NAMES: tuple[str, ...] = get_args(Name)
ScheduleName = Literal["cosine", "wsd", "constant"]
WSD_DECAY = 0.2  # the share of the steps in which "wsd" decays
CLIP_NORM = 1.0


class Rates(NamedTuple):
    """A learning rate for every preset."""

    demo: float
    small: float
    medium: float
    large: float
    xl: float


class Recipe(NamedTuple):
    """Defaults of an optimizer.

    For AdamW, Muon, MARS-AdamW and MARS-M `demo` comes from short runs on the default corpus and
    the larger presets from the MARS authors' settings; the other rates are untuned guesses.
    """

    rates: Rates
    fallback: Rates | None = None  # AdamW's, for what the optimizer leaves to it; None: the same
    weight_decay: float = 0.1


ADAMW = Rates(6e-3, 6e-4, 3e-4, 2e-4, 2e-4)
MARS = Rates(1e-2, 6e-3, 3e-3, 2e-3, 2e-3)
HALF_MARS = Rates(*(rate / 2 for rate in MARS))
MUON = Rates(2e-2, 2e-2, 1e-2, 6.67e-3, 6.67e-3)
RECIPES: dict[str, Recipe] = {
    "adamw": Recipe(ADAMW),
    "nadamw": Recipe(ADAMW),
    "lion": Recipe(Rates(1e-3, 1e-4, 5e-5, 3e-5, 3e-5), weight_decay=1.0),
    "adan": Recipe(Rates(6e-3, 1e-3, 5e-4, 3e-4, 3e-4), weight_decay=0.02),
    "ademamix": Recipe(ADAMW),
    "muon": Recipe(MUON, ADAMW),
    "moonlight": Recipe(Rates(6e-3, 6e-4, 3e-4, 2e-4, 2e-4)),
    "mars_adamw": Recipe(MARS, HALF_MARS, weight_decay=0.01),
    "mars_lion": Recipe(Rates(1e-3, 1e-4, 5e-5, 3e-5, 3e-5), weight_decay=1.0),
    "mars_shampoo": Recipe(MUON, ADAMW),
    "mars_m": Recipe(Rates(6e-3, 6e-3, 5e-3, 5e-3, 3e-3)),
    "mars_sgdm": Recipe(Rates(1.0, 1.0, 1.0, 1.0, 1.0), ADAMW, weight_decay=1e-4),
}


def learning_rates(name: str, preset: str, chosen: float | None = None) -> tuple[float, float]:
    """The rate and the AdamW fallback's, which keeps its proportion to a chosen rate."""
    recipe = RECIPES[name]
    rate = getattr(recipe.rates, preset)
    fallback = getattr(recipe.fallback or recipe.rates, preset)
    return (rate, fallback) if chosen is None else (chosen, chosen * fallback / rate)


def schedule(
    name: ScheduleName, rate: float, steps: int, warmup: int, final: float
) -> optax.Schedule:
    """Linear warm-up, then cosine, warm-up/stable/decay or constant; ends at `final * rate`."""
    warmup = min(warmup, steps)
    match name:
        case "cosine":
            rest = optax.cosine_decay_schedule(rate, max(1, steps - warmup), final)
        case "wsd":
            decay = max(1, min(round(WSD_DECAY * steps), steps - warmup))
            rest = optax.linear_schedule(rate, final * rate, decay, steps - warmup - decay)
        case "constant":
            rest = optax.constant_schedule(rate)
    # The first step has rate / warmup, not 0.
    rise = optax.linear_schedule(rate / max(1, warmup), rate, max(1, warmup - 1))
    return optax.join_schedules([rise, rest], [warmup])


def kernel_dimensions(params: optax.Params) -> Any:
    """Dimension numbers of the blocks' kernels [L, in, out]; None for everything else.

    Shampoo, Muon and MARS-M leave the embeddings, with them the tied head, to AdamW: rows of an
    embedding are updated apart, so it is no linear map whose spectrum means something.
    """
    return _by_path(params, lambda name: _KERNEL if name == "kernel" else None)


def matrix_dimensions(params: optax.Params) -> Any:
    """Dimension numbers of kernels and embeddings: all of GPT-2's matrices, as in the authors'
    MARS-AdamW."""
    return _by_path(params, {"kernel": _KERNEL, "embedding": _EMBEDDING}.get)


def is_matrix(params: optax.Params) -> Any:
    """Whether weight decay applies: to kernels and embeddings, not to biases and norms."""
    return _by_path(params, lambda name: name in ("kernel", "embedding"))


_KERNEL = MuonDimensionNumbers(reduction_axis=1, output_axis=2)
_EMBEDDING = MuonDimensionNumbers(reduction_axis=0, output_axis=1)


def _by_path(params: optax.Params, label: Callable[[str], Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: label(path[-1].key), params)


def build(
    name: str,
    rate: optax.Schedule,
    fallback: optax.Schedule,
    *,
    weight_decay: float,
    gamma: float,
    steps: int,
    exact: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer behind a clip of the gradient's global norm (in exact mode, of each of two)."""
    clip = optax.clip_by_global_norm(CLIP_NORM)
    if not name.startswith("mars_"):
        if exact:
            raise ValueError(
                f"--exact needs one of {', '.join(n for n in NAMES if n.startswith('mars_'))}, "
                f"not {name}, which takes one gradient: leave --exact out."
            )
        tx = _from_optax(name, rate, fallback, weight_decay, steps)
        return optax.with_extra_args_support(optax.chain(clip, tx))
    one_liner = getattr(mars_optax, name)
    matrices = name in ("mars_shampoo", "mars_m")
    tx = one_liner(
        rate,
        weight_decay=weight_decay,
        gamma=gamma,
        weight_decay_mask=is_matrix,
        weight_dimension_numbers=kernel_dimensions if matrices else matrix_dimensions,
        adam_learning_rate=fallback,
        adam_weight_decay=weight_decay,
        **({"exact": True, "preprocess": clip} if exact else {}),
    )
    return tx if exact else optax.chain(clip, tx)


def _from_optax(
    name: str,
    rate: optax.Schedule,
    fallback: optax.Schedule,
    weight_decay: float,
    steps: int,
) -> optax.GradientTransformation:
    decay: dict[str, Any] = {"weight_decay": weight_decay, "mask": is_matrix}
    match name:
        case "adamw":
            return optax.adamw(rate, 0.9, 0.95, **decay)
        case "nadamw":
            return optax.nadamw(rate, 0.9, 0.95, **decay)
        case "lion":
            return optax.lion(rate, 0.9, 0.99, **decay)
        case "adan":
            return optax.adan(rate, **decay)
        case "ademamix":
            # Its slow momentum is blended in over the run, as in the paper.
            alpha = optax.linear_schedule(0.0, 5.0, steps)
            return optax.contrib.ademamix(rate, alpha=alpha, **decay)
        case "muon" | "moonlight":
            # Optax's fallback has no mask, so that embeddings do not decay here.
            return optax.contrib.muon(
                rate,
                weight_decay=weight_decay,
                adam_b2=0.95,
                adam_learning_rate=fallback,
                muon_weight_dimension_numbers=kernel_dimensions,
                consistent_rms=0.2 if name == "moonlight" else None,
            )
    raise ValueError(f"optimizer {name!r} is unknown: use one of {', '.join(NAMES)}.")
