"""Work and communication of the compiled updates on a TPU, which is not needed for it."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from benchmarks import hlo

NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the extra `tpu`"
)


@functools.cache
def measured(layers, devices, *names):
    """In a process of its own: libtpu has to be configured before JAX starts."""
    script = """
import json, sys
from benchmarks import tpu_compiler as t
layers, devices, names = json.loads(sys.argv[1])
shapes = t.gpt2.shapes(layers)
optimizers = t.gpt2.optimizers()
print(json.dumps({n: t.measure(optimizers[n], shapes, t.mesh(devices)) for n in names}))
"""
    environment = {**os.environ, "XLA_FLAGS": ""}
    arguments = json.dumps([layers, devices, names])
    output = subprocess.run(
        [sys.executable, "-c", script, arguments],
        env=environment, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return json.loads(output.splitlines()[-1])


@NEEDS_LIBTPU
def test_hbm_bytes_of_the_yardstick_and_of_ours():
    rows = measured(12, 1, "optax.adamw", "mars_adamw", "mars_adamw, no clip")
    of = {name: row["hbm_bytes_per_parameter"] for name, row in rows.items()}
    assert of["optax.adamw"] == pytest.approx(28, abs=0.01)
    # 36 is what has to be read and written, so that each buffer is read once.
    assert 36 <= of["mars_adamw"] <= 36.5
    assert 36 <= of["mars_adamw, no clip"] <= 36.1
    flops = {name: row["flops_per_parameter"] for name, row in rows.items()}
    assert flops["optax.adamw"] == pytest.approx(15, abs=0.01)
    assert flops["mars_adamw"] <= 24


@NEEDS_LIBTPU
@pytest.mark.slow
def test_mars_m_costs_less_than_two_thirds_of_optax():
    """On chip for the most part: all twelve layers at once would move twice as much."""
    row = measured(12, 1, "mars_m, bfloat16")["mars_m, bfloat16"]
    assert row["flops_per_parameter"] <= 11_500
    assert row["hbm_bytes_per_parameter"] <= 50


@NEEDS_LIBTPU
@pytest.mark.slow
def test_mars_m_over_eight_devices():
    """Eight layers, which are an even share for each; 10 % are for the update itself."""
    row = measured(8, 8, "mars_m, bfloat16")["mars_m, bfloat16"]
    assert row["flops_per_parameter"] <= 1.1 * 11_500 / 8
    assert sum(row["collectives"].values()) <= 8 * 3
    # An eighth of the matrices goes to and fro, in bfloat16.
    assert row["collective_bytes_per_parameter"] <= 1.01 * 2 * 2 / 8


# The counter, on a program of a few lines


def test_hbm_bytes():
    text = """HloModule test

%fused (param_0: f32[8,128], param_1: f32[1024]) -> f32[8,128] {
  %param_0 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %param_1 = f32[1024]{0:T(1024)} parameter(1)
  %slice.1 = f32[128]{0:T(128)} slice(%param_1), slice={[0:128]}
  ROOT %add = f32[8,128]{1,0:T(8,128)} add(%param_0, %slice.1)
}

ENTRY %main (a: f32[8,128], b: f32[1024]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %b = f32[1024]{0:T(1024)} parameter(1)
  %copy-start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %copy-done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %slice-start = ((f32[1024]{0:T(1024)}), f32[256]{0:T(256)S(1)}, s32[]{:S(2)}) slice-start(%b), slice={[0:256]}
  %slice-done = f32[256]{0:T(256)S(1)} slice-done(%slice-start)
  ROOT %fusion = f32[8,128]{1,0:T(8,128)} fusion(%copy-done, %b), kind=kLoop, calls=%fused
}
"""  # noqa: E501
    # a is fetched once; 256 and, within the fusion, 128 entries of b; the result is written.
    assert hlo.hbm_bytes(text) == 4 * (8 * 128 + 256 + 128 + 8 * 128)


def test_a_slice_updated_in_place_is_what_is_written():
    text = """HloModule test

%fused (param_0: f32[4,8,128], param_1: f32[8,128]) -> (f32[4,8,128], f32[8,128]) {
  %param_0 = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %param_1 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %constant.1 = s32[] constant(3)
  %constant.2 = s32[] constant(0)
  %add = f32[8,128]{1,0:T(8,128)} add(%param_1, %param_1)
  %bitcast = f32[1,8,128]{2,1,0:T(8,128)} bitcast(%add)
  %update = f32[4,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%param_0, %bitcast, %constant.1, %constant.2, %constant.2)
  ROOT %tuple = (f32[4,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) tuple(%update, %add)
}

ENTRY %main (b: f32[8,128]) -> f32[4,8,128] {
  %b = f32[8,128]{1,0:T(8,128)} parameter(0)
  %buffer = f32[4,8,128]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %fusion = (f32[4,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) fusion(%buffer, %b), kind=kLoop, calls=%fused
  ROOT %stack = f32[4,8,128]{2,1,0:T(8,128)} get-tuple-element(%fusion), index=0
}
"""  # noqa: E501
    # b is read, once; the slice and the sum are written; nobody reads or writes the rest.
    assert hlo.hbm_bytes(text) == 4 * 3 * (8 * 128)


def test_products_in_loops():
    text = """HloModule test

%fused (a: bf16[3,8,16], b: bf16[3,16,32]) -> bf16[3,8,32] {
  %a = bf16[3,8,16]{2,1,0} parameter(0)
  %b = bf16[3,16,32]{2,1,0} parameter(1)
  ROOT %product = bf16[3,8,32]{2,1,0} convolution(%a, %b), window={size=3 stride=2 lhs_dilate=3}, dim_labels=0bf_0io->0bf
}

%body (x: bf16[3,8,16]) -> bf16[3,8,16] {
  %x = bf16[3,8,16]{2,1,0} parameter(0)
  ROOT %fusion = bf16[3,8,32]{2,1,0} fusion(%x, %x), kind=kOutput, calls=%fused
}

%condition (x: bf16[3,8,16]) -> pred[] {
  ROOT %x = pred[] parameter(0)
}

ENTRY %main (x: bf16[3,8,16]) -> bf16[3,8,16] {
  %x = bf16[3,8,16]{2,1,0} parameter(0)
  %once = bf16[3,8,32]{2,1,0} fusion(%x, %x), kind=kOutput, calls=%fused
  ROOT %while = bf16[3,8,16]{2,1,0} while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""  # noqa: E501
    assert hlo.repeated_flops(text) == (5 - 1) * 2 * 3 * 8 * 16 * 32


def test_collectives():
    text = "%x = f32[8] all-gather-start(%a)\n%y = f32[8] all-gather-done(%x)\n%z = all-to-all(%y)"
    assert hlo.collectives(text.replace("= all", "= f32[8] all")) == {
        "all-gather": 1,
        "all-to-all": 1,
    }
