"""Text from a model, with a cache and without."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
import test_nanogpt_model
import test_nanogpt_train
from test_nanogpt_huggingface import write_run
from test_nanogpt_model import TINY, logits, random_params

from examples.nanogpt import huggingface, model, sample, train

quick_compilation = test_nanogpt_model.quick_compilation
text = test_nanogpt_train.text
extend = jax.jit(sample.extend, static_argnums=0)
PROMPT = np.array([3, 1, 4, 1, 5])


@pytest.mark.parametrize("scale_by_layer", [False, True])
def test_the_cache_changes_no_logits(scale_by_layer):
    config = dataclasses.replace(TINY, scale_by_layer=scale_by_layer, bias=scale_by_layer)
    graphdef, params = random_params(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, config.context))
    cache, found = sample.make_cache(config, batch=2), []
    for start, stop in [(0, 5), *((i, i + 1) for i in range(5, config.context))]:
        x, cache = extend(graphdef, params, tokens[:, start:stop], start, cache)
        found.append(model.head(x, params["token_embedding"]["embedding"], config))
    expected = logits(graphdef, params, tokens)
    np.testing.assert_allclose(np.concatenate(found, 1), expected, rtol=1e-5, atol=1e-5)


def windows_of(prompt, continuation, context):
    """What each token was drawn from: all before it; of a full context, its later half."""
    window = list(prompt[-context:])
    for token in continuation:
        yield np.array(window)
        if len(window) == context:
            window = window[context // 2 :]
        window.append(token)


def logits_before(graphdef, params, config, prompt, continuation):
    """The logits [V] that each token was drawn from, without a cache."""
    for window in windows_of(prompt, continuation, config.context):
        padded = np.zeros((1, config.context), int)
        padded[0, : window.size] = window
        yield np.asarray(logits(graphdef, params, padded)[0, window.size - 1, : config.vocab_size])


@pytest.mark.parametrize("prompt", [PROMPT, np.arange(20)])
def test_the_likeliest_tokens_are_those_of_full_passes(prompt):
    graphdef, params = random_params(TINY)
    found = sample.generate(graphdef, params, TINY, prompt, 25, temperature=0)
    for token, row in zip(found, logits_before(graphdef, params, TINY, prompt, found), strict=True):
        assert row[token] >= row.max() - 1e-4


def test_drawn_tokens_keep_to_top_k_and_top_p_and_follow_the_seed():
    graphdef, params = random_params(TINY)
    draw = lambda **kwargs: sample.generate(graphdef, params, TINY, PROMPT, 25, **kwargs)  # noqa: E731
    greedy = draw(temperature=0)
    np.testing.assert_array_equal(draw(temperature=5.0, top_k=1), greedy)
    np.testing.assert_array_equal(draw(temperature=5.0, top_p=1e-6), greedy)
    found = draw(temperature=50.0, top_k=3, seed=1)
    ranks = [
        int((row > row[token] + 1e-4).sum())
        for token, row in zip(
            found, logits_before(graphdef, params, TINY, PROMPT, found), strict=True
        )
    ]
    assert set(ranks) == {0, 1, 2}
    np.testing.assert_array_equal(found, draw(temperature=50.0, top_k=3, seed=1))
    assert not np.array_equal(found, draw(temperature=50.0, top_k=3, seed=2))


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (2, 1.0, {1, 3}),
        (9, 1.0, {0, 1, 2, 3}),
        (0, 0.7, {1, 3}),  # .5 + .3
        (0, 0.49, {1}),
        (0, 0.81, {0, 1, 3}),
        (2, 0.62, {1}),  # of two, the likelier one has .5 / .8 = .625
        (2, 0.63, {1, 3}),
    ],
)
def test_restricted_logits(top_k, top_p, left):
    probabilities = np.array([0.15, 0.5, 0.05, 0.3], np.float32)
    found = np.asarray(sample.restrict(np.log(probabilities), top_k, top_p))
    assert set(np.flatnonzero(np.isfinite(found))) == left
    np.testing.assert_array_equal(found[sorted(left)], np.log(probabilities)[sorted(left)])


def test_wrong_arguments_are_named():
    graphdef, params = random_params(TINY)
    for arguments, message in (
        ({"tokens": 0}, "tokens is 0: use at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0: use above 0 and at most 1"),
        ({"prompt": np.array([100])}, "prompt holds token 100, beyond the vocabulary of 100"),
    ):
        with pytest.raises(ValueError, match=message):
            sample.generate(graphdef, params, TINY, **{"prompt": PROMPT, "tokens": 3, **arguments})


def main(program, monkeypatch, capsys, *arguments):
    """What a command line prints."""
    monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
    program.main()
    return capsys.readouterr().out


def test_the_command_line_continues_a_text(tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(TINY, vocab_size=256, layers=2)
    graphdef, params = random_params(config)
    write_run(tmp_path / "run", config, params)
    text = main(sample, monkeypatch, capsys, tmp_path / "run", "--prompt", "åß", "--tokens", 8)
    params = jax.tree.map(lambda leaf: leaf + 1, params)
    prompt = np.frombuffer("åß".encode(), np.uint8)
    expected = sample.generate(graphdef, params, config, prompt, 8).astype(np.uint8)
    assert text == "åß" + expected.tobytes().decode(errors="replace") + "\n"
    with pytest.raises(SystemExit, match="error: prompt is empty"):
        main(sample, monkeypatch, capsys, tmp_path / "run", "--prompt", "")
    with pytest.raises(SystemExit, match=r"error: .* has neither `checkpoints` nor config\.json"):
        main(sample, monkeypatch, capsys, tmp_path)


@pytest.mark.slow
def test_a_trained_run_goes_on_as_it_did_at_its_end_and_from_hugging_face(
    text, monkeypatch, capsys
):
    pytest.importorskip("safetensors")
    config = test_nanogpt_train.tiny(
        text, "adamw", steps=2, checkpoint_every=2, prompt="All ", temperature=0.0
    )
    train.train(config)
    printed = capsys.readouterr().out
    run, folder = config.directory, text.parent / "huggingface"
    arguments = ["--prompt", "All ", "--tokens", 8, "--temperature", 0]
    found = main(sample, monkeypatch, capsys, run, *arguments)
    assert found.startswith("All ") and found.removesuffix("\n") in printed
    main(huggingface, monkeypatch, capsys, "export", run, folder)
    assert main(sample, monkeypatch, capsys, folder, *arguments) == found
