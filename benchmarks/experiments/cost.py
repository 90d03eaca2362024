"""What does an update cost beside the gradient?

    python -m benchmarks.experiments.cost    # some minutes; nothing is trained

As XLA's CPU compiler counts them: the FLOPs of an update on GPT-2 small's matrices, beside the
papers' counts and those of the shapes, and their share of a training step; and the FLOPs of whole
training steps of language_model.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mars_optax
from benchmarks import gpt2, hlo
from benchmarks.experiments import language_model
from benchmarks.experiments.store import RESULTS, Store
from examples.nanogpt import model

NS_STEPS = 5
EMBEDDINGS = (50257 + 1024) * gpt2.WIDTH  # GPT-2 small's, which Muon and MARS-M leave to AdamW
BATCHES = {"480 x 1024": 480 * 1024, "32 x 1024": 32 * 1024, "4 x 1024": 4 * 1024}
OPTIMIZERS = {
    "AdamW": optax.adamw(1e-3),
    "MARS-AdamW": mars_optax.mars_adamw(1e-3),
    "Muon": optax.contrib.muon(1e-3),
    "MARS-M, standard form": mars_optax.mars_m(1e-3, ns_gram=False),
    "MARS-M, Gram form": mars_optax.mars_m(1e-3, ns_gram=True),
}
STEPS_OF = (
    "AdamW (.9, .95)",
    "NAdamW (.9, .95)",
    "MARS-AdamW",
    "MARS-AdamW exact",
    "Muon",
    "Muon, Nesterov",
    "MARS-M",
    "MARS-M exact",
)


def newton_schulz(rows: int, columns: int) -> int:
    """FLOPs of the matrix products: X Xᵀ, its square, and their polynomial times X."""
    m, n = sorted((rows, columns))
    return NS_STEPS * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


def of_shapes(layers: int, width: int) -> int:
    """Those of all of GPT-2's matrices: 280 h³ a layer."""
    return sum(newton_schulz(*shape) for shape in gpt2.shapes(layers, width).values())


def of_papers(layers: int, width: int) -> dict[str, int]:
    """The papers' counts, for N = 12 h² l parameters; they count every matrix as if square."""
    count = 12 * width**2 * layers
    matrices = count * (30 * width + 20)
    return {"AdamW": 11 * count, "MARS-AdamW": 17 * count, "Muon": 11 * count + matrices}


def of_compiler(optimizer: optax.GradientTransformation, layers: int, width: int) -> float:
    """FLOPs of an update in float32."""
    shapes = gpt2.shapes(layers, width)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(optimizer.init, params)
    compiled = jax.jit(gpt2.make_step(optimizer)).lower(params, state, params).compile()
    return hlo.flops(compiled)


def of_step(label: str, size: str) -> float:
    """FLOPs of a training step of an arm of language_model.py, its gradients included."""
    arm, task = language_model.ARMS[label], language_model.Task(size)
    graphdef, params = model.define(language_model.SIZES[size])
    loss_fn = partial(model.loss, graphdef)
    tx = language_model.build(arm, 1e-3, task.steps)
    state = jax.eval_shape(tx.init, params)
    tokens = jax.ShapeDtypeStruct((task.batch, language_model.SIZES[size].context + 1), jnp.int32)

    def step(params, state, tokens):
        if arm.exact:
            _, grads = mars_optax.value_and_grads(loss_fn)(params, tokens, state=state)
        else:
            grads = jax.grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return hlo.flops(jax.jit(step).lower(params, state, tokens).compile())


def update_table(results: dict[str, Any]) -> list[list[str]]:
    """FLOPs a parameter of the matrices."""
    layers, width = results["settings"]["layers"], results["settings"]["width"]
    count = gpt2.parameters(gpt2.shapes(layers, width))
    papers = of_papers(layers, width)
    products = of_shapes(layers, width) / count
    rows = [["FLOPs a parameter", "compiler", "papers' count", "matrix products by the shapes"]]
    for name, flops in counted(results, "update", "small").items():
        paper = f"{papers[name] / count:,.0f}" if name in papers else "–"
        is_standard = name in ("Muon", "MARS-M, standard form")
        rows.append(
            [name, f"{flops / count:,.0f}", paper, f"{products:,.0f}" if is_standard else "–"]
        )
    return rows


def share_table(results: dict[str, Any]) -> list[list[str]]:
    """The update's share of GPT-2 small's step, 6 FLOPs a parameter and token for the rest."""
    layers, width = results["settings"]["layers"], results["settings"]["width"]
    count = gpt2.parameters(gpt2.shapes(layers, width))
    rows = [["share of a step's FLOPs", *(f"batch {batch}" for batch in BATCHES)]]
    updates = counted(results, "update", "small")
    for name, flops in updates.items():
        # MARS-AdamW takes the embeddings too; the others' are AdamW's.
        rest = updates[name if name == "MARS-AdamW" else "AdamW"] / count * EMBEDDINGS
        gradients = [6 * (count + EMBEDDINGS) * tokens for tokens in BATCHES.values()]
        shares = [(flops + rest) / (flops + rest + gradient) for gradient in gradients]
        rows.append([name, *(f"{100 * share:.2g} %" for share in shares)])
    return rows


def counted(results: dict[str, Any], program: str, size: str) -> dict[str, float]:
    """FLOPs of an update or a step at a size, by optimizer."""
    own = [row for row in results["runs"] if (row["program"], row["size"]) == (program, size)]
    return {row["optimizer"]: row["flops"] for row in own}


def main(layers: int = gpt2.LAYERS, width: int = gpt2.WIDTH) -> None:
    store = Store(RESULTS / "cost.json", layers=layers, width=width)

    def count(program: str, size: str, optimizer: str, flops: Callable[[], float]) -> None:
        key = {"program": program, "size": size, "optimizer": optimizer}
        store.get(key, lambda: {"flops": flops()})

    for name, optimizer in OPTIMIZERS.items():
        count("update", "small", name, partial(of_compiler, optimizer, layers, width))
    for size in language_model.SIZES:
        for label in STEPS_OF:
            count("step", size, label, partial(of_step, label, size))


if __name__ == "__main__":
    main()
