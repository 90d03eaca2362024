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
from mars_optax.diagnostics import diagnostics

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
MARS = tuple(name for name in NAMES if name.startswith("mars_"))
ScheduleName = Literal["cosine", "wsd", "constant"]
WSD_DECAY = 0.2  # the share of the steps in which "wsd" decays
CLIP_NORM = 1.0
_ORTHOGONALIZING = ("mars_shampoo", "mars_m")


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
    b1: float = 0.95
    b2: float = 0.99  # where there is one


ADAMW = Rates(6e-3, 6e-4, 3e-4, 2e-4, 2e-4)
LION = Rates(1e-3, 1e-4, 5e-5, 3e-5, 3e-5)
MARS_ADAMW = Rates(1e-2, 6e-3, 3e-3, 2e-3, 2e-3)
HALF_MARS_ADAMW = Rates(*(rate / 2 for rate in MARS_ADAMW))
MUON = Rates(2e-2, 2e-2, 1e-2, 6.67e-3, 6.67e-3)
MIN_RATES = Rates(0.0, 3e-5, 6e-5, 1e-5, 1e-5)
FALLBACK_BETAS = (0.9, 0.95)
RECIPES: dict[str, Recipe] = {
    "adamw": Recipe(ADAMW, b1=0.9, b2=0.95),
    "nadamw": Recipe(ADAMW, b1=0.9, b2=0.95),
    "lion": Recipe(LION, weight_decay=1.0, b1=0.9),
    "adan": Recipe(Rates(6e-3, 1e-3, 5e-4, 3e-4, 3e-4), weight_decay=0.02, b1=0.98, b2=0.92),
    "ademamix": Recipe(ADAMW, b1=0.9, b2=0.999),
    "muon": Recipe(MUON, ADAMW),
    "moonlight": Recipe(ADAMW),
    "mars_adamw": Recipe(MARS_ADAMW, HALF_MARS_ADAMW, weight_decay=0.01),
    "mars_lion": Recipe(LION, weight_decay=1.0),
    "mars_shampoo": Recipe(MUON, ADAMW),
    "mars_m": Recipe(Rates(6e-3, 6e-3, 5e-3, 5e-3, 3e-3)),
    "mars_sgdm": Recipe(Rates(1.0, 1.0, 1.0, 1.0, 1.0), ADAMW, weight_decay=1e-4),
}

# The MARS authors' best validation losses on OpenWebText (batch 480 x 1024, 100,000 steps), after
# 5 and 50 billion tokens, about 10,000 and 100,000 steps.
PUBLISHED_LOSSES: dict[tuple[str, str], tuple[float, float]] = {
    ("small", "adamw"): (3.193, 2.885),
    ("small", "muon"): (3.165, 2.901),
    ("small", "mars_adamw"): (3.108, 2.849),
    ("medium", "adamw"): (3.084, 2.691),
    ("medium", "muon"): (3.009, 2.688),
    ("medium", "mars_adamw"): (2.969, 2.636),
    ("large", "adamw"): (3.013, 2.561),
    ("large", "muon"): (2.915, 2.573),
    ("large", "mars_adamw"): (2.876, 2.518),
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


def gamma_schedule(gamma: float, end: float | None, steps: int) -> optax.ScalarOrSchedule:
    """Constant, or linear from `gamma` at the first step to `end` at the last."""
    return gamma if end is None else optax.linear_schedule(gamma, end, max(1, steps - 1))


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
    gamma: optax.ScalarOrSchedule,
    steps: int,
    exact: bool = False,
    ns_dtype: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer behind a clip of the gradient's global norm (in exact mode, of each of two).

    `ns_dtype` is that of our Newton–Schulz iterations, by default the gradient's, as in Optax.
    """
    clip = optax.clip_by_global_norm(CLIP_NORM)
    if name not in MARS:
        if exact:
            raise ValueError(
                f"--exact needs one of {', '.join(MARS)}, not {name}, which takes one gradient: "
                "leave --exact out."
            )
        tx = _from_optax(name, rate, fallback, weight_decay, steps)
        return optax.with_extra_args_support(optax.chain(clip, tx))
    recipe = RECIPES[name]
    tx = getattr(mars_optax, name)(
        rate,
        b1=recipe.b1,
        weight_decay=weight_decay,
        gamma=gamma,
        weight_decay_mask=is_matrix,
        weight_dimension_numbers=_dimensions(name),
        adam_learning_rate=fallback,
        adam_b1=FALLBACK_BETAS[0],
        adam_b2=FALLBACK_BETAS[1],
        adam_weight_decay=weight_decay,
        **({"b2": recipe.b2} if name == "mars_adamw" else {}),
        **({"ns_dtype": ns_dtype} if name in _ORTHOGONALIZING else {}),
        **({"exact": True, "preprocess": clip} if exact else {}),
    )
    return tx if exact else optax.chain(clip, tx)


def diagnose(
    name: str,
    state: optax.OptState,
    grads: optax.Updates | mars_optax.MarsGrads,
    gamma: optax.ScalarOrSchedule,
) -> dict[str, jax.Array]:
    """The library's diagnostics of a MARS optimizer made by `build`, before its step."""
    clip = optax.clip_by_global_norm(CLIP_NORM)
    if isinstance(grads, mars_optax.MarsGrads):
        clipped = mars_optax.MarsGrads(*(clip.update(tree, clip.init(tree))[0] for tree in grads))
    else:
        clipped, _ = clip.update(grads, clip.init(grads))
    seen = diagnostics(
        state,
        clipped,
        gamma=gamma,
        b1=RECIPES[name].b1,
        weight_dimension_numbers=_dimensions(name),
    )
    return {key: value for key, value in seen._asdict().items() if value is not None}


def _dimensions(name: str) -> Callable[[optax.Params], Any]:
    return kernel_dimensions if name in _ORTHOGONALIZING else matrix_dimensions


def _from_optax(
    name: str,
    rate: optax.Schedule,
    fallback: optax.Schedule,
    weight_decay: float,
    steps: int,
) -> optax.GradientTransformation:
    decay: dict[str, Any] = {"weight_decay": weight_decay, "mask": is_matrix}
    b1, b2 = RECIPES[name].b1, RECIPES[name].b2
    match name:
        case "adamw":
            return optax.adamw(rate, b1, b2, **decay)
        case "nadamw":
            return optax.nadamw(rate, b1, b2, **decay)
        case "lion":
            return optax.lion(rate, b1, b2, **decay)
        case "adan":
            return optax.adan(rate, b1, b2, **decay)
        case "ademamix":
            # Its slow momentum is blended in over the run, as in the paper.
            alpha = optax.linear_schedule(0.0, 5.0, steps)
            return optax.contrib.ademamix(rate, b1, b2, alpha=alpha, **decay)
        case "muon" | "moonlight":
            # Optax's fallback has no mask, so that embeddings do not decay here.
            return optax.contrib.muon(
                rate,
                beta=b1,
                weight_decay=weight_decay,
                adam_b1=FALLBACK_BETAS[0],
                adam_b2=FALLBACK_BETAS[1],
                adam_learning_rate=fallback,
                muon_weight_dimension_numbers=kernel_dimensions,
                consistent_rms=0.2 if name == "moonlight" else None,
            )
    raise ValueError(f"optimizer {name!r} is unknown: use one of {', '.join(NAMES)}.")
