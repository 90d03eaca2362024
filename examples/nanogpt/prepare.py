"""Tokens of a large corpus as files: `python -m examples.nanogpt.prepare SOURCE OUT_DIR`.

SOURCE is a folder of parquet files with a column of text (OpenWebText, FineWeb-Edu) or a folder of
text files. OUT_DIR gets nanoGPT's train.bin and val.bin, uint16, the end-of-text token after every
document, and meta.json, which names the tokenizer.
"""

import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from tqdm import tqdm

from examples.nanogpt import data
from examples.nanogpt.tokenizer import Tokenizer, by_name, end_of_text

BATCH = 256  # documents at a time


def documents(source: Path, column: str = "text") -> Iterator[str]:
    """The texts of a folder or a file, in order of path and row, read as they are asked for."""
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    parquet = [path for path in files if path.suffix == ".parquet"]
    texts = [path for path in files if path.suffix.lower() in data.TEXT_SUFFIXES]
    if not source.exists() or not (parquet or texts):
        raise data.DataError(
            f"{source} has no parquet and no text files: pass a folder of *.parquet or of files "
            f"ending in {', '.join(data.TEXT_SUFFIXES)}."
        )
    return _rows(parquet, column) if parquet else (_read(path) for path in texts)


def _rows(paths: list[Path], column: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise data.DataError("parquet files need pyarrow: pip install pyarrow") from error
    for path in paths:
        try:
            file = parquet.ParquetFile(path)
            if column not in file.schema_arrow.names:
                raise data.DataError(
                    f"{path} has no column {column!r}, but {', '.join(file.schema_arrow.names)}: "
                    "pass one of them to --column."
                )
            for batch in file.iter_batches(BATCH, columns=[column]):
                yield from (text for text in batch.column(0).to_pylist() if text)
        except pyarrow.ArrowInvalid as error:
            raise data.DataError(f"{path} is no sound parquet file: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise data.DataError(f"{path} is not UTF-8: convert it, or take it away.") from error


def prepare(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT_DIR")],
    tokenizer: Literal["gpt2", "bytes"] = "gpt2",
    held_out: float = 0.005,
    column: str = "text",
    cache_dir: Path = data.CACHE_DIR,
) -> None:
    """Writes train.bin, val.bin and meta.json; the folder appears when all of it is written.

    Args:
        source: A folder of parquet files, or of text files.
        out_dir: A new folder.
        tokenizer: GPT-2's (by tiktoken), or the bytes of the text.
        held_out: The share of documents that go to val.bin, evenly spaced, the first among them.
        column: Of the parquet files.
        cache_dir: Where GPT-2's vocabulary is kept; MARS_OPTAX_CACHE sets it too.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"--held-out is {held_out}: use a share above 0 and below 1.")
    texts = documents(source, column)
    codec = by_name(tokenizer, cache_dir.expanduser())
    with data.new_folder(out_dir) as partial:
        counts = write(texts, codec, partial, held_out)
        meta = {"tokenizer": codec.name, "vocab_size": codec.vocab_size, "tokens": counts}
        (partial / data.META).write_text(json.dumps(meta, indent=1) + "\n")
    print(f"{counts['train']:,} training and {counts['val']:,} validation tokens in {out_dir}")


def write(texts: Iterator[str], codec: Tokenizer, folder: Path, held_out: float) -> dict[str, int]:
    """Streams documents into train.bin and val.bin; how many tokens each has."""
    end = np.array([end_of_text(codec.vocab_size)], "<u2")
    counts, number = {"train": 0, "val": 0}, 0
    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "val.bin", "wb") as val,
        tqdm(unit=" documents", mininterval=1.0) as bar,
    ):
        files = {"train": train, "val": val}
        while batch := list(itertools.islice(texts, BATCH)):
            for tokens in codec.encode(batch):
                held = math.ceil((number + 1) * held_out) > math.ceil(number * held_out)
                name = "val" if held else "train"
                files[name].write(tokens.astype("<u2").tobytes() + end.tobytes())
                counts[name] += len(tokens) + 1
                number += 1
            bar.update(len(batch))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    if not counts["train"]:
        raise data.DataError(
            f"{number} documents, but at least 2 are needed, one of them to hold out."
        )
    return counts


def main() -> None:
    try:
        tyro.cli(prepare, prog="python -m examples.nanogpt.prepare")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; nothing is written")


if __name__ == "__main__":
    main()
