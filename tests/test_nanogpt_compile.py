"""What the compiler's answers mean; with libtpu installed, the answers too."""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import test_nanogpt_train

from benchmarks import hlo
from examples.nanogpt import compile, hardware, model
from examples.nanogpt.config import parse

quick_compilation = test_nanogpt_train.quick_compilation
ROOT = pathlib.Path(__file__).parent.parent
NO_COMPILER = importlib.util.find_spec("libtpu") is None


def ask(*flags):
    return subprocess.run(
        [sys.executable, "-m", "examples.nanogpt.compile", *flags],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=900,
        env={**os.environ, "XLA_FLAGS": ""},
    )


def test_operations_count_loops_as_often_as_they_run():
    w = jnp.ones((8, 8))

    def program(x):
        x, _ = jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x)
        return jax.jit(lambda x: x @ w)(x)

    traced = jax.jit(program).trace(jnp.ones((4, 8)))
    one = 2 * 4 * 8 * 8
    assert hlo.matrix_flops(traced.jaxpr.jaxpr) == (5 + 2 + 1) * one


def test_operations_of_the_model_are_those_of_its_program():
    """Forward and backward pass of a GPT-2 without biases; position and norms have no products.

    The einsum leaves out a quarter of attention's pairs: the first half of T sees half the keys.
    """
    shape = model.GPTConfig(3, 2, 32, context=16, vocab_size=256, bias=False, attention="einsum")
    graphdef, params = model.define(shape)
    tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)
    loss = lambda params, tokens: model.loss(graphdef, params, tokens)  # noqa: E731
    traced = jax.jit(jax.grad(loss)).trace(params, tokens)
    counted = hlo.matrix_flops(traced.jaxpr.jaxpr)
    left_out = 12 * 3 * 32 * 16 / 4
    per_token = hardware.flops_per_token(shape, exact=False) - left_out
    assert counted == pytest.approx(2 * 16 * per_token, rel=1e-6)


MODULE = """\
HloModule step

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %x = f32[8,16]{1,0} parameter(0)
  %ag = f32[64,16]{1,0:T(8,128)} all-gather(%x), channel_id=1, dimensions={0}
  %again = f32[64,16]{1,0:T(8,128)} all-gather(%x), channel_id=1, dimensions={0}
  %rs = f32[1,16]{1,0} reduce-scatter(%x), to_apply=%add
}

%test (t: (s32[], f32[8,16])) -> pred[] {
  %twelve = s32[]{:T(128)} constant(12)
  %t = (s32[], f32[8,16]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %twelve), direction=LT
}

%fused (q: bf16[4,4]) -> bf16[4,4] {
  %q = bf16[4,4]{1,0} parameter(0)
  ROOT %ar.1 = bf16[4,4]{1,0} all-reduce(%q), to_apply=%add
}

ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %w = (s32[], f32[8,16]) while(%a), condition=%test, body=%body
  %f = bf16[4,4]{1,0} fusion(%a), kind=kCustom, calls=%fused
  %start = (f32[8,16]{1,0}, f32[32,16]{1,0}) all-gather-start(%a), dimensions={0}
  %done = f32[32,16]{1,0} all-gather-done(%start)
  ROOT %ar = (f32[8,16]{1,0}, bf16[4,4]{1,0}) all-reduce(%a, %f), to_apply=%add
}
"""


def test_collectives_count_loops_as_often_as_they_run():
    assert hlo.collective_traffic(MODULE) == {
        "all-gather": (13, 12 * 64 * 16 * 4 + 32 * 16 * 4),
        "reduce-scatter": (12, 12 * 8 * 16 * 4),
        "all-reduce": (2, 4 * 4 * 2 + (8 * 16 * 4 + 4 * 4 * 2)),
    }


def test_a_step_compiled_for_the_devices_at_hand():
    """The same code for these eight devices: fsdp must gather parameters and reduce gradients."""
    flags = ["--layers", "1", "--width", "64", "--heads", "2", "--context", "16", "--fsdp", "8"]
    reports = [
        compile.compile_step(parse([*flags, *more, "--optimizer", "adamw"]), jax.devices())
        for more in ([], ["--fsdp", "1"])
    ]
    split, whole = reports
    assert split.parameters == whole.parameters and split.devices == 8
    assert split.flops == whole.flops > whole.model_flops * 0.99
    assert split.argument_bytes < whole.argument_bytes / 8 * 1.1
    assert "all-gather" in split.collectives and "all-gather" not in whole.collectives
    count, size = whole.collectives["all-reduce"]
    assert count and size >= 4 * whole.parameters  # of gradients


@pytest.mark.skipif(not NO_COMPILER, reason="libtpu is installed")
def test_without_the_compiler_there_is_one_clear_line():
    result = ask()
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "error: the TPU compiler is not installed: run `pip install libtpu`" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER, reason="libtpu is not installed")
def test_the_demo_on_eight_tpus():
    result = ask("--topology", "v5e:2x4")
    assert result.returncode == 0, result.stderr
    assert "8 x TPU v5 lite" in result.stdout and "all-gather" in result.stdout
    unknown = ask("--topology", "v5e:banana")
    assert unknown.returncode == 1 and "--topology v5e:banana cannot be asked" in unknown.stderr
    flags = ["--layers", "2", "--micro-batch-size", "64", "--loss-chunk", "0"]
    flags += ["--preset", "small", "--batch-size", "512", "--optimizer", "adamw"]
    large = ask("--topology", "v5e:2x4", *flags)
    assert large.returncode == 1 and "refuses this step: RESOURCE_EXHAUSTED" in large.stderr


@functools.cache
def gpt2_small_on_eight_tpus(*more):
    flags = ["--preset", "small", "--optimizer", "mars_adamw", "--dtype", "bfloat16"]
    result = ask("--topology", "v5e:2x4", *flags, "--batch-size", "32", "--json", *more)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER, reason="libtpu is not installed")
def test_exact_mode_holds_the_activations_of_one_gradient_at_a_time():
    exact = gpt2_small_on_eight_tpus("--exact")["peak_bytes"]
    assert exact <= 1.02 * gpt2_small_on_eight_tpus()["peak_bytes"]  # 1.04 where they overlap


@pytest.mark.skipif(NO_COMPILER, reason="libtpu is not installed")
def test_gpt2_small_on_eight_tpus():
    report = gpt2_small_on_eight_tpus()
    parameters = 768 * (50304 + 1024 + 12 * 12 * 768 + 12 * 2 + 1)
    assert report["parameters"] == parameters and report["devices"] == 8
    # An eighth of parameters, last gradient and Adam's moments, and the batch.
    assert report["argument_bytes"] == pytest.approx(4 * 4 * parameters / 8, rel=0.01)
    assert report["peak_bytes"] <= report["device_bytes"] == 16 * 2**30
    assert report["flops"] >= 0.99 * report["model_flops"]
    # Weights are gathered, in bfloat16, and gradients reduced.
    assert report["collectives"]["all-gather"][1] >= 2 * parameters
    assert report["collectives"]["all-reduce"][1] >= 2 * parameters
