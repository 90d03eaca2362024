"""Bad input: each error names the argument, the value and the remedy, and nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax import MarsGrads, exact, mars_vr, multi_steps, orthogonalize, value_and_grads

OPTIMIZERS = {
    name: getattr(mars_optax, name)
    for name in ("mars_adamw", "mars_lion", "mars_shampoo", "mars_m", "mars_sgdm")
}
every_optimizer = pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}

BAD_ARGUMENTS = {
    "b1 of one": ({"b1": 1.0}, ValueError, r"`b1`.*1\.0.*\[0, 1\)"),
    "negative b1": ({"b1": -0.1}, ValueError, r"`b1`.*-0\.1.*\[0, 1\)"),
    "b1 not a number": ({"b1": float("nan")}, ValueError, r"`b1`.*nan"),
    "b1 a string": ({"b1": "0.9"}, TypeError, r"`b1`.*'0\.9'"),
    "negative gamma": ({"gamma": -1}, ValueError, r"`gamma`.*-1.*at least 0"),
    "gamma None": ({"gamma": None}, TypeError, r"`gamma`.*None"),
    "negative clip_norm": ({"clip_norm": -1.0}, ValueError, r"`clip_norm`.*-1\.0.*positive"),
    "clip_norm of zero": ({"clip_norm": 0.0}, ValueError, r"`clip_norm`.*0\.0.*None"),
    "unknown clip_scope": ({"clip_scope": "layer"}, ValueError, r"`clip_scope`.*'layer'.*tensor"),
    "grad_dtype of integers": ({"grad_dtype": jnp.int8}, ValueError, r"`grad_dtype`.*int8.*bfloat"),
    "grad_dtype in exact mode": (
        {"grad_dtype": jnp.bfloat16, "exact": True},
        ValueError,
        r"`grad_dtype`.*bfloat16.*leave it out",
    ),
}
BAD_OPTIMIZER_ARGUMENTS = {
    "negative rate": ({"learning_rate": -1e-3}, ValueError, r"`learning_rate`.*-0\.001"),
    "rate None": ({"learning_rate": None}, TypeError, r"`learning_rate`.*None.*schedule"),
    "negative fallback rate": ({"adam_learning_rate": -1.0}, ValueError, r"`adam_learning_rate`"),
    "negative decay": ({"weight_decay": -0.1}, ValueError, r"`weight_decay`.*-0\.1.*at least 0"),
    "negative fallback decay": ({"adam_weight_decay": -0.1}, ValueError, r"`adam_weight_decay`"),
    "adam_b1 of one": ({"adam_b1": 1.0}, ValueError, r"`adam_b1`.*1\.0"),
    "adam_b2 above one": ({"adam_b2": 1.5}, ValueError, r"`adam_b2`.*1\.5"),
    "negative adam_eps": ({"adam_eps": -1e-8}, ValueError, r"`adam_eps`"),
    "preprocess without exact": (
        {"preprocess": optax.clip_by_global_norm(1.0)},
        ValueError,
        r"`preprocess`.*exact=False.*optax\.chain",
    ),
}


@pytest.mark.parametrize(
    ("arguments", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS
)
def test_bad_arguments_of_mars_vr(arguments, error, message):
    with pytest.raises(error, match=message):
        mars_vr(**arguments)


@every_optimizer
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    (BAD_ARGUMENTS | BAD_OPTIMIZER_ARGUMENTS).values(),
    ids=BAD_ARGUMENTS | BAD_OPTIMIZER_ARGUMENTS,
)
def test_bad_arguments_of_the_optimizers(factory, arguments, error, message):
    with pytest.raises(error, match=message):
        factory(**{"learning_rate": 1e-3} | arguments)


@pytest.mark.parametrize("arguments", [{"b2": 1.0}, {"eps": -1.0}])
def test_bad_arguments_of_adam(arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}`"):
        mars_optax.mars_adamw(1e-3, **arguments)


@pytest.mark.parametrize("factory", [mars_optax.mars_shampoo, mars_optax.mars_m])
def test_bad_arguments_of_the_iteration(factory):
    with pytest.raises(ValueError, match=r"`ns_steps`.*0.*at least 1"):
        factory(1e-3, ns_steps=0)
    with pytest.raises(ValueError, match=r"`ns_steps`.*2\.5"):
        factory(1e-3, ns_steps=2.5)
    with pytest.raises(ValueError, match=r"`ns_coeffs`.*\(2,\)"):
        factory(1e-3, ns_coeffs=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"`ns_coeffs`.*5 steps.*\(1, 3\)"):
        factory(1e-3, ns_coeffs=[(1.0, 2.0, 3.0)])
    with pytest.raises(TypeError, match=r"`ns_dtype`.*int32.*bfloat16"):
        factory(1e-3, ns_dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"`params\['b'\]` has shape \(3,\).*dimension numbers"):
        factory(1e-3, mars_mask=True).init(PARAMS)


def test_bad_arrays_for_orthogonalize():
    with pytest.raises(ValueError, match=r"`x` has shape \(2, 3, 4\).*dimension numbers"):
        orthogonalize(jnp.ones((2, 3, 4)))
    with pytest.raises(TypeError, match=r"`x`.*int32"):
        orthogonalize(jnp.ones((2, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"axis 2.*out of range.*\(2, 3\)"):
        orthogonalize(jnp.ones((2, 3)), dimension_numbers=MuonDimensionNumbers(0, 2))
    with pytest.raises(ValueError, match="name an axis twice"):
        orthogonalize(jnp.ones((2, 3)), dimension_numbers=MuonDimensionNumbers(1, -1))


@every_optimizer
@pytest.mark.parametrize("is_exact", [False, True])
def test_integer_parameters(factory, is_exact):
    with pytest.raises(TypeError, match=r"int32 at `params\['step'\]`.*optax\.masked"):
        factory(1e-3, exact=is_exact).init({**PARAMS, "step": jnp.zeros((), jnp.int32)})


@every_optimizer
def test_masks_and_dimension_numbers_that_do_not_fit(factory):
    wrong = {"w": True, "bias": False}
    with pytest.raises(ValueError, match=r"`mars_mask`.*'bias'.*each parameter True or False"):
        factory(1e-3, mars_mask=wrong).init(PARAMS)
    with pytest.raises(ValueError, match=r"`weight_decay_mask`.*'bias'"):
        factory(1e-3, weight_decay_mask=wrong).init(PARAMS)
    with pytest.raises(TypeError, match=r"`mars_mask` must hold bools, got 'yes'"):
        factory(1e-3, mars_mask={"w": "yes", "b": False}).init(PARAMS)
    numbers = {"w": MuonDimensionNumbers(0, 3), "b": None}
    with pytest.raises(ValueError, match=r"`weight_dimension_numbers` name axis 3.*\(2, 3\)"):
        factory(1e-3, weight_dimension_numbers=numbers).init(PARAMS)
    with pytest.raises(ValueError, match=r"`weight_dimension_numbers`.*'kernel'"):
        factory(1e-3, weight_dimension_numbers={"kernel": MuonDimensionNumbers()}).init(PARAMS)
    with pytest.raises(TypeError, match=r"`weight_dimension_numbers` must hold.*got 0"):
        factory(1e-3, weight_dimension_numbers={"w": 0, "b": None}).init(PARAMS)


@every_optimizer
@pytest.mark.parametrize("is_exact", [False, True])
def test_updates_that_do_not_fit(factory, is_exact):
    optimizer = factory(1e-3, exact=is_exact)
    state = optimizer.init(PARAMS)
    kept = jax.tree.map(jnp.copy, state)
    pair = (lambda g: MarsGrads(g, g)) if is_exact else (lambda g: g)
    with pytest.raises(ValueError, match="`params` is missing"):
        optimizer.update(pair(PARAMS), state)
    with pytest.raises(ValueError, match="`updates` must have the tree structure of `params`"):
        optimizer.update(pair({"w": PARAMS["w"]}), state, PARAMS)
    wrong_shape = {**PARAMS, "w": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match=r"`updates\['w'\]` has shape \(3, 2\).*\(2, 3\)"):
        optimizer.update(pair(wrong_shape), state, PARAMS)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, state, kept))


@every_optimizer
def test_previous_gradients_that_do_not_fit(factory):
    optimizer = factory(1e-3, exact=True)
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match="`prev_grad` must have the tree structure of `updates`"):
        optimizer.update(PARAMS, state, PARAMS, prev_grad={"w": PARAMS["w"]})
    with pytest.raises(ValueError, match="`prev_grad` was given beside a `MarsGrads` pair"):
        optimizer.update(MarsGrads(PARAMS, PARAMS), state, PARAMS, prev_grad=PARAMS)
    approximate = factory(1e-3)
    with pytest.raises(ValueError, match=r"`prev_grad` was given.*approximate.*exact=True"):
        approximate.update(PARAMS, approximate.init(PARAMS), PARAMS, prev_grad=PARAMS)
    with pytest.raises(TypeError, match=r"`MarsGrads` pair.*exact=True"):
        approximate.update(MarsGrads(PARAMS, PARAMS), approximate.init(PARAMS), PARAMS)


def test_updates_that_do_not_fit_mars_vr():
    vr = mars_vr()
    state = vr.init(PARAMS)
    with pytest.raises(ValueError, match=r"`updates` must have the tree structure.*last_grad"):
        vr.update({"w": PARAMS["w"]}, state)
    with pytest.raises(TypeError, match=r"`MarsGrads` pair.*mars_optax\.exact"):
        vr.update(MarsGrads(PARAMS, PARAMS), state)
    with pytest.raises(TypeError, match=r"`MarsGrads` pair"):
        multi = multi_steps(mars_optax.mars_adamw(1e-3), 2)
        multi.update(MarsGrads(PARAMS, PARAMS), multi.init(PARAMS), PARAMS)


def test_a_preprocess_that_keeps_a_state():
    with pytest.raises(ValueError, match="`preprocess` must be stateless"):
        exact(mars_vr(exact=True), preprocess=optax.trace(0.9)).init(PARAMS)


def test_states_without_or_with_several_previous_parameters():
    loss_fn = lambda p: jnp.sum(p["w"])  # noqa: E731
    approximate = mars_optax.mars_adamw(1e-3).init(PARAMS)
    with pytest.raises(ValueError, match=r"`state` must hold one exact state, got 0.*exact=True"):
        value_and_grads(loss_fn)(PARAMS, state=approximate)
    twice = exact(mars_optax.mars_adamw(1e-3, exact=True)).init(PARAMS)
    nested = (twice, mars_optax.mars_adamw(1e-3, exact=True).init(PARAMS))
    with pytest.raises(ValueError, match="got 2"):
        value_and_grads(loss_fn)(PARAMS, state=nested)
    other = mars_optax.mars_adamw(1e-3, exact=True).init({"w": jnp.ones((5, 5))})
    with pytest.raises(ValueError, match=r"`state` belongs to other parameters.*\(5, 5\)"):
        value_and_grads(loss_fn)(PARAMS, state=other)


@every_optimizer
def test_errors_are_raised_under_jit_too(factory):
    optimizer = factory(1e-3)
    state = optimizer.init(PARAMS)
    update = functools.partial(jax.jit(optimizer.update))
    with pytest.raises(ValueError, match="`updates` must have the tree structure"):
        update({"w": PARAMS["w"]}, state, PARAMS)


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_multi_steps_of_no_steps(every):
    with pytest.raises(ValueError, match=rf"`every_k_schedule`.*{every}.*at least 1"):
        multi_steps(mars_optax.mars_adamw(1e-3), every)


def test_exact_is_a_bool():
    with pytest.raises(ValueError, match=r"`exact` is unknown, got 'no'"):
        mars_optax.mars_adamw(1e-3, exact="no")
