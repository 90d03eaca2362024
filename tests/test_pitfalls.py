"""What existing MARS code got wrong, one test each, in the order of the project's list."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax import MarsGrads, exact, mars_vr

OPTIMIZERS = {
    name: getattr(mars_optax, name)
    for name in ("mars_adamw", "mars_lion", "mars_shampoo", "mars_m", "mars_sgdm")
}
every_optimizer = pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)


def random_tree(seed, scale=1.0):
    a, b = jax.random.split(jax.random.key(seed))
    return {
        "w": scale * jax.random.normal(a, (4, 6)),
        "b": scale * jax.random.normal(b, (6,)),
    }


def run(optimizer, grads, params=None):
    params = params if params is not None else random_tree(0)
    state = optimizer.init(params)
    for grad in grads:
        updates, state = optimizer.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_pitfall_01_clip_is_per_tensor_and_on_the_corrected_gradient():
    vr = mars_vr(0.5, b1=0.5, clip_norm=1.0)  # k = 0.5, and 0 before the first gradient
    grad = {"large": jnp.array([3.0, 4.0]), "small": jnp.array([0.1, 0.2])}
    out, state = vr.update(grad, vr.init(grad))
    np.testing.assert_allclose(out["large"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(out["small"], [0.15, 0.3], rtol=1e-6)  # its own norm is below 1
    out, _ = vr.update({"large": jnp.array([0.3, 0.4]), "small": jnp.array([0.1, 0.2])}, state)
    corrected = np.array([0.3, 0.4]) + 0.5 * (np.array([0.3, 0.4]) - np.array([3.0, 4.0]))
    np.testing.assert_allclose(out["large"], corrected / np.linalg.norm(corrected), rtol=1e-6)

    joint = mars_vr(0.5, b1=0.5, clip_norm=1.0, clip_scope="global")
    out, _ = joint.update(grad, joint.init(grad))
    norm = 1.5 * np.sqrt(25 + 0.05)
    np.testing.assert_allclose(out["small"], np.array([0.15, 0.3]) / norm, rtol=1e-6)


def test_pitfall_02_both_moments_come_from_the_clipped_gradient_and_decay_is_decoupled():
    params = jnp.full((2, 2), 3.0)
    grad = jnp.full((2, 2), 100.0)
    optimizer = mars_optax.mars_adamw(0.1, weight_decay=0.5)
    updates, state = optimizer.update(grad, optimizer.init(params), params)
    (adam,) = [
        s
        for s in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
        if isinstance(s, optax.ScaleByAdamState) and jax.tree.leaves(s.mu)
    ]
    np.testing.assert_allclose(jnp.linalg.norm(adam.mu), 0.05, rtol=1e-6)
    np.testing.assert_allclose(adam.nu, 0.01 * 0.25, rtol=1e-6)
    np.testing.assert_allclose(updates, -0.1 * (1 + 0.5 * 3.0), rtol=1e-6)


@every_optimizer
def test_pitfall_03_the_correction_changes_the_result(factory):
    """The recursion of a rejected pull request gives the plain gradient back."""
    grads = [random_tree(1, 0.1), random_tree(2, 0.1), random_tree(3, 0.1)]
    plain, _ = run(factory(1e-2, gamma=0.0), grads)
    corrected, _ = run(factory(1e-2, gamma=0.5), grads)
    travelled = jnp.linalg.norm(plain["w"] - random_tree(0)["w"])
    assert jnp.linalg.norm(plain["w"] - corrected["w"]) > 0.05 * travelled


def test_pitfall_04_last_grad_is_the_gradient_not_the_corrected_one():
    vr = mars_vr(0.5)
    state = vr.init(random_tree(0))
    for seed in (1, 2):
        grad = random_tree(seed, 10.0)
        _, state = vr.update(grad, state)
        jax.tree.map(np.testing.assert_array_equal, state.last_grad, grad)


@every_optimizer
def test_pitfall_05_defaults_run(factory):
    params, _ = run(factory(1e-2), [random_tree(1), random_tree(2)])
    assert all(jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(params))


@every_optimizer
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_pitfall_06_low_precision_keeps_dtypes_and_zero_gradients_give_no_nan(factory, dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), random_tree(0))
    optimizer = factory(1e-2, weight_decay=0.0, adam_weight_decay=0.0)

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (after, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=3)
    jax.tree.map(np.testing.assert_array_equal, after, params)

    injected = optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(learning_rate=1e-2)
    state = injected.init(params)
    updates, new_state = jax.jit(injected.update)(params, state, params)
    dtypes = functools.partial(jax.tree.map, lambda x: x.dtype)
    assert dtypes(updates) == dtypes(params)
    assert dtypes(new_state.inner_state) == dtypes(state.inner_state)


@every_optimizer
def test_pitfall_07_a_missing_previous_gradient_is_an_error(factory):
    optimizer = factory(1e-2, exact=True)
    params = random_tree(0)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"`prev_grad` is missing.*value_and_grads"):
        optimizer.update(random_tree(1), state, params)
    with pytest.raises(ValueError, match="`prev_grad` is missing"):
        mars_vr(exact=True).update(params, mars_vr(exact=True).init(params))


def test_pitfall_07_a_pair_is_never_clipped_jointly_by_preprocess():
    transformation = exact(mars_vr(exact=True), preprocess=optax.clip_by_global_norm(1.0))
    one = {"w": jnp.array([[1.0]])}
    out, _ = transformation.update(MarsGrads(one, one), transformation.init(one), one)
    np.testing.assert_allclose(out["w"], 1.0)  # a joint norm of √2 would give 0.707
    for documentation in (mars_optax.exact.__doc__, guide("exact-and-approximate.md")):
        assert "joint norm" in documentation


def guide(page):
    return (pathlib.Path(__file__).parent.parent / "docs" / page).read_text()


def test_pitfall_08_prev_grad_is_masked_like_the_gradients():
    params = random_tree(0)
    grad, prev = random_tree(1, 0.1), random_tree(2, 0.1)
    expected = jax.tree.map(lambda g, p: g + 0.5 * 19.0 * (g - p), grad, prev)
    for wrap in (
        lambda vr: optax.masked(vr, {"w": True, "b": False}),
        lambda vr: optax.partition({"vr": vr, "rest": optax.identity()}, {"w": "vr", "b": "rest"}),
    ):
        tx = wrap(mars_vr(0.5, exact=True, clip_norm=None))
        out, _ = tx.update(grad, tx.init(params), params, prev_grad=prev)
        np.testing.assert_allclose(out["w"], expected["w"], rtol=1e-5)
        np.testing.assert_array_equal(out["b"], grad["b"])


def test_pitfall_08_an_exact_wrapper_inside_a_mask_is_an_error_for_value_and_grads():
    params = random_tree(0)
    tx = optax.masked(exact(mars_vr(exact=True)), {"w": True, "b": False})
    state = tx.init(params)
    with pytest.raises(ValueError, match="outermost"):
        mars_optax.value_and_grads(lambda p: jnp.sum(p["w"]))(params, state=state)


@every_optimizer
@pytest.mark.parametrize("is_exact", [False, True])
def test_pitfall_09_the_first_state_aliases_no_parameter(factory, is_exact):
    params = random_tree(0)
    state = factory(1e-2, exact=is_exact).init(params)
    pointers = {p.unsafe_buffer_pointer() for p in jax.tree.leaves(params)}
    assert not pointers & {s.unsafe_buffer_pointer() for s in jax.tree.leaves(state)}


def specs_of(mapped, state):
    """The mapped leaves where the state has an array: a masked leaf got a spec too."""
    has_array = jax.tree.map(
        lambda x: not isinstance(x, optax.MaskedNode),
        state,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    pairs = zip(jax.tree.leaves(has_array), jax.tree.leaves(mapped), strict=True)
    return [spec for has, spec in pairs if has]


@every_optimizer
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_pitfall_10_map_params_jitted_and_abstract_init(factory, is_exact, accumulate):
    params = random_tree(0)
    optimizer = factory(1e-2, exact=is_exact)
    optimizer = mars_optax.multi_steps(optimizer, 2) if accumulate else optimizer
    state = optimizer.init(params)
    specs = {"w": "spec of w", "b": "spec of b"}
    mapped = optax.tree.map_params(
        optimizer,
        lambda leaf, spec: spec,
        state,
        specs,
        transform_non_params=lambda _: "replicated",
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )

    expected = {(4, 6): "spec of w", (6,): "spec of b", (): "replicated"}
    for leaf, spec in zip(jax.tree.leaves(state), specs_of(mapped, state), strict=True):
        assert spec == expected[leaf.shape]

    shapes = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert shapes(jax.eval_shape(optimizer.init, params)) == shapes(state)
    assert shapes(jax.jit(optimizer.init)(params)) == shapes(state)
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    assert shapes(optimizer.init(abstract)) == shapes(state)


def test_pitfall_11_chain_of_vr_and_apply_if_finite_loses_one_step_not_two():
    def optimizer():
        return optax.chain(
            mars_vr(0.5),
            optax.apply_if_finite(optax.chain(optax.scale_by_adam(), optax.scale(-1e-2)), 5),
        )

    grads = [random_tree(s, 0.1) for s in (1, 2, 3, 4)]
    without, _ = run(optimizer(), [*grads[:2], grads[3]])
    for spoilt in (["w"], ["w", "b"]):
        bad = grads[2] | {name: grads[2][name].at[0].set(jnp.nan) for name in spoilt}
        with_bad, state = run(optimizer(), [*grads[:2], bad, grads[3]])
        assert int(state[1].total_notfinite) == 1
        # A tensor that was finite goes on from its gradient of the lost step.
        for name in spoilt:
            np.testing.assert_allclose(with_bad[name], without[name], rtol=1e-6)
        assert jnp.all(jnp.isfinite(with_bad["b"]))


@every_optimizer
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_pitfall_11_apply_if_finite_around_all_loses_exactly_that_step(factory, bad):
    grads = [random_tree(s, 0.1) for s in (1, 2, 3, 4)]
    spoilt = {"w": grads[2]["w"].at[0, 0].set(bad), "b": grads[2]["b"]}
    guarded = lambda: optax.apply_if_finite(factory(1e-2, gamma=0.5), 5)  # noqa: E731
    with_bad, _ = run(guarded(), [*grads[:2], spoilt, grads[3]])
    without, _ = run(guarded(), [*grads[:2], grads[3]])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), with_bad, without)


def test_pitfall_11_a_gradient_too_large_for_its_store_is_not_stored():
    vr = mars_vr(0.5, grad_dtype=jnp.float16)
    state = vr.init(jnp.zeros(2))
    _, state = vr.update(jnp.array([1.0, 2.0]), state)
    _, state = vr.update(jnp.array([1e6, 2.0]), state)  # finite in float32, infinite in float16
    np.testing.assert_array_equal(state.last_grad, [1.0, 2.0])


@every_optimizer
def test_pitfall_12_stacked_biases_are_no_matrices_and_stacked_kernels_are(factory):
    numbers = {"w": MuonDimensionNumbers(1, 2), "b": None}
    layers = [random_tree(s) for s in (1, 2, 3)]
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    grads = [[random_tree(10 * t + i, 3.0**i / 3) for i in range(3)] for t in (1, 2, 3)]
    optimizer = factory(1e-2, gamma=0.5, weight_dimension_numbers=numbers)
    stacked, _ = run(optimizer, [stack(g) for g in grads], stack(layers))
    for i, layer in enumerate(layers):
        alone, _ = run(factory(1e-2, gamma=0.5), [g[i] for g in grads], layer)
        for name in ("w", "b"):
            np.testing.assert_allclose(stacked[name][i], alone[name], rtol=1e-6, atol=1e-6)


def test_pitfall_12_the_fallback_honours_the_decay_mask_and_has_no_nesterov():
    params = random_tree(0)
    grads = [random_tree(1), random_tree(2)]
    masked = mars_optax.mars_m(1e-2, weight_decay_mask={"w": True, "b": False})
    ours, _ = run(masked, grads)
    expected, _ = run(optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0), grads)
    np.testing.assert_allclose(ours["b"], expected["b"], rtol=1e-6)
    decayed, _ = run(mars_optax.mars_m(1e-2), grads)
    expected, _ = run(optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1), grads)
    np.testing.assert_allclose(decayed["b"], expected["b"], rtol=1e-6)
    callable_mask = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)  # noqa: E731
    by_callable, _ = run(mars_optax.mars_m(1e-2, weight_decay_mask=callable_mask), grads)
    jax.tree.map(np.testing.assert_array_equal, by_callable, ours)
    assert not np.allclose(decayed["b"], params["b"])


@every_optimizer
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("spec", [("x", None), (None, "x")])
def test_pitfall_13_explicit_meshes_take_sharded_matrices(factory, is_exact, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = {
        "w": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)),
        "b": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")),
    }
    optimizer = factory(1e-2, exact=is_exact)
    params, grad = random_tree(0), random_tree(1)
    as_updates = lambda g: MarsGrads(g, g) if is_exact else g  # noqa: E731
    expected, expected_state = optimizer.update(as_updates(grad), optimizer.init(params), params)
    with jax.set_mesh(mesh):
        params, grad = (jax.device_put(tree, sharding) for tree in (params, grad))
        state = jax.jit(optimizer.init)(params)
        updates, new_state = jax.jit(optimizer.update)(as_updates(grad), state, params)
        assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, state)
        assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)
    for got, want in ((updates, expected), (new_state, expected_state)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_pitfall_14_the_fallback_rate_follows_its_schedule_and_decay_and_zero_rates_work():
    params = {"b": jnp.array([1.0, -1.0])}
    grads = [{"b": jnp.array([0.1, -0.2])}, {"b": jnp.array([0.3, 0.4])}]
    rate = lambda count: jnp.where(count == 0, 6e-3, 3e-3)  # noqa: E731
    half = lambda count: rate(count) / 2  # noqa: E731
    optimizer = mars_optax.mars_adamw(rate, adam_learning_rate=half, adam_weight_decay=0.1)
    state = optimizer.init(params)
    points = []
    for grad in grads:
        updates, state = optimizer.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        points.append(params["b"])
    np.testing.assert_allclose(points[0], [0.9967000003, -0.99670000015], rtol=1e-6)
    np.testing.assert_allclose(points[1], [0.995187457151, -0.997095556059], rtol=1e-6)
    still, _ = run(mars_optax.mars_adamw(0.0), [random_tree(1)])
    jax.tree.map(np.testing.assert_array_equal, still, random_tree(0))


def test_pitfall_14_gamma_follows_its_schedule():
    vr = mars_vr(lambda count: jnp.array([0.0, 0.5, 0.1])[count], b1=0.5, clip_norm=None)
    state = vr.init(jnp.zeros(1))
    outs = []
    for g in (1.0, 2.0, 4.0):
        out, state = vr.update(jnp.array([g]), state)
        outs.append(float(out[0]))
    np.testing.assert_allclose(outs, [1.0, 2.0 + 0.5 * 1.0, 4.0 + 0.1 * 2.0], rtol=1e-6)


@every_optimizer
def test_pitfall_15_callable_masks_are_static_args_of_inject_hyperparams(factory):
    mask = lambda p: jax.tree.map(lambda x: x.ndim == 2, p)  # noqa: E731
    injected = optax.inject_hyperparams(factory, static_args=("mars_mask",))(
        learning_rate=1e-2, mars_mask=mask
    )
    ours, _ = run(injected, [random_tree(1), random_tree(2)])
    expected, _ = run(factory(1e-2), [random_tree(1), random_tree(2)])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, expected)
    assert "static_args" in guide("training-loops.md")


@every_optimizer
@pytest.mark.parametrize("is_exact", [False, True])
def test_pitfall_16_unknown_extra_arguments_pass(factory, is_exact):
    optimizer = factory(1e-2, exact=is_exact)
    params, grad = random_tree(0), random_tree(1)
    updates = MarsGrads(grad, grad) if is_exact else grad
    extra = {"value": jnp.array(1.0), "of_the_params_structure": params}
    with_extra, _ = optimizer.update(updates, optimizer.init(params), params, **extra)
    without, _ = optimizer.update(updates, optimizer.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, with_extra, without)


@every_optimizer
def test_schedules_do_not_recompile(factory):
    schedule = optax.linear_schedule(1e-2, 1e-3, 10)
    optimizer = factory(schedule, gamma=schedule, adam_learning_rate=schedule)
    params = random_tree(0)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for seed in range(1, 5):
        updates, state = update(random_tree(seed), state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1
