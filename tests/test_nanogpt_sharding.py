"""One device and eight (virtual) ones train alike, and share the state between them."""

import dataclasses
import signal
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_nanogpt_train
from jax.sharding import PartitionSpec
from test_nanogpt_checkpoint import start, wait_for_step
from test_nanogpt_train import rows_of, tiny

from examples.nanogpt import data, model, optimizers, plot, sharding, train

quick_compilation, text = test_nanogpt_train.quick_compilation, test_nanogpt_train.text


def losses(config):
    return [row["train_loss"] for row in rows_of(config) if "train_loss" in row]


def test_rules():
    assert sharding.spec((12, 768, 3072), 8) == PartitionSpec(None, None, "fsdp")  # kernel [L,m,n]
    assert sharding.spec((12, 3072, 768), 8) == PartitionSpec(None, "fsdp", None)
    assert sharding.spec((50304, 768), 8) == PartitionSpec("fsdp", None)  # embedding [V, D]
    assert sharding.spec((12, 768), 8) == PartitionSpec(None, "fsdp")  # norms [L, D]
    assert sharding.spec((), 8) == sharding.spec((7, 5), 8) == PartitionSpec()
    with pytest.raises(ValueError, match="--fsdp 3 does not divide the 8 devices"):
        sharding.make_mesh(jax.devices(), 3, 16)
    with pytest.raises(ValueError, match="--devices is 100, but there are 8"):
        sharding.choose_devices(100)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "exact"), [("mars_m", False), ("mars_adamw", True)])
def test_eight_devices_give_the_loss_curve_of_one(optimizer, exact, text):
    config = tiny(
        text, optimizer, exact=exact, steps=50, batch_size=8, micro_batch_size=8, log_every=1
    )
    train.train(config)
    expected = losses(config)
    assert len(expected) == 50
    for fsdp in (1, 8):
        eight = dataclasses.replace(
            config, devices=8, fsdp=fsdp, out_dir=text.parent / f"fsdp{fsdp}"
        )
        train.train(eight)
        np.testing.assert_allclose(losses(eight), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_300_steps_hold_an_eighth_of_the_optimizer_state(text, monkeypatch):
    """Measured on the arrays at the end of the run, when its last checkpoint is saved."""
    held: dict[int, list[int]] = {}

    def measure(self, step, training, settings):
        leaves = [x for x in jax.tree.leaves(training[1]) if isinstance(x, jax.Array)]
        shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
        held[step] = [
            sum(s.data.nbytes for s in shards if s.device == device) for device in jax.devices()
        ]
        held[step].append(sum(leaf.nbytes for leaf in leaves))

    monkeypatch.setattr(train.Checkpoints, "save", measure)
    shape = model.GPTConfig(layers=2, heads=2, width=64, context=16, bias=False)
    settings = {"model": shape, "steps": 300, "batch_size": 8, "micro_batch_size": 8}
    settings |= {"log_every": 1, "eval_every": 300, "checkpoint_every": 300}
    settings |= {"learning_rate": 1e-3}
    config = tiny(text, "mars_adamw", **settings, sample_tokens=0)
    train.train(config)
    eight = dataclasses.replace(config, devices=8, fsdp=8, out_dir=text.parent / "eight")
    train.train(eight)
    *devices, total = held[300]
    # The last gradient of matrices and Adam's two moments.
    parameters = model.count(model.define(dataclasses.replace(shape, vocab_size=256))[1])
    assert total > 0.99 * 3 * 4 * parameters and len(devices) == 8
    assert max(devices) <= total / 8 * 1.1
    expected = losses(config)
    assert len(expected) == 300 and expected[-1] < expected[0] - 2
    np.testing.assert_allclose(losses(eight), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "exact"), [("mars_m", False), ("mars_adamw", True)])
def test_a_run_resumes_on_another_number_of_devices(optimizer, exact, text):
    """The same run, resumed on 8 devices from a checkpoint that one device wrote."""
    config = tiny(
        text, optimizer, exact=exact, steps=20, batch_size=8, micro_batch_size=8, log_every=1
    )
    train.train(dataclasses.replace(config, checkpoint_every=10, keep_checkpoints=5))
    expected = losses(config)
    # As if the run had been killed after step 10.
    (config.directory / "summary.json").unlink()
    (config.directory / "checkpoints" / "20").rename(config.directory / "gone")
    train.train(dataclasses.replace(config, resume=True, devices=8, fsdp=4))
    np.testing.assert_allclose(losses(config), expected, rtol=0, atol=1e-5)


def start_two(folder, corpus, *flags):
    """The same command for each of two processes, which speak over gloo."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    hosts = ["--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id"]
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    return [start(folder, corpus, *flags, *hosts, str(i), **gloo) for i in range(2)]


@pytest.mark.slow
def test_two_processes_give_the_loss_curve_of_one_device(text, tmp_path):
    flags = ["--steps", "50", "--fsdp", "2", "--checkpoint-every", "0"]
    processes = start_two(tmp_path / "two", text, *flags)
    alone = start(tmp_path / "one", text, *flags[:2])
    outputs = [process.communicate(timeout=300) for process in (*processes, alone)]
    assert [process.returncode for process in (*processes, alone)] == [0, 0, 0], outputs
    assert "(2 devices, fsdp 2)" in outputs[0][0] and "training" not in outputs[1][0]
    two, one = (losses_in(tmp_path / name) for name in ("two", "one"))
    assert len(one) == 51  # of 50 steps and a validation
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_stops_both_and_one_goes_on(text, tmp_path):
    flags = ["--steps", "400", "--checkpoint-every", "10000", "--fsdp", "2"]
    folder = tmp_path / "two"
    processes = start_two(folder, text, *flags)
    wait_for_step(folder, 5, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "stopped by SIGTERM after step" in outputs[0][0]
    for name, more in (("two", ["--resume"]), ("one", [])):
        process = start(tmp_path / name, text, *flags[:4], *more)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert ("resuming after step" in output) == (name == "two")
    np.testing.assert_allclose(losses_in(folder), losses_in(tmp_path / "one"), rtol=0, atol=1e-3)


def losses_in(folder):
    rows = plot.read_metrics(folder / "metrics.jsonl")
    return [row[key] for row in rows for key in ("train_loss", "validation_loss") if key in row]


def test_a_process_reads_only_the_rows_of_its_devices():
    """As if the last two of eight devices were this process's."""
    mesh = sharding.make_mesh(jax.devices(), 2, 16)
    batches = sharding.Batches(mesh, 3, 24)
    split = data.Split("training", [np.arange(1000) % 251], ["file"])
    whole = data.batch(split, 0, 7, 24, 5, 256)
    np.testing.assert_array_equal(batches.place(whole).reshape(24, 6), whole)
    batches.rows = np.array([6, 7, 14, 15, 22, 23])
    read = data.batch(split, 0, 7, 24, 5, 256, rows=batches.rows)
    np.testing.assert_array_equal(read, whole[batches.rows])


@pytest.mark.parametrize(("optimizer", "exact"), [("mars_m", False), ("mars_adamw", True)])
def test_a_device_holds_an_eighth_of_the_optimizer_state(optimizer, exact):
    shape = model.GPTConfig(layers=2, heads=2, width=64, context=64, vocab_size=256, bias=False)
    _, shapes = model.define(shape)
    rate = optimizers.schedule("constant", 1e-3, 10, 0, 0.0)
    tx = optimizers.build(
        optimizer, rate, rate, weight_decay=0.1, gamma=0.025, steps=10, exact=exact
    )
    mesh = sharding.make_mesh(jax.devices(), 8, 64)
    where = sharding.of_training(mesh, jax.eval_shape(tx.init, shapes))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    state = jax.tree.leaves(jax.jit(tx.init, out_shardings=where)(params))
    total = sum(leaf.nbytes for leaf in state)
    for device in range(8):
        held = sum(leaf.addressable_shards[device].data.nbytes for leaf in state)
        assert held <= total * (1 / 8) * 1.1
