"""Random problems and hand-computed cases against the float64 oracle."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from optax.contrib import MuonDimensionNumbers

import mars_optax

FACTORIES = {kind: getattr(mars_optax, f"mars_{kind}") for kind in oracle.KINDS}
ORTHOGONALIZED = ("shampoo", "m")
# Few shapes, so that eager operations are compiled once and then found in the cache.
SHAPES = [(), (3,), (0,), (2, 3), (3, 2), (0, 2), (2, 3, 2), (2, 2, 1, 3)]
NUMBERS = {  # for each number of axes, some dimension numbers that are allowed there
    2: [(0, 1), (1, 0), (-1, (0,))],
    3: [(0, (1, 2)), ((0, 1), 2), (1, 2), (2, 0), ((2, 0), 1)],
    4: [((0, 1, 2), 3), ((1, 2, 3), 0), (2, 3), ((0, 2), (3, 1))],
}


def deterministic(max_examples):
    return hypothesis.settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def to_jax(tree):
    return jax.tree.map(jnp.asarray, tree)


def without_none(tree):
    return {n: x for n, x in tree.items() if x is not None}


def with_none(tree, params):
    """None where the parameters have None."""
    return None if tree is None else {n: tree.get(n) for n in params}


def dimension_numbers(numbers, params):
    """The oracle's pairs as the library takes them."""
    if numbers is None:
        return None
    pairs = {n: pair and MuonDimensionNumbers(*pair) for n, pair in numbers.items()}
    return with_none(pairs, params)


def assert_close(actual, expected, tolerance, start=None):
    """Error at most `tolerance` of the distance to `start`, on the scale of each leaf."""
    for name, x in expected.items():
        assert actual[name].dtype == np.float64
        assert actual[name].shape == x.shape
        moved = x if start is None else x - start[name]
        largest = lambda y: np.max(np.abs(y), initial=0.0)  # noqa: E731
        bound = tolerance * largest(moved) + 1e-14 * largest(x)
        np.testing.assert_allclose(actual[name], x, rtol=0, atol=bound, err_msg=name)


# Problems

positive = st.floats(0.01, 10.0)
rates = st.floats(1e-3, 0.1)
decay_rates = st.one_of(st.just(0.0), st.floats(0.01, 0.99))


@st.composite
def numbers_or_schedules(draw, values):
    value = draw(values)
    return draw(st.sampled_from([value, lambda count: value / (1.0 + count)]))


@st.composite
def trees(draw, shapes, steps):
    """Parameters, gradients and previous gradients: dicts with a None here and there."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = draw(st.lists(st.none() | st.sampled_from(shapes), max_size=3))
    scale = draw(st.sampled_from([0.1, 1.0, 10.0]))  # below and above the clip

    def tree():  # normal gradients, so that no sign hangs on rounding
        return {
            f"p{i}": None if shape is None else scale * np.asarray(rng.normal(size=shape))
            for i, shape in enumerate(chosen)
        }

    return tree(), [tree() for _ in range(steps)], [tree() for _ in range(steps)]


@st.composite
def choices(draw, params, values):
    """None, or for each parameter one of `values(parameter)`."""
    if draw(st.booleans()):
        return None
    return {n: draw(st.sampled_from(values(x))) for n, x in without_none(params).items()}


def possible_numbers(x):
    return [None, *NUMBERS.get(x.ndim, [])]


def either(_):
    return [True, False]


# The correction

vr_settings = st.fixed_dictionaries(
    {
        "gamma": numbers_or_schedules(st.floats(0.0, 1.0)),
        "b1": decay_rates,
        "clip_norm": st.none() | positive,
        "clip_scope": st.sampled_from(["tensor", "global"]),
        "exact": st.booleans(),
    }
)


def check_mars_vr(data):
    settings = data.draw(vr_settings)
    params, grads, prev_grads = data.draw(trees(SHAPES, steps=3))
    numbers = data.draw(choices(params, possible_numbers))
    library = mars_optax.mars_vr(
        **settings, weight_dimension_numbers=dimension_numbers(numbers, params)
    )
    correct = oracle.VarianceReduction(**settings, numbers=numbers)
    state = library.init(to_jax(params))
    for g, previous in zip(grads, prev_grads, strict=True):
        if settings["exact"]:
            corrected, state = library.update(to_jax(g), state, prev_grad=to_jax(previous))
            expected = correct(without_none(g), without_none(previous))
        else:
            corrected, state = library.update(to_jax(g), state)
            expected = correct(without_none(g))
            # What is kept is the gradient itself, not what was made of it.
            assert_close(state.last_grad, without_none(g), 0.0)
        assert jax.tree.structure(corrected) == jax.tree.structure(g)
        assert_close(corrected, expected, 1e-12)
    assert int(state.count) == len(grads)


@deterministic(60)
@hypothesis.given(st.data())
def test_mars_vr(data):
    check_mars_vr(data)


@pytest.mark.slow
@deterministic(2000)
@hypothesis.given(st.data())
def test_mars_vr_sweep(data):
    check_mars_vr(data)


# The five optimizers

optimizer_settings = {
    "learning_rate": numbers_or_schedules(rates),
    "b1": decay_rates,
    "weight_decay": st.floats(0.0, 0.5),
    "gamma": numbers_or_schedules(st.floats(0.0, 1.0)),
    "clip_norm": st.none() | positive,
    "clip_scope": st.sampled_from(["tensor", "global"]),
    "exact": st.booleans(),
    "adam_learning_rate": st.none() | numbers_or_schedules(rates),
    "adam_b1": decay_rates,
    "adam_b2": decay_rates,
    "adam_eps": st.floats(1e-8, 1e-2),
    "adam_weight_decay": st.floats(0.0, 0.5),
}
adamw_settings = {"b2": decay_rates, "eps": st.floats(1e-8, 1e-2)}


def check_optimizer(kind, data, steps=3):
    special = adamw_settings if kind == "adamw" else {}
    settings = data.draw(st.fixed_dictionaries(optimizer_settings | special))
    params, grads, prev_grads = data.draw(trees(SHAPES, steps))
    numbers = data.draw(choices(params, possible_numbers))
    if kind in ORTHOGONALIZED:  # MARS is for matrices only
        is_matrix = lambda n, x: x.ndim == 2 or (numbers or {}).get(n) is not None  # noqa: E731
        matrices = {n: is_matrix(n, x) for n, x in without_none(params).items()}
        mars = data.draw(st.none() | st.just(matrices) | st.just(dict.fromkeys(matrices, False)))
    else:
        mars = data.draw(choices(params, either))
    decays = data.draw(choices(params, either))

    library = FACTORIES[kind](
        **settings,
        mars_mask=with_none(mars, params),
        weight_decay_mask=with_none(decays, params),
        weight_dimension_numbers=dimension_numbers(numbers, params),
    )
    reference = oracle.Mars(kind, **settings, numbers=numbers, mars=mars, decays=decays)
    ours = oracle.trajectory(
        library,
        to_jax(params),
        to_jax(grads),
        to_jax(prev_grads) if settings["exact"] else None,
    )
    start = expected = without_none(params)
    tolerance = 1e-9 if kind in ORTHOGONALIZED else 1e-12
    for t in range(steps):
        previous = without_none(prev_grads[t]) if settings["exact"] else None
        expected = reference.step(expected, without_none(grads[t]), previous)
        assert jax.tree.structure(ours[t]) == jax.tree.structure(params)
        assert_close(ours[t], expected, tolerance, start)


@pytest.mark.parametrize("kind", oracle.KINDS)
@deterministic(25)
@hypothesis.given(st.data())
def test_optimizer(kind, data):
    check_optimizer(kind, data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", oracle.KINDS)
@deterministic(300)
@hypothesis.given(st.data())
def test_optimizer_sweep(kind, data):
    check_optimizer(kind, data, steps=6)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_default_arguments(kind):
    rng = np.random.default_rng(0)
    tree = lambda: {"kernel": rng.normal(size=(3, 5)), "bias": rng.normal(size=5)}  # noqa: E731
    params, grads = tree(), [tree() for _ in range(4)]
    ours = oracle.trajectory(FACTORIES[kind](0.02), to_jax(params), to_jax(grads))
    reference, expected = oracle.Mars(kind, 0.02), params
    for t, g in enumerate(grads):
        expected = reference.step(expected, g)
        assert_close(ours[t], expected, 1e-9 if kind in ORTHOGONALIZED else 1e-12, params)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_empty_tree(kind):
    optimizer = FACTORIES[kind](0.1)
    for params in ({}, (), {"a": None, "b": {}}):
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert updates == params


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_nested_tree_with_prefixes_and_callables_is_the_flat_tree(kind):
    rng = np.random.default_rng(1)
    x = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731

    def tree():
        return {"block": [{"w": x(2, 3), "b": x(3)}, {"w": x(3, 2, 2)}, None], "head": (x(3, 2),)}

    numbers = MuonDimensionNumbers(0, (1, 2))
    common = {"gamma": 0.3, "clip_norm": 0.5, "weight_decay": 0.1}
    nested = FACTORIES[kind](
        0.1,
        mars_mask=lambda p: {
            "block": [{"w": True, "b": False}, True, None],  # True for all of the second block
            "head": False,
        },
        weight_decay_mask={"block": False, "head": True},
        weight_dimension_numbers=lambda p: {
            "block": [{"w": MuonDimensionNumbers(1, 0), "b": None}, numbers, None],
            "head": None,
        },
        **common,
    )
    names = ["b", "w0", "w1", "head"]  # the order of the leaves
    flat = lambda tree: dict(zip(names, map(np.asarray, jax.tree.leaves(tree)), strict=True))  # noqa: E731
    reference = oracle.Mars(
        kind,
        0.1,
        mars={"b": False, "w0": True, "w1": True, "head": False},
        decays={"b": False, "w0": False, "w1": False, "head": True},
        numbers={"b": None, "w0": (1, 0), "w1": (0, (1, 2)), "head": None},
        **common,
    )
    params, grads = tree(), [tree() for _ in range(3)]
    start = expected = flat(params)
    for t, point in enumerate(oracle.trajectory(nested, params, grads)):
        expected = reference.step(expected, flat(grads[t]))
        assert_close(flat(point), expected, 1e-9 if kind in ORTHOGONALIZED else 1e-12, start)


@pytest.mark.parametrize("kind", oracle.KINDS)
@pytest.mark.parametrize(
    "argument, value",
    [
        ("mars_mask", lambda x: x.ndim == 2),
        ("weight_decay_mask", lambda x: x.ndim > 1),
        ("weight_dimension_numbers", lambda x: MuonDimensionNumbers() if x.ndim == 2 else None),
    ],
)
def test_callables_get_the_parameters(kind, argument, value):
    """All of them, as arrays, wherever the callable looks."""
    rng = np.random.default_rng(6)
    params = to_jax({"w": rng.normal(size=(2, 3)), "b": rng.normal(size=3)})
    settings = {"weight_decay": 0.1, "adam_weight_decay": 0.2}
    by_name = lambda tree: {n: value(x) for n, x in tree.items()}  # noqa: E731
    called = FACTORIES[kind](0.1, **{argument: by_name}, **settings)
    given = FACTORIES[kind](0.1, **{argument: by_name(params)}, **settings)
    trajectories = [oracle.trajectory(optimizer, params, [params]) for optimizer in (called, given)]
    jax.tree.map(np.testing.assert_array_equal, *trajectories)


@pytest.mark.parametrize("kind", oracle.KINDS)
@pytest.mark.parametrize("preprocess", [None, 1.0])
def test_exact_with_gradients_at_both_points(kind, preprocess):
    """x_0 := x_1, and later the gradient of the same batch one iterate before."""
    rng = np.random.default_rng(2)
    shapes = {"kernel": (2, 3), "bias": (3,)}
    start = {n: rng.normal(size=s) for n, s in shapes.items()}
    batches = [
        {n: {"a": rng.uniform(1, 2, size=s), "b": rng.normal(size=s)} for n, s in shapes.items()}
        for _ in range(5)
    ]

    def loss(params, batch):
        return sum(
            jnp.sum(z["a"] * params[n] ** 2 / 2 + z["b"] * params[n]) for n, z in batch.items()
        )

    def gradient(params, batch):
        grads = {n: z["a"] * params[n] + z["b"] for n, z in batch.items()}
        factor = max(1.0, oracle.norm(*grads.values()) / preprocess) if preprocess else 1.0
        return {n: g / factor for n, g in grads.items()}

    settings = {"gamma": 0.4, "weight_decay": 0.1, "exact": True}
    optimizer = FACTORIES[kind](
        0.05, preprocess=preprocess and optax.clip_by_global_norm(preprocess), **settings
    )
    reference = oracle.Mars(kind, 0.05, **settings)
    params = to_jax(start)
    state = optimizer.init(params)
    previous = expected = start
    for batch in batches:
        _, grads = mars_optax.value_and_grads(loss)(params, to_jax(batch), state=state)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        following = reference.step(expected, gradient(expected, batch), gradient(previous, batch))
        previous, expected = expected, following
        assert_close(params, expected, 1e-9 if kind in ORTHOGONALIZED else 1e-12, start)


def test_previous_gradient_is_what_earlier_links_of_the_chain_made():
    rng = np.random.default_rng(3)
    grads = [{"w": 10 * rng.normal(size=(2, 2))} for _ in range(3)]
    chain = optax.chain(optax.clip_by_global_norm(1.0), mars_optax.mars_vr(0.5, clip_norm=None))
    correct = oracle.VarianceReduction(0.5, clip_norm=None)
    state = chain.init(to_jax(grads[0]))
    for g in grads:
        corrected, state = chain.update(to_jax(g), state)
        assert_close(corrected, correct({"w": g["w"] / oracle.norm(g["w"])}), 1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": None}, {"clip_scope": "global"}], ids=str)
def test_tensor_that_is_not_finite_is_not_stored(bad, clip):
    """Each parameter and each matrix of a stack keeps its own last finite gradient."""
    rng = np.random.default_rng(4)
    shapes = {"a": (2, 2), "b": (3,), "stack": (3, 2, 4)}
    grads = [{n: rng.normal(size=s) for n, s in shapes.items()} for _ in range(4)]
    grads[1]["b"][2] = grads[1]["stack"][1, 0, 3] = bad
    numbers = {"a": None, "b": None, "stack": MuonDimensionNumbers(1, 2)}
    library = mars_optax.mars_vr(0.5, weight_dimension_numbers=numbers, **clip)
    correct = oracle.VarianceReduction(0.5, numbers=numbers, **clip)
    state = library.init(to_jax(grads[0]))
    for t, g in enumerate(grads):
        corrected, state = library.update(to_jax(g), state)
        with np.errstate(invalid="ignore"):
            expected = correct(g)
        stored = g
        if t == 1:
            stack = np.where(np.arange(3)[:, None, None] == 1, grads[0]["stack"], g["stack"])
            stored = {"a": g["a"], "b": grads[0]["b"], "stack": stack}
        assert_close(state.last_grad, stored, 0.0)
        if t == 1:
            assert not np.all(np.isfinite(corrected["b"]))
            assert not np.all(np.isfinite(corrected["stack"][1]))
        else:
            assert_close(corrected, expected, 1e-12)


@pytest.mark.parametrize("clip_norm", [1.0, None])
@pytest.mark.parametrize(
    "stored, size", [("float16", 1e6), ("bfloat16", 1e100), ("float32", 1e100)]
)
def test_gradient_that_overflows_where_it_is_stored_is_not_stored(stored, size, clip_norm):
    """An infinite `last_grad` would make every later correction NaN."""
    vr = mars_optax.mars_vr(clip_norm=clip_norm, grad_dtype=stored)
    ones = jnp.ones((2, 2))
    _, state = vr.update(ones, vr.init(ones))
    _, state = vr.update(size * ones, state)
    np.testing.assert_array_equal(state.last_grad, ones)
    corrected, _ = vr.update(0.1 * ones, state)
    assert np.all(np.isfinite(corrected))


# Newton-Schulz


@deterministic(40)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([s for s in SHAPES if len(s) > 1]),
    # the last one is of a scale at which the authors' term beside the norm counts
    scale=st.sampled_from([1e6, 1.0, 1e-3, 1e-8]),
    data=st.data(),
)
def test_orthogonalize(seed, shape, scale, data):
    x = scale * np.random.default_rng(seed).normal(size=shape)
    numbers = data.draw(st.sampled_from(NUMBERS[len(shape)]))
    steps = data.draw(st.integers(1, 6))
    rows = data.draw(
        st.sampled_from(
            [oracle.NS_COEFFS, (2.0, -1.5, 0.5), [(3.0 + i, -4.0, 2.0) for i in range(steps)]]
        )
    )
    ours = mars_optax.orthogonalize(
        jnp.asarray(x),
        ns_steps=steps,
        ns_coeffs=rows,
        dimension_numbers=MuonDimensionNumbers(*numbers),
    )
    assert_close({"x": ours}, {"x": oracle.orthogonalize(x, numbers, steps, rows)}, 1e-9)


def test_five_newton_schulz_steps_bring_singular_values_to_about_one():
    x = np.random.default_rng(5).normal(size=(16, 64))
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    image = u.T @ np.asarray(mars_optax.orthogonalize(jnp.asarray(x))) @ vt.T
    singular_values = np.diag(image)
    np.testing.assert_allclose(image, np.diag(singular_values), atol=1e-10)
    # The polynomial's range on [0.0052, 1] is 0.6818 to 1.1344.
    assert np.min(singular_values) > 0.6818
    assert np.max(singular_values) < 1.1344


# Cases computed by hand

G1 = np.array([[0.3, -0.2], [0.1, 0.05]])
G2 = np.array([[-0.1, 0.4], [0.2, -0.3]])
G3 = np.array([[3.0, 4.0], [0.0, 0.0]])
P0 = np.array([[1.0, -2.0], [0.5, 0.25]])
PRINTED = 6e-11  # these cases are printed with ten digits


def test_by_hand_mars_adamw_three_steps_the_last_one_clipped():
    expected = [
        [[0.9890000002, -1.9880000003], [0.4895000007, 0.2397500014]],
        [[0.9862220251, -1.989941016], [0.479265053, 0.2455826558]],
        [[0.979710027, -1.9944969207], [0.4712989597, 0.2499224887]],
    ]
    optimizer = mars_optax.mars_adamw(0.01, weight_decay=0.1)
    ours = oracle.trajectory(optimizer, jnp.asarray(P0), to_jax([G1, G2, G3]))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=PRINTED)


def test_by_hand_first_moment_of_a_huge_gradient_has_norm_one_twentieth():
    huge = jnp.full((2, 2), 100.0)
    chain = optax.chain(mars_optax.mars_vr(), optax.scale_by_adam(0.95, 0.99))
    _, state = chain.update(huge, chain.init(huge))
    np.testing.assert_allclose(jnp.linalg.norm(state[1].mu), 0.05, rtol=1e-14)
    sgdm = mars_optax.mars_sgdm(1.0)
    updates, _ = sgdm.update(huge, sgdm.init(huge), huge)
    np.testing.assert_allclose(jnp.linalg.norm(updates), 0.05, rtol=1e-14)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_by_hand_zero_gradients_leave_the_parameters_unchanged(kind):
    params = {"kernel": jnp.asarray(P0), "bias": jnp.asarray(P0[0])}
    optimizer = FACTORIES[kind](0.1, weight_decay=0.0, adam_weight_decay=0.0)
    for point in oracle.trajectory(optimizer, params, [jax.tree.map(jnp.zeros_like, params)] * 3):
        jax.tree.map(np.testing.assert_array_equal, point, params)


def test_by_hand_correction_is_four_and_a_half_times_the_difference():
    vr = mars_optax.mars_vr(0.5, 0.9, clip_norm=None)
    _, state = vr.update(jnp.asarray(G1), vr.init(jnp.asarray(P0)))
    corrected, _ = vr.update(jnp.asarray(G2), state)
    np.testing.assert_allclose(corrected, G2 + 4.5 * (G2 - G1), rtol=1e-14)


def test_by_hand_exact_from_a_previous_gradient_of_zero():
    optimizer = mars_optax.mars_adamw(0.1, exact=True)
    x = previous = jnp.ones((1, 1))
    state = optimizer.init(x)
    points = []
    for a in (1.0, 2.0, 3.0):
        prev_grad = 0.1 * a * previous if points else jnp.zeros((1, 1))
        updates, state = optimizer.update(0.1 * a * x, state, x, prev_grad=prev_grad)
        previous, x = x, optax.apply_updates(x, updates)
        points.append(float(x[0, 0]))
    expected = [0.9000000067796605, 0.8001116898095844, 0.7011292318555118]
    np.testing.assert_allclose(points, expected, rtol=1e-14)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_by_hand_fallback_with_its_own_schedule(kind):
    rates = jnp.array([6e-3, 3e-3])
    optimizer = FACTORIES[kind](
        lambda count: rates[count], adam_learning_rate=lambda count: 0.5 * rates[count]
    )
    grads = [jnp.array([0.1, -0.2]), jnp.array([0.3, 0.4])]
    ours = oracle.trajectory(optimizer, jnp.array([1.0, -1.0]), grads)
    expected = [[0.9967000003, -0.99670000015], [0.995187457151, -0.997095556059]]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=PRINTED)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_tensors_do_not_disturb_each_other_when_compiled(clip_norm, exact):
    """Compiled, a tensor's correction waits for the size of the one before: for nothing else."""
    vr = mars_optax.mars_vr(0.5, 0.9, clip_norm=clip_norm, exact=exact)
    rng = np.random.default_rng(0)
    # Sums of the corrections of every sign, in every place.
    steps = [{n: rng.normal(sign, 1, (3, 2)) for n, sign in zip("abc", signs, strict=True)}
             for signs in [(-3, -2, 1), (2, -3, -1), (-1, 3, -2), (-9, -4, 4)]]  # fmt: skip
    state = vr.init(jax.tree.map(jnp.zeros_like, to_jax(steps[0])))
    update = jax.jit(vr.update)
    last = {n: np.zeros((3, 2)) for n in "abc"}
    for g in steps:
        corrected, state = update(
            to_jax(g), state, **({"prev_grad": to_jax(last)} if exact else {})
        )
        for n in "abc":
            c = g[n] + 0.5 * 0.9 / 0.1 * (g[n] - last[n])
            expected = c if clip_norm is None else c / max(1, np.linalg.norm(c) / clip_norm)
            np.testing.assert_allclose(corrected[n], expected, rtol=1e-12)
        last = g
