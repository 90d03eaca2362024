"""Text from a model: one token after the other, each from a full forward pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.nanogpt import model


@partial(jax.jit, static_argnames=("graphdef", "context", "vocab", "tokens"))
def _continue(
    graphdef: nnx.GraphDef,
    params: model.Params,
    window: jax.Array,
    length: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    context: int,
    vocab: int,
    tokens: int,
) -> jax.Array:
    def next_token(carry: tuple, key: jax.Array) -> tuple:
        window, length = carry
        logits = model.logits(graphdef, params, window[None])[0, length - 1, :vocab]
        greedy = jnp.argmax(logits)
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, greedy)
        full = length == context
        window = jnp.where(full, jnp.roll(window, -1), window)
        window = window.at[jnp.where(full, context - 1, length)].set(token)
        return (window, jnp.minimum(length + 1, context)), token

    return jax.lax.scan(next_token, (window, length), jax.random.split(key, tokens))[1]


def generate(
    graphdef: nnx.GraphDef,
    params: model.Params,
    config: model.GPTConfig,
    prompt: np.ndarray,
    tokens: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
) -> np.ndarray:
    """`tokens` tokens that follow the prompt; the likeliest ones at temperature 0."""
    if prompt.size == 0:
        raise ValueError("prompt is empty: give at least one token.")
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
        context=config.context,
        vocab=config.vocab_size,
        tokens=tokens,
    )
    return np.asarray(continuation)
