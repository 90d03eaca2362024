"""Optax's own test suites, run on the five optimizers of this library.

Optax's wheel ships its tests. They bind their lists of optimizers in decorators of
`absl.testing.parameterized` while being imported, so each suite is imported anew under a name of
its own, with decorators that put our optimizers in place of Optax's lists. Tests that are not
about such a list (those of L-BFGS, say) are dropped. Where a suite looks optimizers up by name,
ours are put there for the duration of a test.

Parameters that are no matrices get the AdamW fallback by default, and most of Optax's problems are
vectors, so each optimizer runs twice: as it is, and "..._on_vectors", with MARS on all of them.
"""

import functools
import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P
from optax._src import alias
from optax.contrib import MuonDimensionNumbers

import mars_optax

FACTORIES = {
    name: getattr(mars_optax, name)
    for name in ("mars_adamw", "mars_lion", "mars_shampoo", "mars_m", "mars_sgdm")
}
# Updates of the size of the rate need it within the suites' tolerance and 10,000 times it far.
RATES = dict.fromkeys(FACTORIES, 1e-2) | {"mars_lion": 2e-3, "mars_shampoo": 2e-3}
COLUMN = {"weight_dimension_numbers": MuonDimensionNumbers(reduction_axis=0, output_axis=())}
STACKED = {"weight_dimension_numbers": MuonDimensionNumbers(reduction_axis=1, output_axis=2)}
ALL_PARAMETERS = {"mars_mask": True}
ON_VECTORS = dict.fromkeys(FACTORIES, ALL_PARAMETERS) | {"mars_shampoo": COLUMN, "mars_m": COLUMN}


def settings(name, **options):
    # Without decay: the minima of the problems are not at 0.
    return {"learning_rate": RATES[name], "weight_decay": 0.0, "adam_weight_decay": 0.0} | options


def case(name, suffix="", **options):
    return {
        "testcase_name": name + suffix,
        "opt_name": name,
        "opt_kwargs": settings(name, **options),
    }


AS_THEY_ARE = [case(name) for name in FACTORIES]
BY_NAME = AS_THEY_ARE + [case(name, "_on_vectors", **ON_VECTORS[name]) for name in FACTORIES]
WRAPPABLE = [c | {"wrapper_name": None, "wrapper_kwargs": None} for c in BY_NAME] + [
    case(name, "_mechanized", learning_rate=1.0)
    | {"wrapper_name": "mechanize", "wrapper_kwargs": {"weight_decay": 0.0}}
    for name in FACTORIES
]
CONSTRUCTORS = [
    *((c["testcase_name"], FACTORIES[c["opt_name"]], c["opt_kwargs"]) for c in BY_NAME),
    ("mars_vr", mars_optax.mars_vr, {}),
    ("mars_vr_global", mars_optax.mars_vr, {"clip_scope": "global"}),
    ("mars_vr_without_clip", mars_optax.mars_vr, {"clip_norm": None}),
    ("scale_by_orthogonalization", mars_optax.scale_by_orthogonalization, COLUMN),
]
OPTIMIZERS = [
    (name + suffix, FACTORIES[name](**settings(name, **options)))
    for suffix, options in (("", {}), ("_on_stacks", STACKED))  # the suite's parameter has 3 axes
    for name in FACTORIES
]


def is_list_of_optimizers(arguments):
    """Whether these arguments of a decorator are one of Optax's lists of optimizers."""
    first = next(iter(arguments[0])) if len(arguments) == 1 else None
    return "opt_name" in first if isinstance(first, dict) else isinstance(first, tuple)


def with_our_optimizers(decorator, named_parameters, cases):
    """A decorator of `parameterized` that puts `cases` in place of a list of optimizers."""

    def replacement(*arguments, **grid):
        if not is_list_of_optimizers(arguments):
            return decorator(*arguments, **grid)
        ours = list(cases)
        if grid:
            ours = [
                c | dict(zip(grid, values, strict=True)) | {"testcase_name": label(c, values)}
                for c, values in itertools.product(cases, itertools.product(*grid.values()))
            ]
        return lambda test: named_parameters(ours)(ours_only(test))

    return replacement


def label(case, values):
    parts = [getattr(v, "__name__", str(v)).removeprefix("_setup_") for v in values]
    return "_".join([case["testcase_name"], *parts])


def ours_only(test):
    @functools.wraps(test)
    def marked(self, *args, **kwargs):
        dtype = kwargs.get("dtype", jnp.float32)
        if kwargs.get("opt_name") == "mars_lion" and jnp.issubdtype(dtype, jnp.complexfloating):
            self.skipTest("Optax's suites, too, run sign-based updates on real numbers only.")
        test(self, *args, **kwargs)

    marked.runs_our_optimizers = True  # absl and chex copy it to the tests they make
    return marked


def load(file, cases, slow=False):
    """The test classes of one of Optax's suites, or a skipped test that says why there is none."""
    path = pathlib.Path(optax.__file__).parent / file
    found, reason = {}, "no tests by optimizer"
    try:
        module = import_anew(path, cases)
    except (FileNotFoundError, ImportError) as error:
        module, reason = None, error
    for cls in vars(module).values() if module else ():
        if not (isinstance(cls, type) and issubclass(cls, parameterized.TestCase)):
            continue
        for name, test in list(vars(cls).items()):
            if hasattr(test, "runs_our_optimizers"):
                found[cls.__name__] = cls
                if slow or "_mechanized" in name:
                    pytest.mark.slow(test)
            elif name.startswith("test"):
                delattr(cls, name)

    def skipped():
        pytest.skip(f"optax/{file} of optax {optax.__version__}: {reason}")

    return found or {f"test_of_{path.stem.strip('_')}": skipped}


def import_anew(path, cases):
    spec = importlib.util.spec_from_file_location(f"optax_suite{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # sharding_test changes it
        named_parameters = parameterized.named_parameters
        for name in ("parameters", "named_parameters", "product"):
            ours = with_our_optimizers(getattr(parameterized, name), named_parameters, cases)
            patch.setattr(parameterized, name, ours)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def optimizers_where_optax_looks(monkeypatch):
    for name, factory in FACTORIES.items():
        monkeypatch.setattr(alias, name, factory, raising=False)
    # sharding_test compares versions as strings, and would skip its tests on "0.10" < "0.7.2".
    monkeypatch.setattr(jax, "__version__", "1")
    x64 = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", x64)  # float64_test leaves it on where it fails


globals().update(load("contrib/_common_test.py", WRAPPABLE))
globals().update(load("_src/float64_test.py", CONSTRUCTORS))
# Much the same tests as in contrib, and complex numbers.
globals().update(load("_src/alias_test.py", BY_NAME, slow=True))
# Half a minute each, for Optax's own too: it compiles anew at every step.
globals().update(load("transforms/_accumulation_test.py", AS_THEY_ARE, slow=True))

if jax.device_count() >= 8:
    globals().update(load("_src/sharding_test.py", OPTIMIZERS, slow=True))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", FACTORIES)
    def test_sharding_of_matrices(name):
        """Optax's suite has 3-axis parameters only, which miss errors of sharded matrices."""
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        optimizer = FACTORIES[name](**settings(name))
        rng = np.random.default_rng(0)
        host = {
            f"{dtype} {spec}": (rng.standard_normal((8, 4)).astype(dtype), spec)
            for dtype in ("float16", "float32")
            for spec in (P("x", None), P(None, "x"), P("x", "y"))
        }
        types = lambda tree: jax.tree.map(jax.typeof, tree)  # noqa: E731

        def step(params, state):
            updates, state = optimizer.update(params, state, params)
            return updates, optax.apply_updates(params, updates), state

        with jax.set_mesh(mesh):
            params = {
                key: jax.device_put(x, jax.NamedSharding(mesh, s)) for key, (x, s) in host.items()
            }
            state = optimizer.init(params)
            assert types(jax.jit(optimizer.init)(params)) == types(state)
            for run in (step, jax.jit(step)):
                updates, new_params, new_state = run(params, state)
                assert types(updates) == types(params)
                assert types(new_params) == types(params)
                assert types(new_state) == types(state)

        plain = {key: jnp.asarray(x) for key, (x, _) in host.items()}
        expected, *_ = jax.jit(step)(plain, optimizer.init(plain))
        for key in host:
            np.testing.assert_allclose(updates[key], expected[key], rtol=2e-3, atol=1e-6)

else:

    @pytest.mark.slow
    def test_sharding_on_eight_devices():
        """JAX fixes the number of devices when it starts, so these get a session of their own."""
        flags = "--xla_force_host_platform_device_count=8"
        session = subprocess.run(
            [sys.executable, "-m", "pytest", __file__, "-k", "sharding", "-p", "no:cacheprovider"],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert session.returncode == 0, session.stdout + session.stderr
