"""Exact mode as users meet it: one jitted step, Flax, accumulation, clipping, dropout, donation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mars_optax
from mars_optax import MarsGrads, exact, mars_vr, multi_steps, value_and_grads

OPTIMIZERS = {
    "mars_adamw": lambda **kw: mars_optax.mars_adamw(1e-2, **kw),
    "mars_lion": lambda **kw: mars_optax.mars_lion(1e-3, **kw),
    "mars_shampoo": lambda **kw: mars_optax.mars_shampoo(1e-2, **kw),
    "mars_m": lambda **kw: mars_optax.mars_m(1e-2, **kw),
    "mars_sgdm": lambda **kw: mars_optax.mars_sgdm(1e-1, **kw),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def init_params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "hidden": jax.random.normal(keys[0], (4, 6)) / 2,
        "out": jax.random.normal(keys[1], (6, 3)) / 2,
        "bias": jnp.zeros(3),
    }


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] + params["bias"] - y) ** 2)


def batches(steps, size=8, seed=1):
    key = jax.random.key(seed)
    x = jax.random.normal(key, (steps, size, 4))
    return [(x[t], jnp.sin(x[t][:, :3] + t)) for t in range(steps)]


grad_of_loss = jax.grad(loss_fn)


def by_hand(optimizer, steps, params=None, grad_fn=grad_of_loss):
    """The reference: both gradients taken explicitly, prev_grad passed by keyword."""
    params = params or init_params()
    state, previous = optimizer.init(params), params
    for batch in batches(steps):
        grad, prev_grad = grad_fn(params, batch), grad_fn(previous, batch)
        updates, state = optimizer.update(grad, state, params, prev_grad=prev_grad)
        previous, params = params, optax.apply_updates(params, updates)
    return params


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@every_optimizer
def test_one_jitted_step_with_value_and_grads(make):
    optimizer = make(exact=True, gamma=0.5)
    params = init_params()
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = value_and_grads(loss_fn)(params, batch, state=state)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in batches(5):
        expected_loss = loss_fn(params, batch)
        params, state, loss = step(params, state, batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(params, by_hand(make(exact=True, gamma=0.5), 5))
    assert step._cache_size() == 1


def test_the_correction_uses_the_previous_point_and_this_batch():
    """On a quadratic the pair is known in closed form; a stale batch or point changes it."""
    optimizer = mars_optax.mars_sgdm(0.1, b1=0.5, gamma=1.0, exact=True, clip_norm=None)
    quadratic = lambda x, a: 0.5 * a * jnp.sum(x**2)  # noqa: E731
    x = jnp.ones((1, 1))
    state = optimizer.init(x)
    momentum, previous = 0.0, 1.0
    for a in (1.0, 2.0, 3.0):
        _, grads = value_and_grads(quadratic)(x, a, state=state)
        point = float(x[0, 0])
        np.testing.assert_allclose(grads.grad, a * point)
        np.testing.assert_allclose(grads.prev_grad, a * previous, rtol=1e-6)
        corrected = a * point + 1.0 * (a * point - a * previous)  # k = γ·b1/(1−b1) = 1
        momentum = 0.5 * momentum + 0.5 * corrected
        updates, state = optimizer.update(grads, state, x)
        np.testing.assert_allclose(updates, -0.1 * momentum, rtol=1e-5)
        previous, x = point, x + updates


def test_first_step_has_no_correction():
    plain = mars_optax.mars_adamw(1e-2, gamma=0.0)
    corrected = mars_optax.mars_adamw(1e-2, gamma=0.9, exact=True)
    params, batch = init_params(), batches(1)[0]
    state = corrected.init(params)
    _, grads = value_and_grads(loss_fn)(params, batch, state=state)
    updates, _ = corrected.update(grads, state, params)
    expected, _ = plain.update(grads.grad, plain.init(params), params)
    assert_close(updates, expected)


def test_aux_is_that_of_the_current_point_and_argnums_are_those_of_jax():
    def loss_with_aux(x, w, scale):
        return jnp.sum(x * w) * scale, {"w": w}

    params = jnp.array([1.0, 2.0])
    state = exact(mars_vr(0.1, exact=True)).init(params)._replace(prev_params=jnp.zeros(2))
    x = jnp.array([3.0, 4.0])
    (value, aux), grads = value_and_grads(loss_with_aux, argnums=1, has_aux=True)(
        x, params, scale=2.0, state=state
    )
    assert value == 22.0
    np.testing.assert_array_equal(aux["w"], params)
    np.testing.assert_array_equal(grads.grad, 2.0 * x)

    two = (jnp.array(2.0), jnp.array(3.0))
    state = exact(mars_vr(0.1, exact=True)).init(two)
    state = state._replace(prev_params=(jnp.array(5.0), jnp.array(7.0)))
    _, grads = value_and_grads(lambda a, b: a * b, argnums=(0, 1))(*two, state=state)
    assert jax.tree.map(float, grads.grad) == (3.0, 2.0)
    assert jax.tree.map(float, grads.prev_grad) == (7.0, 5.0)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_correction_on_one_micro_batch_of_n(n):
    """c = g + k (g_S − g⁻_S), S every n-th example, against gradients by hand."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 8)).astype(np.float32)
    x, previous = np.float32(1.5), np.float32(-0.5)

    def loss_with_aux(x, batch, scale):  # ∇ = scale · mean(a x + b)
        return scale * jnp.mean(batch["a"] * x**2 / 2 + batch["b"] * x), batch["a"]

    state = exact(mars_vr(0.1, exact=True)).init(jnp.asarray(x))
    state = state._replace(prev_params=jnp.asarray(previous))
    fn = jax.jit(value_and_grads(loss_with_aux, has_aux=True, micro_batches=n))
    (value, aux), grads = fn(jnp.asarray(x), {"a": a, "b": b}, scale=2.0, state=state)
    np.testing.assert_allclose(value, 2 * np.mean(a * x**2 / 2 + b * x), rtol=1e-5)
    np.testing.assert_array_equal(aux, a.reshape(-1, n).T)
    g, correction = 2 * np.mean(a * x + b), 2 * np.mean(a[::n]) * (x - previous)
    np.testing.assert_allclose(grads.grad, g, rtol=1e-5)
    np.testing.assert_allclose(grads.prev_grad, g - correction, rtol=1e-5)

    optimizer = mars_optax.mars_adamw(1e-2, exact=True, mars_mask=True, gamma=0.5, clip_norm=None)
    params, state = jnp.asarray(x), optimizer.init(jnp.asarray(x))
    state = state._replace(prev_params=jnp.asarray(previous))
    _, state = optimizer.update(grads, state, params)
    (mu,) = optax.tree.get_all_with_path(state, "mu")[0][1:]
    np.testing.assert_allclose(mu, 0.05 * (g + 9.5 * correction), rtol=1e-5)


def test_micro_batches_in_low_precision_are_averaged_in_float32():
    batch = jnp.full(512, 0.1, jnp.bfloat16).at[0].set(100.0)
    params = jnp.ones((), jnp.bfloat16)
    state = exact(mars_vr(0.1, exact=True)).init(params)
    fn = value_and_grads(lambda x, b: (x * jnp.mean(b), 3), has_aux=True, micro_batches=512)
    (value, aux), grads = fn(params, batch, state=state)
    mean = (100 + 511 * float(batch[1])) / 512
    np.testing.assert_allclose([float(value), float(grads.grad)], mean, rtol=2**-8)
    assert grads.grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(aux, 3)


def test_micro_batches_that_do_not_fit_are_errors():
    state = exact(mars_vr(0.1, exact=True)).init(jnp.ones(()))
    loss = lambda x, batch: x * jnp.mean(batch)  # noqa: E731
    with pytest.raises(ValueError, match=r"`micro_batches` is 3.*shape \(8,\).*by keyword"):
        value_and_grads(loss, micro_batches=3)(jnp.ones(()), jnp.ones(8), state=state)
    with pytest.raises(ValueError, match=r"`micro_batches` is 2.*shape \(\)"):
        value_and_grads(loss, micro_batches=2)(jnp.ones(()), 3.0, state=state)
    with pytest.raises(ValueError, match=r"`micro_batches` is 2.*by position"):
        value_and_grads(loss, micro_batches=2)(jnp.ones(()), batch=jnp.ones(8), state=state)
    with pytest.raises(ValueError, match="parameters are missing"):
        value_and_grads(loss)(x=jnp.ones(()), batch=jnp.ones(8), state=state)
    for bad in (0, 2.0):
        with pytest.raises(ValueError, match=rf"`micro_batches`.*{bad}.*at least 1"):
            value_and_grads(loss, micro_batches=bad)


def test_flax_train_state():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]

    def flax_loss(params, apply_fn, batch):
        return jnp.mean((apply_fn({"params": params}, batch[0]) - batch[1]) ** 2)

    tx = mars_optax.mars_adamw(1e-2, gamma=0.5, exact=True)
    train_state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(train_state, batch):
        _, grads = value_and_grads(flax_loss)(
            train_state.params, train_state.apply_fn, batch, state=train_state.opt_state
        )
        return train_state.apply_gradients(grads=grads)

    for batch in batches(4):
        train_state = step(train_state, batch)
    grad_fn = lambda p, b: jax.grad(flax_loss)(p, model.apply, b)  # noqa: E731
    assert_close(train_state.params, by_hand(tx, 4, params, grad_fn))


def test_nnx_optimizer():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    tx = mars_optax.mars_adamw(1e-2, gamma=0.5, exact=True)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    start = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    @nnx.jit
    def step(model, optimizer, batch):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def nnx_loss(params):
            return jnp.mean((nnx.merge(graphdef, params, rest)(batch[0]) - batch[1]) ** 2)

        loss, grads = value_and_grads(nnx_loss)(params, state=optimizer.opt_state)
        optimizer.update(model, grads.grad, prev_grad=grads.prev_grad)
        return loss

    for batch in batches(4):
        step(model, optimizer, batch)

    def pure_loss(params, batch):
        return jnp.mean((batch[0] @ params["kernel"] + params["bias"] - batch[1]) ** 2)

    expected = by_hand(tx, 4, start, jax.grad(pure_loss))
    assert_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected)


@every_optimizer
@pytest.mark.parametrize("by_keyword", [False, True])
def test_multi_steps_equals_the_large_batch(make, by_keyword):
    optimizer = make(exact=True, gamma=0.5)
    accumulated = multi_steps(make(exact=True, gamma=0.5), every_k_schedule=4)
    params = small = init_params()
    state, small_state = optimizer.init(params), accumulated.init(params)
    update, small_update = jax.jit(optimizer.update), jax.jit(accumulated.update)
    for x, y in batches(3, size=8):
        _, grads = value_and_grads(loss_fn)(params, (x, y), state=state)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for i in range(4):
            part = (x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2])
            _, grads = value_and_grads(loss_fn)(small, part, state=small_state)
            if by_keyword:
                updates, small_state = small_update(
                    grads.grad, small_state, small, prev_grad=grads.prev_grad
                )
            else:
                updates, small_state = small_update(grads, small_state, small)
            if i < 3:
                assert all(not jnp.any(u) for u in jax.tree.leaves(updates))
            small = optax.apply_updates(small, updates)
        assert int(small_state.mini_step) == 0
    assert_close(small, params, rtol=1e-4, atol=1e-5)


def test_multi_steps_of_an_approximate_optimizer_is_optax_multi_steps():
    ours = multi_steps(OPTIMIZERS["mars_adamw"](), 2)
    theirs = optax.MultiSteps(OPTIMIZERS["mars_adamw"](), 2)
    params = init_params()
    state, their_state = ours.init(params), theirs.init(params)
    for batch in batches(4):
        grad = jax.grad(loss_fn)(params, batch)
        updates, state = ours.update(grad, state, params)
        their_updates, their_state = theirs.update(grad, their_state, params)
        jax.tree.map(np.testing.assert_array_equal, updates, their_updates)
        params = optax.apply_updates(params, updates)


def test_multi_steps_skips_a_micro_batch_that_is_not_finite_in_either_gradient():
    tx = multi_steps(
        mars_optax.mars_sgdm(0.1, exact=True), 2, should_skip_update_fn=optax.skip_not_finite
    )
    params = {"w": jnp.ones((2, 2))}
    good, bad = {"w": jnp.ones((2, 2))}, {"w": jnp.full((2, 2), jnp.nan)}
    state = tx.init(params)
    _, state = tx.update(MarsGrads(good, good), state, params)
    for pair in (MarsGrads(bad, good), MarsGrads(good, bad)):
        updates, state = tx.update(pair, state, params)
        assert int(state.mini_step) == 1
        np.testing.assert_array_equal(updates["w"], 0.0)
    _, state = tx.update(MarsGrads(good, good), state, params)
    assert int(state.gradient_step) == 1


@pytest.mark.parametrize("jit", [False, True])
def test_a_pair_handed_to_optax_multi_steps_names_multi_steps(jit):
    bare = optax.MultiSteps(mars_optax.mars_adamw(1e-2, exact=True), 2)
    params = init_params()
    state = bare.init(params)
    update = jax.jit(bare.update) if jit else bare.update
    with pytest.raises(ValueError, match=r"mars_optax\.multi_steps instead of optax\.MultiSteps"):
        update(MarsGrads(params, params), state, params)
    assert "silently wrong" in multi_steps.__doc__
    assert "silently wrong" in exact.__doc__


def test_preprocess_clips_each_gradient_by_its_own_norm():
    """A joint clip, or a clip of the current gradient alone, gives other numbers."""
    clip = optax.clip_by_global_norm(1.0)
    tx = exact(mars_vr(0.5, b1=0.5, exact=True, clip_norm=None), preprocess=clip)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    grad = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}  # norm 5
    prev = {"a": jnp.array([0.0, 6.0]), "b": jnp.array([8.0])}  # norm 10
    corrected, _ = tx.update(MarsGrads(grad, prev), tx.init(params), params)
    np.testing.assert_allclose(corrected["a"], [0.6 * 1.5, -0.6 * 0.5], rtol=1e-6)  # k = 0.5
    np.testing.assert_allclose(corrected["b"], [0.8 + 0.5 * (0.8 - 0.8)], rtol=1e-6)
    one_liner = mars_optax.mars_adamw(1e-2, exact=True, preprocess=clip)
    by_parts = mars_optax.mars_adamw(1e-2, exact=True)
    g, p = (clip.update(tree, clip.init(params))[0] for tree in (grad, prev))
    updates, _ = one_liner.update(MarsGrads(grad, prev), one_liner.init(params), params)
    expected, _ = by_parts.update(MarsGrads(g, p), by_parts.init(params), params)
    assert_close(updates, expected)


def test_dropout_has_the_same_mask_at_both_points():
    """At equal points the two gradients are equal only if the random masks are."""

    def dropped(params, key, x):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.sum((x * keep) @ params["hidden"])

    params = init_params()
    state = mars_optax.mars_adamw(1e-2, exact=True).init(params)
    _, grads = value_and_grads(dropped)(params, jax.random.key(3), jnp.ones((5, 4)), state=state)
    jax.tree.map(np.testing.assert_array_equal, grads.grad, grads.prev_grad)
    assert jnp.any(grads.grad["hidden"])


@every_optimizer
@pytest.mark.parametrize("is_exact", [False, True])
def test_everything_can_be_donated(make, is_exact):
    optimizer = make(exact=is_exact)
    params = init_params()
    state = optimizer.init(params)

    def step(params, state, batch):
        if is_exact:
            _, grads = value_and_grads(loss_fn)(params, batch, state=state)
        else:
            grads = jax.grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    donated = jax.jit(step, donate_argnums=(0, 1))
    expected, expected_state = params, state
    for batch in batches(3):
        expected, expected_state = jax.jit(step)(expected, expected_state, batch)
    for batch in batches(3):
        params, state = donated(params, state, batch)
    assert_close(params, expected, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inject_hyperparams(name):
    gamma = lambda count: 0.5 / (count + 1)  # noqa: E731
    injected = optax.inject_hyperparams(getattr(mars_optax, name))(
        learning_rate=1e-2, gamma=gamma, exact=True
    )
    plain = getattr(mars_optax, name)(1e-2, gamma=gamma, exact=True)
    params = init_params()
    state = injected.init(params)

    @jax.jit
    def step(params, state, batch):
        _, grads = value_and_grads(loss_fn)(params, batch, state=state)
        updates, state = injected.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches(3):
        params, state = step(params, state, batch)
    assert_close(params, by_hand(plain, 3))
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    still, _ = step(params, state, batches(1)[0])
    np.testing.assert_allclose(still["hidden"], params["hidden"])


def test_look_ahead_equals_the_wrapper():
    """The authors' script takes the next batch's gradient at the current point, before the step.

    With c_1 = g_1 at the first step (prev_grad = grad) it is the wrapper; the authors' zero
    differs in the first step's correction alone.
    """

    def chain(is_exact):
        return optax.chain(
            mars_vr(0.5, exact=is_exact), optax.scale_by_adam(0.95, 0.99), optax.scale(-1e-2)
        )

    wrapper, bare = exact(chain(True)), chain(True)
    data = batches(6)
    params = expected = init_params()
    state, expected_state = bare.init(params), wrapper.init(params)
    next_prev_grad = jax.grad(loss_fn)(params, data[0])
    for t, batch in enumerate(data):
        _, grads = value_and_grads(loss_fn)(expected, batch, state=expected_state)
        updates, expected_state = wrapper.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)

        grad, prev_grad = jax.grad(loss_fn)(params, batch), next_prev_grad
        if t + 1 < len(data):
            next_prev_grad = jax.grad(loss_fn)(params, data[t + 1])
        updates, state = bare.update(grad, state, params, prev_grad=prev_grad)
        params = optax.apply_updates(params, updates)
        assert_close(params, expected)


BAD = {"nan": jnp.nan, "inf": jnp.inf}


def guarded(composition, make_inner):
    """The ways to put `apply_if_finite` around an exact optimizer."""
    if composition == "inside":
        return exact(optax.apply_if_finite(make_inner(), 5))
    return optax.apply_if_finite(exact(make_inner()), 5)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("which", ["grad", "prev_grad", "both"])
@pytest.mark.parametrize("composition", ["inside", "outside"])
def test_a_non_finite_gradient_loses_exactly_that_step(composition, which, bad):
    def inner():
        return optax.chain(
            mars_vr(0.5, exact=True), optax.scale_by_adam(0.95, 0.99), optax.scale(-1e-2)
        )

    def run(poison_at):
        tx = guarded(composition, inner)
        params = init_params()
        state, previous = tx.init(params), params
        update = jax.jit(tx.update)
        for t, batch in enumerate(batches(5)):
            if t == 2 and poison_at is None:
                continue  # the reference never sees this step
            grad, prev_grad = (jax.grad(loss_fn)(p, batch) for p in (params, previous))
            if t == 2:
                spoil = lambda tree: {**tree, "out": tree["out"].at[1, 1].set(bad)}  # noqa: E731
                grad = spoil(grad) if which in ("grad", "both") else grad
                prev_grad = spoil(prev_grad) if which in ("prev_grad", "both") else prev_grad
            updates, state = update(grad, state, params, prev_grad=prev_grad)
            if t != 2:
                previous = params
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = run(2)
    expected, expected_state = run(None)
    assert_close(params, expected, rtol=1e-6)
    prev_params = [
        mars_optax.previous_iterate._exact_states(s)[0].prev_params for s in (state, expected_state)
    ]
    assert_close(*prev_params, rtol=1e-6)
    if composition == "inside":  # the guard sees and counts it, whichever gradient it was
        assert int(state.inner_state.total_notfinite) == 1


@every_optimizer
@pytest.mark.parametrize("which", ["grad", "prev_grad"])
def test_one_liners_lose_exactly_that_step_too(make, which):
    def run(poison):
        tx = optax.apply_if_finite(make(exact=True), 5)
        params, update, gradient = init_params(), jax.jit(tx.update), jax.jit(grad_of_loss)
        state, previous = tx.init(params), params
        for t, batch in enumerate(batches(4)):
            if t == 2 and not poison:
                continue
            pair = {"grad": gradient(params, batch), "prev_grad": gradient(previous, batch)}
            if t == 2:
                pair[which] = jax.tree.map(lambda g: g.at[0].set(jnp.nan), pair[which])
            updates, state = update(pair["grad"], state, params, prev_grad=pair["prev_grad"])
            if t != 2:
                previous = params
            params = optax.apply_updates(params, updates)
        return params

    assert_close(run(True), run(False), rtol=1e-6)
