"""Models as Hugging Face GPT-2 folders."""

import dataclasses
import json
import math
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_nanogpt_model
import test_nanogpt_train
from test_nanogpt_model import TINY, logits, random_params

from examples.nanogpt import data, huggingface, model, plot, train
from examples.nanogpt.checkpoint import Checkpoints

quick_compilation, text = test_nanogpt_model.quick_compilation, test_nanogpt_train.text
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 12))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def zero_padding(params, config):
    """A folder has no rows for what pads the vocabulary."""
    embedding = params["token_embedding"]["embedding"].at[config.vocab_size :].set(0)
    return {**params, "token_embedding": {"embedding": embedding}}


def write_run(run, config, params, steps=1):
    """Checkpoints as the trainer writes them; the parameters after step i are params + i."""
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    for step in range(1, steps + 1):
        training = (jax.tree.map(lambda leaf, i=step: leaf + i, params), (params, jnp.int32(step)))
        settings = {"model": dataclasses.asdict(config), "steps": steps}
        checkpoints.save(step, training, settings)
    checkpoints.close()


def gpt2(weights, tokens, heads, by_layer):
    """Logits in float64 by the names of transformers' GPT2LMHeadModel."""

    def get(name):
        return weights["transformer." + name].astype(np.float64)

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * get(name + ".weight") + get(name + ".bias")

    def linear(x, name):
        return x @ get(name + ".weight") + get(name + ".bias")

    B, T = tokens.shape
    x = get("wte.weight")[tokens] + get("wpe.weight")[:T]
    for i in range(sum(name.endswith("ln_1.weight") for name in weights)):
        q, k, v = (
            a.reshape(B, T, heads, -1).transpose(0, 2, 1, 3)
            for a in np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, -1)
        )
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1]) / (i + 1 if by_layer else 1)
        scores = np.exp(scores) * np.tril(np.ones((T, T)))
        y = scores / scores.sum(-1, keepdims=True) @ v
        x = x + linear(y.transpose(0, 2, 1, 3).reshape(x.shape), f"h.{i}.attn.c_proj")
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))) / 2
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ get("wte.weight").T


@pytest.mark.parametrize("bias", [True, False])
def test_there_and_back_is_exact(bias, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    config = dataclasses.replace(TINY, bias=bias, scale_by_layer=not bias, dropout=0.25)
    graphdef, params = random_params(config)
    huggingface.write(tmp_path / "folder", config, params)
    read_config, read_params = huggingface.load(tmp_path / "folder")
    assert read_config == config
    assert_equal(read_params, zero_padding(params, config))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder"]  # nothing is left beside it
    # The file itself is GPT-2, by transformers' names and layouts.
    weights = safetensors.load_file(tmp_path / "folder" / "model.safetensors")
    assert weights["transformer.wte.weight"].shape == (100, 16)
    assert weights["transformer.h.2.mlp.c_fc.weight"].shape == (16, 64)
    assert weights["transformer.h.2.ln_2.bias"].any() == bias
    expected = gpt2(weights, TOKENS, config.heads, config.scale_by_layer)
    found = logits(graphdef, params, TOKENS)[..., : config.vocab_size]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_openais_own_files_are_read():
    """Names without a prefix, the causal mask as a buffer, half precision."""
    _, params = random_params(TINY)
    params = jax.tree.map(lambda leaf: jnp.float32(jnp.float16(leaf)), zero_padding(params, TINY))
    weights = huggingface.to_weights(params, TINY)
    weights = {name: leaf.astype(np.float16) for name, leaf in weights.items()}
    weights["h.0.attn.bias"] = np.tril(np.ones((1, 1, 12, 12)))
    weights["lm_head.weight"] = weights["wte.weight"]
    read = huggingface.from_weights(weights, TINY)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(read))
    assert_equal(read, params)


def test_openais_config_is_gpt2_small():
    values = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "vocab_size": 50257,
    }
    assert huggingface.from_config(values) == model.GPTConfig(dropout=0.1)
    for key, value in (
        ("activation_function", "relu"),
        ("n_inner", 100),
        ("layer_norm_epsilon", 1e-6),
        ("model_type", "llama"),
        ("tie_word_embeddings", False),
    ):
        with pytest.raises(ValueError, match=rf"config\.json: {key} is {value}, but this GPT-2"):
            huggingface.from_config({**values, key: value})
    with pytest.raises(ValueError, match="differ, but this GPT-2 has one rate"):
        huggingface.from_config({**values, "attn_pdrop": 0.0})


def test_weights_that_do_not_fit_are_named():
    _, params = random_params(TINY)
    weights = huggingface.to_weights(params, TINY)
    with pytest.raises(ValueError, match=r"lacks or should not hold h\.1\.ln_1\.bias"):
        huggingface.from_weights(
            {name: leaf for name, leaf in weights.items() if name != "h.1.ln_1.bias"}, TINY
        )
    with pytest.raises(ValueError, match=r"lacks or should not hold h\.7\.extra"):
        huggingface.from_weights({**weights, "h.7.extra": np.zeros(1)}, TINY)
    turned = {**weights, "h.0.mlp.c_fc.weight": weights["h.0.mlp.c_fc.weight"].T}
    with pytest.raises(ValueError, match=r"c_fc\.weight has shape \(64, 16\), .* \(16, 64\)"):
        huggingface.from_weights(turned, TINY)
    with pytest.raises(ValueError, match=r"bias is not zero, but config\.json says bias is false"):
        huggingface.from_weights(weights, dataclasses.replace(TINY, bias=False))


def test_the_newest_checkpoint_of_a_run_is_exported(tmp_path, monkeypatch, capsys):
    pytest.importorskip("safetensors")
    run, folder = tmp_path / "run", tmp_path / "folder"
    config = dataclasses.replace(TINY, bias=False, unroll=True)
    _, params = random_params(config)
    write_run(run, config, params, steps=3)
    params = jax.tree.map(lambda leaf: leaf + 3, params)
    read_config, read_params = huggingface.load(run)
    assert read_config == config
    assert_equal(read_params, params)
    monkeypatch.setattr(sys, "argv", ["huggingface", "export", str(run), str(folder)])
    huggingface.main()
    assert str(folder) in capsys.readouterr().out
    assert_equal(huggingface.load(folder)[1], zero_padding(params, config))
    with pytest.raises(SystemExit, match=r"error: .*folder exists: choose another"):
        huggingface.main()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        huggingface.load(folder)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no finished checkpoint"):
        huggingface.load(tmp_path / "empty")


@pytest.fixture
def byte_model(tmp_path):
    """A Hugging Face folder with a model of bytes, and that model."""
    pytest.importorskip("safetensors")
    config = dataclasses.replace(TINY, vocab_size=256, bias=False, scale_by_layer=True)
    params = model.init(config, seed=7)
    huggingface.write(tmp_path / "folder", config, params)
    return tmp_path / "folder", config, params


def command_line(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["train", "--devices", "1", "--sample-tokens", "0", *flags])
    train.main()


def losses_of(run):
    return [row["train_loss"] for row in plot.read_metrics(run / "metrics.jsonl") if len(row) > 3]


def test_a_run_starts_from_a_folder(byte_model, text, tmp_path, monkeypatch, capsys):
    folder, config, params = byte_model
    run, split = tmp_path / "run", data.text_file(text).train
    flags = ["--data", str(text), "--init-from", str(folder), "--eval-every", "4"]
    flags += ["--log-every", "1", "--checkpoint-every", "2", "--keep-checkpoints", "9"]
    flags += ["--optimizer", "mars_adamw", "--steps", "4", "--unroll"]
    command_line(monkeypatch, *flags, "--out-dir", str(run))
    assert f"starting from the model in {folder}" in capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["init_from"] == str(folder)
    shape = dataclasses.replace(config, unroll=True)
    assert model.GPTConfig(**summary["model"]) == shape
    # The first loss is that of the folder's model, which no seed of ours has.
    tokens = data.batch(split, 0, 0, 8, shape.context, 256)
    graphdef, _ = model.define(shape)
    first = jax.jit(model.loss, static_argnums=0)(graphdef, params, tokens)
    expected = losses_of(run)
    assert expected[0] == pytest.approx(float(first), abs=1e-5)
    # Resumed, it goes on from its own checkpoint, not from the folder.
    (run / "summary.json").unlink()
    (run / "checkpoints" / "4").rename(tmp_path / "gone")
    command_line(monkeypatch, *flags, "--out-dir", str(run), "--resume")
    assert losses_of(run) == expected
    (run / "summary.json").unlink()
    with pytest.raises(SystemExit, match="made with init_from = "):
        other = shutil.copytree(folder, tmp_path / "other")
        again = [str(other) if flag == str(folder) else flag for flag in flags]
        command_line(monkeypatch, *again, "--out-dir", str(run), "--resume")


def test_what_contradicts_the_folder_ends_with_one_clear_line(
    byte_model, text, tmp_path, monkeypatch
):
    folder, _, _ = byte_model
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    flags = ["--data", str(text), "--out-dir", str(tmp_path / "run"), "--steps", "2"]
    (tmp_path / "bins").mkdir()
    for name in ("train", "val"):
        np.arange(2000, dtype=np.uint16).tofile(tmp_path / "bins" / f"{name}.bin")
    (tmp_path / "bins" / "meta.json").write_text('{"tokenizer": "gpt2"}')
    for more, message in (
        (["--layers", "2"], "layers is 2, but 3 in the model of --init-from"),
        (["--bias"], "bias is True, but False in the model"),
        (["--data", str(tmp_path / "bins")], "vocabulary of 50,257 tokens, .* one of 256"),
        (["--init-from", str(tmp_path)], r"--init-from: .* has no config\.json"),
        (["--init-from", str(wrong)], r"model\.safetensors cannot be read"),
    ):
        (wrong / "model.safetensors").write_bytes(b"12345678cut off")
        with pytest.raises(SystemExit, match=f"error: .*{message}"):
            command_line(monkeypatch, "--init-from", str(folder), *flags, *more)
    assert not (tmp_path / "run").exists()
    values = json.loads((wrong / "config.json").read_text())
    del values["n_head"]
    with pytest.raises(ValueError, match=r"lacks n_head"):
        huggingface.from_config(values)


@pytest.mark.parametrize("bias", [True, False])
def test_transformers_computes_the_same_logits(bias, tmp_path):
    """Runs where torch and transformers are installed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(TINY, bias=bias, scale_by_layer=not bias)
    graphdef, params = random_params(config)
    huggingface.write(tmp_path / "ours", config, params)
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected = theirs.eval()(torch.asarray(TOKENS)).logits.numpy()
    found = logits(graphdef, params, TOKENS)[..., : config.vocab_size]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    again_config, again = huggingface.load(tmp_path / "theirs")
    assert again_config == config
    assert_equal(again, zero_padding(params, config))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["n_head"] == 2
