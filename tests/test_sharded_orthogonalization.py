"""Over a mesh each device orthogonalizes its share: results, work, communication, shardings."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from benchmarks import hlo
from mars_optax import orthogonalization, orthogonalize, scale_by_orthogonalization

MODES = pytest.mark.parametrize(
    "mode", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
SHAPES = {"up": (16, 64), "down": (64, 16), "out": (32, 32)}
LAYOUTS = {
    "replicated": ((8,), ("fsdp",), lambda shape: P()),
    "fsdp": ((8,), ("fsdp",), lambda shape: P("fsdp", None) if shape[0] > 16 else P(None, "fsdp")),
    "rows": ((8,), ("fsdp",), lambda shape: P("fsdp", None)),
    "fsdp and tensor": ((4, 2), ("fsdp", "tensor"), lambda shape: P("fsdp", "tensor")),
    "data and fsdp": ((2, 4), ("data", "fsdp"), lambda shape: P("fsdp", None)),
}
COLLECTIVE = re.compile(
    r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
)
TRANSFORMATION = scale_by_orthogonalization(shape_factor="rms")


def update(updates):
    return TRANSFORMATION.update(updates, optax.EmptyState())[0]


def random(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_tree(layers):
    return {
        f"{name}_{i}": random(shape, 10 * i + len(name))
        for i in range(layers)
        for name, shape in SHAPES.items()
    }


def make_mesh(layout, mode):
    sizes, names, _ = LAYOUTS[layout]
    return jax.make_mesh(sizes, names, axis_types=(mode,) * len(names))


def put(tree, mesh, spec):
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, spec(x.shape)), tree)
    return jax.device_put(tree, shardings), shardings


def compiled(f, tree, mesh, spec, mode):
    """With automatic axes, outputs are asked for; explicit ones must follow from the inputs."""
    arrays, shardings = put(tree, mesh, spec)
    jitted = jax.jit(f, out_shardings=shardings if mode == AxisType.Auto else None)
    return jitted.lower(arrays).compile(), arrays, shardings


@MODES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [8, 3])
def test_shares(mode, layout, layers):
    """8 layers divide by the devices; 3, which are 6 and 3 matrices, do not."""
    tree = random_tree(layers)
    alone = jax.jit(update).lower(tree).compile()
    mesh = make_mesh(layout, mode)
    with jax.set_mesh(mesh):
        program, arrays, shardings = compiled(update, tree, mesh, LAYOUTS[layout][2], mode)
        ours = program(arrays)
    for name, expected in alone(tree).items():
        assert ours[name].sharding.is_equivalent_to(shardings[name], 2)
        np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-5, err_msg=name)
    counts = collections.Counter(COLLECTIVE.findall(program.as_text()))
    assert counts.total() <= 8 * 2, counts  # two distinct shapes
    if layers == 8:
        assert hlo.flops(program) <= 1.1 * hlo.flops(alone) / 8


@MODES
def test_stack_whose_layers_are_sharded_needs_no_communication(mode):
    numbers = MuonDimensionNumbers(1, 2)
    mesh = make_mesh("fsdp", mode)
    x = random((16, 8, 24), 0)
    with jax.set_mesh(mesh):
        f = lambda x: orthogonalize(x, dimension_numbers=numbers)  # noqa: E731
        program, array, _ = compiled(f, x, mesh, lambda _: P("fsdp"), mode)
        ours = program(array)
    assert not COLLECTIVE.findall(program.as_text())
    expected = orthogonalize(jnp.asarray(x), dimension_numbers=numbers)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_without_a_mesh_in_the_context_layers_stay_where_they_are(monkeypatch):
    """Taken in parts they would all be gathered."""
    monkeypatch.setattr(orthogonalization, "_PART", 1)
    x = random((16, 8, 24), 0)
    f = lambda x: orthogonalize(x, dimension_numbers=MuonDimensionNumbers(1, 2))  # noqa: E731
    mesh = make_mesh("fsdp", AxisType.Auto)
    program, array, _ = compiled(f, x, mesh, lambda _: P("fsdp"), AxisType.Auto)
    assert not COLLECTIVE.findall(program.as_text())
    np.testing.assert_allclose(program(array), f(jnp.asarray(x)), rtol=0, atol=1e-5)


@MODES
def test_attention_kernels_sharded_over_heads(mode):
    numbers = MuonDimensionNumbers(0, (1, 2))
    mesh = make_mesh("fsdp and tensor", mode)
    x = random((6, 4, 8), 1)
    with jax.set_mesh(mesh):
        f = lambda x: orthogonalize(x, dimension_numbers=numbers)  # noqa: E731
        program, array, sharding = compiled(f, x, mesh, lambda _: P(None, "tensor"), mode)
        ours = program(array)
    assert ours.sharding.is_equivalent_to(sharding, 3)
    expected = orthogonalize(jnp.asarray(x), dimension_numbers=numbers)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


@MODES
def test_without_jit(mode):
    tree = {"w": random((8, 16), 2), "v": random((16, 8), 3)}
    mesh = make_mesh("fsdp", mode)
    with jax.set_mesh(mesh):
        ours = update(put(tree, mesh, lambda shape: P("fsdp", None))[0])
    for name, expected in update(jax.tree.map(jnp.asarray, tree)).items():
        np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-5)


def test_explicit_updates_without_a_mesh_in_the_context():
    mesh = make_mesh("fsdp", AxisType.Explicit)
    tree = {"w": random((8, 16), 4)}
    ours = jax.jit(update)(put(tree, mesh, lambda shape: P("fsdp", None))[0])
    assert ours["w"].sharding.spec == P("fsdp", None)
    np.testing.assert_allclose(ours["w"], update(tree)["w"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("part", [1, orthogonalization._PART], ids=["in parts", "whole"])
def test_inside_shard_map_each_device_has_its_own(part, monkeypatch):
    mesh = make_mesh("fsdp", AxisType.Auto)
    x = random((16, 4, 12), 5)
    f = lambda x: orthogonalize(x, dimension_numbers=MuonDimensionNumbers(1, 2))  # noqa: E731
    expected = f(jnp.asarray(x))
    monkeypatch.setattr(orthogonalization, "_PART", part)
    with jax.set_mesh(mesh):
        local = jax.shard_map(f, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
        ours = jax.jit(local)(x)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_stacks_move_in_the_narrower_dtype():
    """The CPU's compiler widens what it sends, so that the program says it, not the result."""
    narrow = scale_by_orthogonalization(ns_dtype=jnp.bfloat16)
    with jax.set_mesh(make_mesh("fsdp", AxisType.Auto)):
        program = jax.make_jaxpr(lambda u: narrow.update(u, optax.EmptyState())[0])(random_tree(8))
    moved = [e for e in program.eqns if e.primitive.name == "sharding_constraint"]
    assert moved and all(e.invars[0].aval.dtype == jnp.bfloat16 for e in moved)


@MODES
def test_mars_m_step(mode):
    """Parameters and states keep their shardings, values are one device's."""
    params, grads = random_tree(2), random_tree(3)
    grads = {n: grads[n] for n in params}
    optimizer = mars_optax.mars_m(0.1)

    def step(params, grads):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    expected = jax.jit(step)(params, grads)
    mesh = make_mesh("fsdp", mode)
    spec = LAYOUTS["fsdp"][2]
    with jax.set_mesh(mesh):
        arrays, shardings = put(params, mesh, spec)
        out = shardings if mode == AxisType.Auto else None
        ours = jax.jit(step, out_shardings=out)(arrays, put(grads, mesh, spec)[0])
    for name in params:
        assert ours[name].sharding.is_equivalent_to(shardings[name], 2)
        np.testing.assert_allclose(ours[name], expected[name], rtol=0, atol=1e-5)
