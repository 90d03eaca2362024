"""One device and eight (virtual) ones train alike, and share the state between them."""

import dataclasses

import jax
import numpy as np
import pytest
import test_nanogpt_train
from jax.sharding import PartitionSpec
from test_nanogpt_train import rows_of, tiny

from examples.nanogpt import model, optimizers, sharding, train

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
def test_a_run_resumes_on_another_number_of_devices(text):
    """The same run, resumed on 8 devices from a checkpoint that one device wrote."""
    config = tiny(text, "mars_m", steps=20, batch_size=8, micro_batch_size=8, log_every=1)
    train.train(dataclasses.replace(config, checkpoint_every=10, keep_checkpoints=5))
    expected = losses(config)
    # As if the run had been killed after step 10.
    (config.directory / "summary.json").unlink()
    (config.directory / "checkpoints" / "20").rename(config.directory / "gone")
    train.train(dataclasses.replace(config, resume=True, devices=8, fsdp=4))
    np.testing.assert_allclose(losses(config), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("optimizer", "exact"), [("mars_m", False), ("mars_adamw", True)])
def test_a_device_holds_an_eighth_of_the_optimizer_state(optimizer, exact):
    shape = model.GPTConfig(layers=2, heads=2, width=64, context=64, vocab_size=256, bias=False)
    _, shapes = model.define(shape)
    rate = optimizers.schedule("constant", 1e-3, 10, 0, 0.0)
    tx = optimizers.build(
        optimizer, rate, rate, weight_decay=0.1, gamma=0.025, steps=10, exact=exact
    )
    mesh = sharding.make_mesh(jax.devices(), 8, 64)
    state = jax.eval_shape(tx.init, shapes)
    shardings = sharding.of_training(mesh, state)
    size = lambda shape, leaf: np.prod(shape) * leaf.dtype.itemsize  # noqa: E731
    leaves = list(zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True))
    total = sum(size(leaf.shape, leaf) for leaf, _ in leaves)
    share = sum(size(where.shard_shape(leaf.shape), leaf) for leaf, where in leaves)
    assert share <= total * (1 / 8) * 1.1
