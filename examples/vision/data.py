"""Images and labels: scikit-learn's digits, and CIFAR-10 and CIFAR-100 from their binary files."""

from pathlib import Path
from typing import NamedTuple

import numpy as np


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the value and the remedy."""


class Images(NamedTuple):
    pixels: np.ndarray  # [N, H, W, C]
    labels: np.ndarray  # [N], int32

    def part(self, start: int, end: int) -> "Images":
        return Images(self.pixels[start:end], self.labels[start:end])


class Data(NamedTuple):
    """Settings are chosen by `validation`; `test` is for what is reported."""

    train: Images
    validation: Images
    test: Images
    classes: int


class Cifar(NamedTuple):
    """The binary format: records of one or two label bytes and 3 x 32 x 32 bytes of pixels."""

    url: str
    train_files: tuple[str, ...]
    test_file: str
    train_records: int  # in each file
    test_records: int
    label_bytes: int  # the last one is the label; CIFAR-100 has a coarse one before it
    classes: int


_HOME = "https://www.cs.toronto.edu/~kriz/"
CIFAR = {
    "cifar10": Cifar(
        _HOME + "cifar-10-binary.tar.gz",
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        "test_batch.bin",
        10_000,
        10_000,
        label_bytes=1,
        classes=10,
    ),
    "cifar100": Cifar(
        _HOME + "cifar-100-binary.tar.gz",
        ("train.bin",),
        "test.bin",
        50_000,
        10_000,
        label_bytes=2,
        classes=100,
    ),
}
SIDE, CHANNELS = 32, 3
VALIDATION_SHARE = 0.1  # of CIFAR's training images, the last ones
DIGITS_SPLIT = (900, 447, 450)


def digits() -> Data:
    """1,797 images of 8 x 8 x 1 pixels in [0, 1], shuffled once and for all."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "The digits come with scikit-learn, which is not installed: "
            "pip install 'mars-optax[vision]'."
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels = (pixels[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    everything = Images(pixels, labels[order].astype(np.int32))
    ends = np.cumsum((0, *DIGITS_SPLIT))
    train, validation, test = (everything.part(ends[i], ends[i + 1]) for i in range(3))
    return Data(train, validation, test, 10)


def cifar(name: str, directory: Path) -> Data:
    """CIFAR-10 or CIFAR-100 from the unpacked binary files; pixels [N, 32, 32, 3] are bytes."""
    layout = CIFAR[name]
    if missing := [
        f for f in (*layout.train_files, layout.test_file) if not (directory / f).is_file()
    ]:
        raise DataError(
            f"{directory} lacks {', '.join(missing)}: unpack {layout.url} (the binary version) and "
            "name its folder by --data-dir."
        )
    parts = [read_records(directory / f, layout, layout.train_records) for f in layout.train_files]
    train = Images(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    test = read_records(directory / layout.test_file, layout, layout.test_records)
    count = len(train.labels)
    kept = count - round(VALIDATION_SHARE * count)
    return Data(train.part(0, kept), train.part(kept, count), test, layout.classes)


def read_records(path: Path, layout: Cifar, records: int) -> Images:
    """The images of one file, whose size and labels are checked."""
    record = layout.label_bytes + CHANNELS * SIDE * SIDE
    size = path.stat().st_size
    if size != records * record:
        raise DataError(
            f"{path} has {size:,} bytes instead of {records:,} records of {record:,}: it is cut "
            f"off, or not in CIFAR's binary format; unpack {layout.url} again."
        )
    rows = np.fromfile(path, np.uint8).reshape(records, record)
    labels = rows[:, layout.label_bytes - 1].astype(np.int32)
    if labels.max() >= layout.classes:
        raise DataError(
            f"{path} has the label {labels.max()}, but there are {layout.classes} classes: unpack "
            f"{layout.url} again."
        )
    planes = rows[:, layout.label_bytes :].reshape(-1, CHANNELS, SIDE, SIDE)
    return Images(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels)
