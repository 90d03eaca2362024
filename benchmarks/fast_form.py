"""Whether MARS-M trains as well on the Gram form as on the standard one: the demo, seed by seed.

    python -m benchmarks.fast_form --steps 2000

The goal: mean validation losses within 0.01 of each other. Deterministic on a given machine.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import ClassVar

import optax

import mars_optax
from benchmarks import gpt2
from examples.nanogpt import optimizers, train
from examples.nanogpt.config import Config, parse

RESULTS = Path(__file__).parent / "results" / "fast_form.json"


class OneForm(Config):
    """The trainer's configuration of MARS-M, with the form chosen."""

    gram: ClassVar[bool]
    dtype: ClassVar[str]

    def build_optimizer(self) -> optax.GradientTransformationExtraArgs:
        rate, fallback = self.rates()
        optimizer = mars_optax.mars_m(
            rate,
            ns_gram=self.gram,
            ns_dtype=self.dtype,
            weight_decay=self.weight_decay,
            weight_decay_mask=optimizers.is_matrix,
            weight_dimension_numbers=optimizers.kernel_dimensions,
            adam_learning_rate=fallback,
            adam_weight_decay=self.weight_decay,
        )
        return optax.chain(optax.clip_by_global_norm(optimizers.CLIP_NORM), optimizer)


def loss(form: type[OneForm], seed: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = parse(
            f"--steps {steps} --seed {seed} --eval-every {steps} --checkpoint-every 0 "
            f"--sample-tokens 0 --overwrite --out-dir {folder}".split()
        )
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config)}
        return train.train(form(**values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()

    losses: dict[str, list[float]] = {}
    for seed in args.seeds:
        for dtype in args.dtypes:
            for form, gram in {"Gram": True, "standard": False}.items():
                chosen = type("Chosen", (OneForm,), {"gram": gram, "dtype": dtype})
                losses.setdefault(f"{dtype}, {form}", []).append(loss(chosen, seed, args.steps))
    means = {name: statistics.mean(values) for name, values in losses.items()}
    report = {
        **gpt2.about("flax"),
        "task": f"the demo, {args.steps} steps, nats per byte of validation text",
        "seeds": args.seeds,
        "losses": losses,
        "means": means,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for dtype in args.dtypes:
        difference = means[f"{dtype}, Gram"] - means[f"{dtype}, standard"]
        print(f"{dtype}: difference of the means {difference:+.4f} nats per byte")


if __name__ == "__main__":
    main()
