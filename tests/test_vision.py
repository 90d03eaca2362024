"""The image classifiers: data, models, and training on digits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from examples.vision import data, model, train


def records(layout, labels, pixels):
    """CIFAR's binary format, byte by byte."""
    rows = bytearray()
    for label, image in zip(labels, pixels, strict=True):
        rows += bytes([7] * (layout.label_bytes - 1) + [label])  # 7: the coarse label
        for channel in range(3):
            for y in range(32):
                rows += bytes(image[y, x, channel] for x in range(32))
    return bytes(rows)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifars_records_are_read_as_they_are_written(tmp_path, monkeypatch, name):
    layout = data.CIFAR[name]._replace(train_records=4, test_records=2)
    monkeypatch.setitem(data.CIFAR, name, layout)
    count = 4 * len(layout.train_files)
    random = np.random.default_rng(0)
    pixels = random.integers(256, size=(count + 2, 32, 32, 3), dtype=np.uint8)
    labels = random.integers(layout.classes, size=count + 2)
    for i, file in enumerate(layout.train_files):
        part = slice(4 * i, 4 * i + 4)
        (tmp_path / file).write_bytes(records(layout, labels[part], pixels[part]))
    (tmp_path / layout.test_file).write_bytes(records(layout, labels[count:], pixels[count:]))

    found = data.cifar(name, tmp_path)
    kept = count - round(count / 10)
    for split, part in zip(
        found[:3], (slice(kept), slice(kept, count), slice(count, None)), strict=True
    ):
        np.testing.assert_array_equal(split.pixels, pixels[part])
        np.testing.assert_array_equal(split.labels, labels[part])
        assert split.pixels.dtype == np.uint8
        assert split.labels.dtype == np.int32
    assert found.classes == layout.classes


def test_published_sizes():
    sizes = {name: 1 * c.train_records * len(c.train_files) for name, c in data.CIFAR.items()}
    assert sizes == {"cifar10": 50_000, "cifar100": 50_000}
    assert {c.test_records for c in data.CIFAR.values()} == {10_000}


def test_bad_files_are_named(tmp_path):
    layout = data.CIFAR["cifar10"]
    with pytest.raises(data.DataError, match=r"lacks data_batch_1\.bin, .*cifar-10-binary"):
        data.cifar("cifar10", tmp_path)
    path = tmp_path / "test_batch.bin"
    path.write_bytes(bytes(3073 * 2 - 1))
    with pytest.raises(data.DataError, match=r"6,145 bytes instead of 2 records of 3,073"):
        data.read_records(path, layout, 2)
    path.write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(data.DataError, match="label 10, but there are 10 classes"):
        data.read_records(path, layout, 1)


def test_digits_are_split_without_overlap():
    digits = data.digits()
    splits = digits[:3]
    assert [len(split.labels) for split in splits] == list(data.DIGITS_SPLIT)
    images = np.concatenate([split.pixels for split in splits]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    expected = load_digits().data / 16
    np.testing.assert_array_equal(np.sort(images.sum(1)), np.sort(expected.sum(1)))
    assert all(np.bincount(split.labels, minlength=10).min() > 20 for split in splits)


def test_dimension_numbers_are_those_of_kernels():
    _, params, _ = model.split(model.SmallNet(10, nnx.Rngs(0)))
    conv = MuonDimensionNumbers((0, 1, 2), 3)
    assert model.kernel_dimensions(params) == {
        "conv1": {"kernel": conv, "bias": None},
        "conv2": {"kernel": conv, "bias": None},
        "head": {"kernel": MuonDimensionNumbers((0,), 1), "bias": None},
    }


def test_convolutions_are_orthogonalized_as_matrices():
    _, params, _ = model.split(model.SmallNet(10, nnx.Rngs(0)))
    tx = train.build("mars_m", 1.0, weight_decay=0.0)
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), p.shape), params)
    updates, _ = tx.update(grads, tx.init(params), params)
    matrix = updates["conv2"]["kernel"].reshape(9 * 16, 32)
    # 0.2 sqrt(144) times singular values of about 1.
    values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * 12)
    assert values.min() > 0.6 and values.max() < 1.3


def test_resnet18_has_the_published_size_and_learns_its_statistics():
    shapes = nnx.eval_shape(lambda: model.ResNet18(10, nnx.Rngs(0)))
    _, params, rest = model.split(shapes)
    assert sum(p.size for p in jax.tree.leaves(params)) == 11_173_962
    assert sum(p.size for p in jax.tree.leaves(rest)) == 2 * 4800  # mean and variance
    numbers = jax.tree.leaves(
        model.kernel_dimensions(params), is_leaf=lambda x: isinstance(x, MuonDimensionNumbers)
    )
    assert len(numbers) == 21  # 20 convolutions, of which 3 are projections, and the head


@pytest.mark.parametrize(("exact", "stages"), [(False, 2), (True, 1)])
def test_an_epoch_of_a_small_resnet(exact, stages):
    graphdef, params, rest = model.split(model.ResNet18(10, nnx.Rngs(0), 2, stages))
    random = np.random.default_rng(0)
    images = data.Images(
        jnp.asarray(random.integers(256, size=(9, 32, 32, 3), dtype=np.uint8)),
        jnp.asarray(random.integers(10, size=9), jnp.int32),
    )
    tx = train.build("mars_m", 1e-3, weight_decay=0.0, exact=exact)
    start = train.Training(params, rest, tx.init(params))
    after, loss = jax.jit(
        lambda training: train.epoch(graphdef, tx, training, images, jax.random.key(0), 4, exact)
    )(start)
    assert 1.5 < float(loss) < 4.5
    mean = after.rest["norm"]["mean"]
    assert float(jnp.abs(mean).max()) > 0  # the batches' statistics went in
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(after.params), strict=True):
        assert float(jnp.abs(old - new).max()) > 0
    held_out, errors = train.evaluate(graphdef, after.params, after.rest, images)
    assert np.isfinite(held_out) and 0 <= errors <= 1


def test_augmentation_shifts_and_mirrors():
    ramp = np.zeros((64, 32, 32, 3), np.uint8)
    ramp[:, 16, 8] = 255
    seen = np.asarray(train.prepare(jnp.asarray(ramp), jax.random.key(0)))[..., 0]
    assert train.prepare(jnp.asarray(ramp)).max() == (255 - 121) / 64
    places = {tuple(np.argwhere(image == image.max())[0]) for image in seen}
    rows, columns = ({place[axis] for place in places} for axis in (0, 1))
    assert rows == set(range(12, 21))
    assert columns <= set(range(4, 13)) | set(range(19, 28)) and len(columns) > 12
    floats = jnp.ones((2, 8, 8, 1))
    assert train.prepare(floats, jax.random.key(0)) is floats


def test_mars_m_learns_the_digits(capsys):
    loss, errors = train.train(train.Config(epochs=4, learning_rate=0.03))
    assert errors < 0.06
    assert loss < 0.25
    assert f"errors {errors:.2%}" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs must be at least 1, got 0"),
        ({"batch_size": 901}, "901 is more than the 900 training images"),
        ({"optimizer": "adamw", "exact": True}, "--exact needs a MARS optimizer, not adamw"),
        ({"data": "cifar100"}, r"data lacks train\.bin, test\.bin"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        train.train(dataclasses.replace(train.Config(), **changes))
