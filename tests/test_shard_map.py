"""Inside `jax.shard_map`, where devices hold parameters of their own beside shared ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mars_optax
from mars_optax import mars_vr, value_and_grads

OPTIMIZERS = {
    "vr": mars_vr(0.1, 0.9),
    "vr, no clip": mars_vr(0.1, 0.9, clip_norm=None),
    "vr, bfloat16": mars_vr(0.1, 0.9, grad_dtype=jnp.bfloat16),
    "adamw": mars_optax.mars_adamw(0.1),
    "lion": mars_optax.mars_lion(0.1),
    "lion, no clip": mars_optax.mars_lion(0.1, clip_norm=None),
}
MESH = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
SPECS = {"own": P("d"), "shared": P()}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {
        "own": jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32),  # a matrix for each device
        "shared": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
    }


def of_device(tree, i):
    return {**tree, "own": tree["own"][i]}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_devices_with_own_and_shared_parameters(name):
    optimizer = OPTIMIZERS[name]
    params, grads = random_tree(0), [random_tree(seed) for seed in (1, 2)]

    def train(params, grads):
        state = optimizer.init(params)
        for g in grads:
            updates, state = optimizer.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params

    @jax.jit
    @lambda f: jax.shard_map(f, mesh=MESH, in_specs=(SPECS, [SPECS] * 2), out_specs=SPECS)
    def on_devices(params, grads):
        found = train(of_device(params, 0), [of_device(g, 0) for g in grads])
        return {**found, "own": found["own"][None]}

    found = on_devices(params, grads)
    for i in range(2):
        alone = jax.jit(train)(of_device(params, i), [of_device(g, i) for g in grads])
        np.testing.assert_allclose(found["own"][i], alone["own"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["shared"], alone["shared"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_own_gradients_beside_a_shared_state(clip_norm):
    vr = mars_vr(0.1, 0.9, clip_norm=clip_norm)
    last, grads = random_tree(0)["shared"], random_tree(1)["own"]
    _, state = vr.update(last, vr.init(last))

    @jax.jit
    @lambda f: jax.shard_map(f, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"))
    def on_devices(grads, state):
        return vr.update(grads[0], state)[0][None]

    found = on_devices(grads, state)
    for i in range(2):
        np.testing.assert_allclose(found[i], vr.update(grads[i], state)[0], rtol=1e-5)


def test_pairs_of_gradients_of_own_and_shared_parameters():
    params, earlier = random_tree(0), random_tree(1)
    optimizer = mars_optax.mars_adamw(0.1, exact=True)

    def loss_fn(params):
        return jnp.sum((params["own"] * params["shared"]) ** 2)

    @jax.jit
    @lambda f: jax.shard_map(f, mesh=MESH, in_specs=(SPECS, SPECS), out_specs=(SPECS, SPECS))
    def pair(params, earlier):
        return tuple(value_and_grads(loss_fn)(params, state=optimizer.init(earlier))[1])

    for found, at in zip(pair(params, earlier), (params, earlier), strict=True):
        expected = jax.grad(loss_fn)(at)  # summed over the devices where parameters are shared
        for key in SPECS:
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-5)


@pytest.mark.parametrize("factory", [mars_optax.mars_adamw, mars_optax.mars_m])
def test_exact_optimizers_of_own_parameters(factory):
    optimizer = factory(0.1, exact=True)
    params, grads, earlier = (random_tree(seed)["own"] for seed in range(3))

    def update(params, grads, earlier):
        state = optimizer.init(params)
        return optimizer.update(mars_optax.MarsGrads(grads, earlier), state, params)[0]

    @jax.jit
    @lambda f: jax.shard_map(f, mesh=MESH, in_specs=(P("d"),) * 3, out_specs=P("d"))
    def on_devices(*trees):
        return update(*(tree[0] for tree in trees))[None]

    found = on_devices(params, grads, earlier)
    for i in range(2):
        alone = update(params[i], grads[i], earlier[i])
        np.testing.assert_allclose(found[i], alone, rtol=1e-4, atol=1e-6)
