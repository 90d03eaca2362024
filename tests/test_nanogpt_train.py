"""The trainer end to end on a tiny corpus, and its optimizers by name."""

import dataclasses
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.nanogpt import config as configs
from examples.nanogpt import data, hardware, metrics, model, optimizers, sharding, step, train

STEPS = 20
MARS = [name for name in optimizers.NAMES if name.startswith("mars_")]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """These programs run for milliseconds and compile for seconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("All the world's a stage, and all the men and women merely players.\n" * 60)
    return path


def tiny(text, optimizer="mars_m", **changes) -> configs.Config:
    shape = model.GPTConfig(layers=2, heads=2, width=16, context=16, bias=False)
    config = dataclasses.replace(
        configs.default_config("demo", optimizer),
        model=shape,
        steps=STEPS,
        batch_size=4,
        micro_batch_size=4,
        warmup=min(5, changes.get("steps", STEPS) - 1),
        eval_every=10,
        eval_windows=8,
        log_every=5,
        sample_tokens=8,
        optimizer=optimizer,
        data=str(text),
        out_dir=text.parent / "run",
        devices=1,
    )
    return dataclasses.replace(config, **changes)


def rows_of(config: configs.Config) -> list[dict]:
    lines = (config.directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("optimizer", "exact"),
    [("adamw", False), ("muon", False), ("mars_adamw", True), ("mars_m", False)],
)
def test_a_run_from_end_to_end(optimizer, exact, text, capsys):
    config = tiny(text, optimizer, exact=exact)
    loss = train.train(config)
    rows = rows_of(config)
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert loss < losses[0] - 0.5
    validations = [
        (row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row
    ]
    assert [step for step, _ in validations] == [10, 20] and validations[-1][1] == loss
    assert [row["step"] for row in rows if "train_loss" in row] == [1, 5, 10, 15, 20]
    image = config.directory / "loss.png"
    assert image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    output = capsys.readouterr().out
    assert f"final validation loss {loss:.4f} nats per byte" in output and str(image) in output
    summary = json.loads((config.directory / "summary.json").read_text())
    assert summary["validation_loss"] == loss and summary["optimizer"] == optimizer


GOLDEN = {
    "adamw": [
        5.5258, 5.457, 5.2549, 5.1446, 4.9826, 4.8179, 4.7147, 4.6493, 4.4731, 4.4109,
        4.2852, 4.1882, 4.1882, 4.0509, 4.0242, 3.9569, 4.0137, 3.9378, 3.9307, 3.9643,
    ],
    "mars_adamw": [
        5.5258, 5.4183, 5.1207, 4.9452, 4.7013, 4.4443, 4.3037, 4.2148, 3.9645, 3.8882,
        3.7318, 3.6052, 3.6392, 3.4468, 3.4283, 3.3346, 3.4459, 3.339, 3.3333, 3.3871,
    ],
    "mars_m": [
        5.5258, 5.4764, 5.3308, 5.2264, 5.0382, 4.8679, 4.7472, 4.6795, 4.5004, 4.4262,
        4.3038, 4.1983, 4.1997, 4.0587, 4.0293, 3.9676, 4.0205, 3.9396, 3.9356, 3.9736,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "mars_adamw", "mars_m"])
def test_golden_losses(name, text):
    """Of the first 20 steps: whatever changes them changes the trainer's numbers."""
    config = tiny(text, name, log_every=1, eval_every=20, warmup=2, sample_tokens=0)
    train.train(config)
    losses = [row["train_loss"] for row in rows_of(config) if "train_loss" in row]
    np.testing.assert_allclose(losses, GOLDEN[name], atol=2e-3)


@pytest.mark.parametrize(("name", "exact"), [("mars_adamw", False), ("mars_m", True)])
def test_one_batch_is_learnt_by_heart(name, exact):
    shape = model.GPTConfig(layers=2, heads=2, width=32, context=16, vocab_size=256, bias=False)
    config = dataclasses.replace(
        configs.default_config("demo", name), model=shape, exact=exact, steps=100, warmup=5
    )
    graphdef, _ = model.define(shape)
    tx = config.build_optimizer()
    train_step = step.make_train_step(graphdef, tx, config)
    params = model.init(shape, 0)
    state = jax.jit(tx.init)(params)
    tokens = np.random.default_rng(0).integers(0, 256, (1, 4, 17), dtype=np.int32)
    for i in range(config.steps):
        params, state, numbers = train_step(params, state, tokens, np.int32(i))
    assert numbers["train_loss"] < 0.1  # from 5.5


def test_what_is_measured_on_the_way(text):
    """Diagnostics at the logged steps, for MARS alone; norms and rates for all."""
    common = {"train_loss", "grad_norm", "update_norm", "learning_rate", "tokens_per_second"}
    mars = {"correction", "cosine", "clipped", "momentum_distance"}
    for name, exact in (("adamw", False), ("mars_m", False), ("mars_adamw", True)):
        config = tiny(text, name, exact=exact, out_dir=text.parent / f"{name}{exact}")
        train.train(config)
        rows = [row for row in rows_of(config) if "train_loss" in row]
        assert all(common <= set(row) for row in rows) and rows[0]["step"] == 1
        assert not any(mars & set(row) for row in (rows if name == "adamw" else rows[:1]))
        for row in rows[1:] if name != "adamw" else []:
            assert mars <= set(row) and ("removed" in row) == exact
            assert -1 <= row["cosine"] <= 1 and row["correction"] > 0
    # In exact mode the two gradients share their batch: they are much more alike.
    assert rows[-1]["cosine"] > 0.99 and rows[-1]["correction"] < 0.1


def test_mfu_counts_the_models_operations():
    assert hardware.chip(jax.devices()[0]) is None  # nothing is known of this CPU
    shape = model.PRESETS["small"]
    per_token = hardware.flops_per_token(shape, exact=False)
    assert per_token == 6 * (12 * 12 * 768**2 + 50304 * 768) + 12 * 12 * 768 * 1024
    assert hardware.flops_per_token(shape, exact=True) == 2 * per_token
    v5e = types.SimpleNamespace(device_kind="TPU v5 lite")
    assert hardware.utilization(shape, False, 1e5, v5e, 4) == 1e5 * per_token / (4 * 197e12)
    assert hardware.chip(types.SimpleNamespace(device_kind="TPU v5p")).flops == 459e12
    assert hardware.chip(types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")).flops > 9e14
    row = {"train_loss": 3.14159, "learning_rate": 3e-3, "tokens_per_second": 12345.6}
    assert train.postfix(row) == "loss 3.142, lr 3.0e-03, 12,346 tokens/s"
    assert train.postfix({**row, "mfu": 0.4567}).endswith("MFU 45.7%")


def test_tensorboard_is_optional(text, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="run `pip install tensorboardX`"):
        train.train(tiny(text, "adamw", tensorboard=True))
    written = []
    fake = types.SimpleNamespace(
        SummaryWriter=lambda folder: types.SimpleNamespace(
            add_scalar=lambda *values: written.append(values), close=lambda: None
        )
    )
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    log = metrics.Metrics(text.parent / "metrics.jsonl", tensorboard=True)
    log.write(7, train_loss=2.0)
    assert written == [("train_loss", 2.0, 7)]


def test_the_authors_losses_are_shown(tmp_path):
    """The header of a run; nothing is trained."""
    config = configs.parse(["--preset", "small", "--optimizer", "mars_adamw"])
    split = data.Split("training", [np.zeros(10, np.int32)], ["file"])
    corpus = data.Corpus("a corpus", split, split, 50257, is_text=False)
    mesh = sharding.make_mesh(jax.devices(), 8, 768)
    batches = sharding.Batches(mesh, config.micro_batches(8), 480)
    _, shapes = model.define(config.model)
    header = train.describe(config, corpus, mesh, batches, shapes)
    assert "was 3.108 by step 10,000 and 2.849 by step 100,000" in header
    assert "480 x 1024 tokens, 48 at a time, with mars_adamw at 0.006" in header
    assert "124,373,760 parameters" in header and "(8 devices, fsdp 8)" in header


def test_a_finished_run_is_not_overwritten_silently(text):
    config = tiny(text, "adamw", steps=2, sample_tokens=0)
    first = train.train(config)
    before = (config.directory / "metrics.jsonl").read_bytes()
    with pytest.raises(train.TrainingError, match="holds a finished run: pass --overwrite"):
        train.train(config)
    assert (config.directory / "metrics.jsonl").read_bytes() == before
    assert train.train(dataclasses.replace(config, overwrite=True)) == first  # and reproducible


def test_micro_batches_give_the_step_of_the_whole_batch(text):
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 256, (2, 8, 17), dtype=np.int32)
    shape = model.GPTConfig(layers=1, heads=2, width=16, context=16, vocab_size=256)
    graphdef, shapes = model.define(shape)
    start = jax.tree.map(lambda leaf: 0.1 * draw.normal(size=leaf.shape), shapes)
    rate = optimizers.schedule("constant", 1e-2, 10, 0, 0.0)
    tx = optimizers.build(
        "mars_sgdm", rate, rate, weight_decay=0.0, gamma=0.5, steps=10, exact=True
    )
    results = []
    for size in (8, 2):
        config = tiny(text, "mars_sgdm", exact=True, batch_size=8, micro_batch_size=size)
        train_step = step.make_train_step(graphdef, tx, config)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start)
        state = jax.jit(tx.init)(params)
        for i in range(2):
            micro = tokens[i].reshape(-1, size, 17)
            params, state, numbers = train_step(params, state, micro, np.int32(i))
        results.append((params, numbers))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_losses_that_stay_non_finite_stop_the_run(text):
    bad = tiny(text, "adamw", learning_rate=1e30, warmup=0, eval_every=20)
    with pytest.raises(train.TrainingError, match=r"10 steps in a row.*is not finite: use a lower"):
        train.train(bad)
    with pytest.raises(train.TrainingError, match="the validation loss is nan: use a lower"):
        train.train(dataclasses.replace(bad, eval_every=5))
    assert not (text.parent / "run" / "summary.json").exists()


def test_a_step_with_a_non_finite_gradient_is_skipped_and_counted(text):
    shape = model.GPTConfig(layers=1, heads=2, width=16, context=16, vocab_size=256)
    graphdef, _ = model.define(shape)
    params = model.init(shape, 0)
    config = tiny(text, "mars_m", model=shape)
    rate = optimizers.schedule("constant", 1e-2, 10, 0, 0.0)
    tx = optimizers.build("mars_m", rate, rate, weight_decay=0.0, gamma=0.5, steps=10)
    train_step = step.make_train_step(graphdef, tx, config)
    state = jax.jit(tx.init)(params)
    bad = jax.tree.map(jnp.copy, params)
    bad["final_norm"]["scale"] = bad["final_norm"]["scale"].at[0].set(jnp.inf)
    kept = jax.tree.map(np.asarray, (bad, state))
    *after, numbers = train_step(bad, state, np.zeros((1, 4, 17), np.int32), np.int32(0))
    assert numbers["skipped"]
    jax.tree.map(np.testing.assert_array_equal, tuple(after), kept)
    fetched = {"train_loss": np.array([1.0, np.nan, 3.0]), "skipped": np.array([0, 1, 0], bool)}
    assert metrics.mean_of_taken(fetched) == {"train_loss": 2.0, "skipped": 1.0}
    assert train.count_skipped(np.array([True, False, True]), 5, 3, config) == 1


@pytest.mark.parametrize(
    ("name", "exact"), [(n, False) for n in optimizers.NAMES] + [(n, True) for n in MARS]
)
def test_every_optimizer_takes_the_models_parameters(name, exact):
    config = model.GPTConfig(layers=2, heads=2, width=16, context=16, vocab_size=256)
    _, shapes = model.define(config)
    rate = optimizers.schedule("cosine", 1e-3, 10, 2, 0.0)
    tx = optimizers.build(name, rate, rate, weight_decay=0.1, gamma=0.025, steps=10, exact=exact)

    def step(params):
        state = tx.init(params)
        extra = {"prev_grad": params} if exact else {}
        updates, new_state = tx.update(params, state, params, **extra)
        return updates, state, new_state

    updates, state, new_state = jax.eval_shape(step, shapes)
    assert updates == shapes
    assert state == new_state  # shapes and dtypes stay


def test_labels_go_by_path_not_by_axes():
    config = model.GPTConfig(layers=3, heads=2, width=16, context=16, vocab_size=256, bias=True)
    _, params = model.define(config)
    decayed = optimizers.is_matrix(params)
    assert decayed["blocks"]["mlp_in"] == {"kernel": True, "bias": False}  # bias is [L, 4 D]
    assert decayed["blocks"]["mlp_norm"] == {"scale": False, "bias": False}
    assert decayed["token_embedding"] == {"embedding": True}
    kernels = optimizers.kernel_dimensions(params)
    assert kernels["blocks"]["mlp_in"]["kernel"].output_axis == 2
    assert kernels["blocks"]["mlp_in"]["bias"] is None
    assert kernels["token_embedding"]["embedding"] is None
    matrices = optimizers.matrix_dimensions(params)
    assert matrices["token_embedding"]["embedding"].output_axis == 1
    assert matrices["final_norm"]["scale"] is None


def test_decay_leaves_biases_and_norms_alone():
    config = model.GPTConfig(layers=2, heads=2, width=16, context=16, vocab_size=256)
    _, shapes = model.define(config)
    params, zeros = (
        jax.tree.map(lambda leaf, fill=fill: jnp.full(leaf.shape, fill, jnp.float32), shapes)
        for fill in (1.0, 0.0)
    )
    rate = optimizers.schedule("constant", 0.5, 10, 0, 0.0)
    for name in ("adamw", "mars_adamw", "mars_m"):
        tx = optimizers.build(name, rate, rate, weight_decay=0.1, gamma=0.025, steps=10)
        updates = jax.jit(lambda p, z, tx=tx: tx.update(z, tx.init(p), p)[0])(params, zeros)
        matrix = optimizers.is_matrix(params)
        expected = jax.tree.map(lambda p, m: -0.05 * p * m, params, matrix)
        for one, other in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-7, err_msg=name)


def test_schedules():
    cosine, wsd, constant = (
        np.array([float(optimizers.schedule(name, 2.0, 100, 10, 0.1)(i)) for i in range(101)])
        for name in ("cosine", "wsd", "constant")
    )
    for values in (cosine, wsd, constant):
        np.testing.assert_allclose(values[:10], 0.2 * np.arange(1, 11), rtol=1e-6)
    assert cosine[55] == pytest.approx(1.1) and cosine[100] == pytest.approx(0.2)
    assert (wsd[10:81] == 2.0).all() and wsd[90] == pytest.approx(1.1)
    assert wsd[100] == pytest.approx(0.2) and (constant[10:] == 2.0).all()
    assert float(optimizers.schedule("cosine", 2.0, 100, 0, 0.0)(0)) == 2.0


def test_the_fallbacks_rate_follows_the_chosen_one():
    assert optimizers.learning_rates("mars_adamw", "small") == (6e-3, 3e-3)
    assert optimizers.learning_rates("mars_adamw", "small", 2e-3) == (2e-3, 1e-3)
    assert optimizers.learning_rates("mars_m", "small") == (6e-3, 6e-3)


def test_the_command_line_shows_and_takes_the_presets_values():
    config = configs.parse(["--preset", "small", "--optimizer=mars_adamw", "--layers", "2"])
    assert (config.batch_size, config.learning_rate, config.weight_decay) == (480, 6e-3, 0.01)
    assert config.model == dataclasses.replace(model.PRESETS["small"], layers=2)
    assert str(config.directory) == "runs/small-mars_adamw"
    assert configs.parse([]) == configs.default_config()
    assert configs.parse(["--steps", "40"]).warmup == 2  # the default share, not the default number
    assert configs.parse(["--optimizer", "mars_m", "--exact"]).directory.name == "demo-mars_m-exact"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "nowhere: no such file or folder"),
        (["--optimizer", "adamw", "--exact"], "--exact needs one of mars_adamw"),
        (["--prompt", ""], "--prompt is empty"),
        (["--min-rate", "1"], "--min-rate 1 is not between 0 and --learning-rate 0.006"),
        (["--num-processes", "2"], "--coordinator, --num-processes and --process-id go together"),
        (["--learning-rate", "-1"], "--learning-rate is -1: use a number above 0"),
        (["--warmup", "20", "--steps", "20"], "--warmup 20 is not between 0 and --steps 20"),
        (["--optimizer", "adamw", "--gamma", "0.1"], "--gamma and --gamma-end are for MARS"),
        (["--out-dir", "/dev/null/run"], "run's folder /dev/null/run cannot be made"),
        (["--steps", "0"], "--steps is 0: use a number of at least 1"),
        (
            ["--devices", "8", "--batch-size", "6"],
            "--batch-size 6 is not a multiple of the 8 devices",
        ),
    ],
)
def test_wrong_flags_end_with_one_clear_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "--devices", "1", "--steps", "2", *arguments])
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        train.main()
