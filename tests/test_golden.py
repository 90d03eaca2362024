"""Trajectories of the authors' PyTorch optimizers (data/README.md tells how they were made)."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import mars_optax

DATA = pathlib.Path(__file__).parent / "data"
CASES = json.loads((DATA / "cases.json").read_text())
PROBLEM = np.load(DATA / "problem.npz")
# PyTorch's matrices are (out, in).
TORCH_MATRIX = MuonDimensionNumbers(reduction_axis=1, output_axis=0)
FACTORIES = {
    "mars-adamw": mars_optax.mars_adamw,
    "mars-lion": mars_optax.mars_lion,
    "mars-shampoo": mars_optax.mars_shampoo,
}


def learning_rate(dtype):
    rates = jnp.asarray(PROBLEM["lr"].astype(np.float64), dtype)
    return lambda count: rates[count]


def build(case, dtype):
    """The optimizer of a golden case, in the words of this library."""
    settings = dict(case["settings"])
    kind = settings.pop("optimizer")
    names = case["params"]
    numbers = {n: TORCH_MATRIX if PROBLEM[f"x0/{n}"].ndim == 2 else None for n in names}
    common = {"exact": case["exact"], "weight_dimension_numbers": numbers}
    if kind == "MARS":
        if settings.pop("optimize_1d", False):
            common["mars_mask"] = True
        factory = FACTORIES[settings.pop("mars_type", "mars-adamw")]
        return factory(learning_rate(dtype), **common, **settings)
    if kind == "MARS_M_Efficient":  # the authors' variant with one buffer leaves out the clip
        common["clip_norm"] = None
    if case["orthogonalization_dtype"] == "bfloat16":
        common["ns_dtype"] = jnp.bfloat16
    return mars_optax.mars_m(
        learning_rate(dtype),
        b1=settings.pop("momentum"),
        weight_decay=settings.pop("wd"),
        **common,
        **settings,
    )


def trajectory(case, dtype, steps=12):
    names = case["params"]
    get = lambda kind, n: jnp.asarray(PROBLEM[f"{kind}/{n}"].astype(np.float64), dtype)  # noqa: E731
    grad = lambda x, t: {n: get("a", n)[t] * x[n] + get("b", n)[t] for n in names}  # noqa: E731
    optimizer = build(case, dtype)
    params = {n: get("x0", n) for n in names}
    state = optimizer.init(params)
    previous = params
    update = jax.jit(optimizer.update)
    points = []
    for t in range(steps):
        grads = grad(params, t)
        extra = {}
        if case["exact"]:  # the authors start from a previous gradient of zero
            at_previous = grad(previous, t) if t else jax.tree.map(jnp.zeros_like, grads)
            extra["prev_grad"] = at_previous
        updates, state = update(grads, state, params, **extra)
        previous, params = params, optax.apply_updates(params, updates)
        points.append(params)
    return {n: np.stack([p[n] for p in points]) for n in names}


def float64_tolerance(case):
    return 1e-7 if case["orthogonalization_dtype"] else 1e-12


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n]["dtype"] == "float64"])
def test_float64(name):
    with jax.enable_x64(True):
        ours = trajectory(CASES[name], jnp.float64)
    golden = np.load(DATA / f"{name}.npz")
    for n in CASES[name]["params"]:
        assert ours[n].dtype == np.float64
        np.testing.assert_allclose(
            ours[n], golden[n], rtol=0, atol=float64_tolerance(CASES[name]), err_msg=n
        )


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n]["dtype"] == "float64"])
def test_float32(name):
    ours = trajectory(CASES[name], jnp.float32)
    golden = np.load(DATA / f"{name}.npz")
    for n in CASES[name]["params"]:
        np.testing.assert_allclose(ours[n], golden[n], rtol=1e-6, atol=1e-6, err_msg=n)


def test_bfloat16_orthogonalization_within_two_percent_of_an_update():
    case = CASES["mars_m_bf16"]
    ours = trajectory(case, jnp.float32)
    golden = np.load(DATA / "mars_m_bf16.npz")
    for n in case["params"]:
        start = PROBLEM[f"x0/{n}"][None]
        steps = np.diff(np.concatenate([start, golden[n]]), axis=0)
        our_steps = np.diff(np.concatenate([start, ours[n]]), axis=0)
        size = np.linalg.norm(steps, axis=(1, 2))
        error = np.linalg.norm(our_steps - steps, axis=(1, 2))
        np.testing.assert_array_less(error, 2e-2 * size, err_msg=n)
