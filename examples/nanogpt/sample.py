"""Text from a model: `python -m examples.nanogpt.sample RUN_OR_HUGGING_FACE_FOLDER --help`."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from examples.nanogpt import data, huggingface, model, tokenizer

Cache = tuple[jax.Array, jax.Array]  # keys and values, each [L, B, S, H, K]


def make_cache(config: model.GPTConfig, batch: int = 1) -> Cache:
    """A cache for S = context tokens."""
    heads = (config.heads, config.width // config.heads)
    zeros = jnp.zeros((config.layers, batch, config.context, *heads), config.dtype)
    return zeros, zeros


def extend(
    graphdef: nnx.GraphDef,
    params: model.Params,
    tokens: jax.Array,
    position: jax.Array | int,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """What the head takes, [B, T, D], of tokens [B, T] at `position` and on; the cache with them.

    The cache holds what comes before `position`; what it holds behind is not looked at.
    """
    network = nnx.merge(graphdef, params)
    config = network.config
    positions = position + jnp.arange(tokens.shape[1])
    mask = jnp.arange(config.context) <= positions[:, None]  # [T, S]
    block, stacked = nnx.split(network.blocks)

    def apply(x: jax.Array, inputs: tuple) -> tuple[jax.Array, Cache]:
        parameters, layer, keys, values = inputs
        own = nnx.merge(block, parameters)
        q, k, v = own.project(x)
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(kept, new.astype(kept.dtype), position, axis=1)
            for kept, new in ((keys, k), (values, v))
        )
        y = model.masked_attention(q, keys, values, own.scale(layer), mask)
        return own.finish(x, y), (keys, values)

    x = network.embed(tokens, positions)
    x, cache = jax.lax.scan(apply, x, (stacked, jnp.arange(config.layers), *cache))
    return network.final_norm(x), cache


def restrict(logits: jax.Array, top_k: jax.Array | int, top_p: jax.Array | float) -> jax.Array:
    """Logits [V] with -inf for what may not be drawn.

    Left are the `top_k` likeliest tokens (0: all), and of their distribution the fewest, likeliest
    first, that have `top_p` of the probability together; the likeliest is always left.
    """
    falling = jnp.sort(logits, descending=True)
    rank = jnp.arange(logits.size)
    falling = jnp.where((top_k == 0) | (rank < top_k), falling, -jnp.inf)
    weights = jax.nn.softmax(falling)
    before = jnp.cumsum(weights) - weights
    left = (falling > -jnp.inf) & ((top_p >= 1) | (before < top_p) | (rank == 0))
    return jnp.where(logits >= jnp.min(falling, where=left, initial=jnp.inf), logits, -jnp.inf)


@partial(jax.jit, static_argnames=("graphdef", "tokens"))
def _continue(
    graphdef: nnx.GraphDef,
    params: model.Params,
    window: jax.Array,
    length: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    tokens: int,
) -> jax.Array:
    """`tokens` tokens after the first `length` of window [S]."""
    config = nnx.merge(graphdef, params).config
    S = config.context

    def prefill(window: jax.Array, length: jax.Array) -> tuple[jax.Array, Cache]:
        x, cache = extend(graphdef, params, window[None], 0, make_cache(config))
        return x[0, length - 1], cache

    def make_room(window, length, token, cache):
        """Positions are learned: a full cache cannot move on, and is made of its later half."""
        window = jnp.roll(window, -(S // 2))
        length = S - S // 2
        window = window.at[length].set(token)
        return (window, length + 1, *prefill(window, length + 1))

    def append(window, length, token, cache):
        x, cache = extend(graphdef, params, token[None, None], length, cache)
        return window.at[length].set(token), length + 1, x[0, 0], cache

    def next_token(carry: tuple, key: jax.Array) -> tuple:
        window, length, x, cache = carry
        logits = model.head(x, params["token_embedding"]["embedding"], config)[: config.vocab_size]
        drawn = jax.random.categorical(
            key, restrict(logits / jnp.maximum(temperature, 1e-6), top_k, top_p)
        )
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(window.dtype)
        return jax.lax.cond(length < S, append, make_room, window, length, token, cache), token

    carry = (window, length, *prefill(window, length))
    return jax.lax.scan(next_token, carry, jax.random.split(key, tokens))[1]


def generate(
    graphdef: nnx.GraphDef,
    params: model.Params,
    config: model.GPTConfig,
    prompt: np.ndarray,
    tokens: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
) -> np.ndarray:
    """`tokens` tokens that follow the prompt; the likeliest ones at temperature 0."""
    prompt = np.asarray(prompt)
    if prompt.size == 0:
        raise ValueError("prompt is empty: give at least one token.")
    if prompt.max() >= config.vocab_size:
        raise ValueError(
            f"prompt holds token {prompt.max()}, beyond the vocabulary of {config.vocab_size:,}: "
            "use the tokenizer that the model was trained with."
        )
    check(tokens, temperature, top_k, top_p)
    prompt = prompt[-config.context :]
    window = np.zeros(config.context, np.int32)
    window[: prompt.size] = prompt
    continuation = _continue(
        graphdef,
        params,
        window,
        np.int32(prompt.size),
        jax.random.key(seed),
        np.float32(temperature),
        np.int32(top_k),
        np.float32(top_p),
        tokens=tokens,
    )
    return np.asarray(continuation)


def check(tokens: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
    """Raises where `generate` would; a trainer asks before it trains."""
    for name, value, allowed, wanted in (
        ("tokens", tokens, tokens >= 1, "at least 1"),
        ("temperature", temperature, temperature >= 0, "0 (the likeliest token) or more"),
        ("top_k", top_k, top_k >= 0, "1 or more, or 0 for all tokens"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
    ):
        if not allowed:
            raise ValueError(f"{name} is {value}: use {wanted}.")


def text(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    prompt: str = "\n",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    cache_dir: Path = data.CACHE_DIR,
) -> str:
    """A prompt and what a model makes of it.

    Args:
        folder: A run's folder (its newest checkpoint is taken) or a Hugging Face GPT-2.
        prompt: What the text begins with.
        tokens: How many tokens to add.
        temperature: 0 takes the likeliest token; 1 draws by the model's probabilities.
        top_k: Draw among so many likeliest tokens; 0 for all.
        top_p: Draw among the likeliest tokens that have this probability together.
        seed: Of the draws.
        cache_dir: Where GPT-2's vocabulary is kept; MARS_OPTAX_CACHE sets it too.
    """
    config, params = huggingface.load(folder)
    codec = tokenizer.of_vocabulary(config.vocab_size, cache_dir.expanduser())
    graphdef, _ = model.define(config)
    continuation = generate(
        graphdef,
        params,
        config,
        codec.encode([prompt])[0],
        tokens,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    return prompt + codec.decode(continuation.tolist())


def main() -> None:
    try:
        print(tyro.cli(text, prog="python -m examples.nanogpt.sample"))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
