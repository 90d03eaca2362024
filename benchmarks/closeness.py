"""How close each form of the orthogonalization comes to the polar factor U Vᵀ.

    python -m benchmarks.closeness

Deterministic on a given backend; a table of the relative distance and of the singular values.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpt2
from mars_optax import orthogonalize

RESULTS = pathlib.Path(__file__).parent / "results" / "closeness.json"
_BF16 = {"ns_dtype": jnp.bfloat16}
FORMS = {
    name: jax.jit(functools.partial(orthogonalize, **settings))
    for name, settings in {
        "float32, standard": {"ns_gram": False},
        "float32, Gram": {"ns_gram": True},
        "bfloat16, standard": {"ns_gram": False, **_BF16},
        "bfloat16, Gram": {"ns_gram": True, **_BF16},
    }.items()
}


def spectra(m: int) -> dict[str, np.ndarray | None]:
    """Singular values; None: those of a Gaussian matrix."""
    k = np.arange(m)
    return {
        "random": None,
        "1/k": 1 / (k + 1.0),
        "1/k²": (k + 1.0) ** -2,
        "down to 1e-3": 10 ** (-3 * k / m),
        "down to 1e-6": 10 ** (-6 * k / m),
        "rank m/2": np.where(k < m // 2, 1.0, 0.0),
        "rank 8": np.where(k < 8, 1.0, 0.0),
        "one, others 0.02": np.where(k < 1, 1.0, 0.02),
        "m/16, others 3e-3": np.where(k < m // 16, 1.0, 3e-3),
    }


def matrix(m: int, n: int, spectrum: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """A matrix and its polar factor."""
    gaussian = np.random.default_rng(m + n).normal(size=(m, n))
    u, s, vt = np.linalg.svd(gaussian, full_matrices=False)
    s = s if spectrum is None else spectrum
    return ((u * s) @ vt).astype(np.float32), (u * (s > 1e-9)) @ vt


def measure(x: np.ndarray, polar: np.ndarray) -> dict[str, dict]:
    rows = {}
    for form, function in FORMS.items():
        y = np.asarray(function(x), np.float64)
        # Along the directions of the polar factor, which leaves out those of singular value 0.
        values = np.linalg.svd(y, compute_uv=False)[: np.linalg.matrix_rank(polar)]
        rows[form] = {
            "distance": float(np.linalg.norm(y - polar) / np.linalg.norm(polar)),
            "singular_values": [float(values.min()), float(values.max())],
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--aspects", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()

    results = {}
    print(f"{'':26}", *[f"{form:>18}" for form in FORMS])
    for aspect in args.aspects:
        for name, spectrum in spectra(args.rows).items():
            rows = measure(*matrix(args.rows, aspect * args.rows, spectrum))
            results[f"{aspect}:1, {name}"] = rows
            print(f"{aspect}:1, {name:21}", *[f"{r['distance']:18.4f}" for r in rows.values()])
    report = {**gpt2.about(), "rows": args.rows, "results": results}
    args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
