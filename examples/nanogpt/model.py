"""GPT-2 in Flax nnx, its parameters stacked over layers.

Shape letters, the same in every file:
B batch, T tokens of a sequence, D width, H heads, K width of a head, L layers, V vocabulary.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Params = Any  # a nested dict of arrays, all float32
INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """What defines the network. The defaults are GPT-2 small's."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocab_size: int = 50257
    """Token ids that occur; V is this, padded to a multiple of 128 (50304 for GPT-2)."""
    bias: bool = True
    dropout: float = 0.0
    scale_by_layer: bool = False
    """Divide the attention scores of layer l by l (counted from 1), as the MARS authors do."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the matrix products. Parameters, norms, softmax and loss are always float32."""
    unroll: bool = False
    """Unroll the loop over layers: faster steps on a CPU, longer compilation."""
    attention: Literal["auto", "einsum", "xla", "cudnn"] = "auto"
    """`jax.nn.dot_product_attention` by xla or cudnn, or a plain einsum. auto: by the device."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}: change one of them."
            )

    @property
    def padded_vocab(self) -> int:
        return math.ceil(self.vocab_size / 128) * 128


# The authors' runs, and nanoGPT's, have no biases.
PRESETS: dict[str, GPTConfig] = {
    "demo": GPTConfig(4, 4, 96, context=128, bias=False, unroll=True),
    "small": GPTConfig(12, 12, 768, bias=False, scale_by_layer=True),
    "medium": GPTConfig(24, 16, 1024, bias=False, scale_by_layer=True),
    "large": GPTConfig(36, 20, 1280, bias=False, scale_by_layer=True),
    "xl": GPTConfig(48, 25, 1600, bias=False, scale_by_layer=True),
}


class Block(nnx.Module):
    """Attention and feed-forward network, each behind a norm and around a residual."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        D = config.width
        linear = partial(nnx.Linear, use_bias=config.bias, dtype=jnp.dtype(config.dtype), rngs=rngs)
        init = jax.nn.initializers.normal(INIT_STD)
        # 2 L branches add up in the residual stream: this keeps its variance independent of L.
        residual_init = jax.nn.initializers.normal(INIT_STD / math.sqrt(2 * config.layers))
        self.config = config
        self.attention_norm = layer_norm(config, rngs)
        self.attention_in = linear(D, 3 * D, kernel_init=init)
        self.attention_out = linear(D, D, kernel_init=residual_init)
        self.mlp_norm = layer_norm(config, rngs)
        self.mlp_in = linear(D, 4 * D, kernel_init=init)
        self.mlp_out = linear(4 * D, D, kernel_init=residual_init)

    def __call__(self, x: jax.Array, layer: jax.Array | int, key: jax.Array | None) -> jax.Array:
        """x [B, T, D] -> [B, T, D]. `layer` counts from 0."""
        keys = (None, None, None) if key is None else tuple(jax.random.split(key, 3))
        rate, dtype = self.config.dropout, jnp.dtype(self.config.dtype)
        scale: jax.Array | float = 1 / math.sqrt(self.config.width // self.config.heads)
        if self.config.scale_by_layer:
            scale = scale / (layer + 1)
        q, k, v = jnp.split(self.attention_in(self.attention_norm(x).astype(dtype)), 3, axis=-1)
        y = causal_attention(q, k, v, scale, self.config, keys[0])
        x = x + dropout(self.attention_out(y), rate, keys[1]).astype(x.dtype)
        y = jax.nn.gelu(self.mlp_in(self.mlp_norm(x).astype(dtype)), approximate=True)
        return x + dropout(self.mlp_out(y), rate, keys[2]).astype(x.dtype)


class GPT(nnx.Module):
    """GPT-2. The output head is the token embedding."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        init = jax.nn.initializers.normal(INIT_STD)
        embed = partial(nnx.Embed, features=config.width, embedding_init=init, rngs=rngs)
        self.config = config
        self.token_embedding = embed(config.padded_vocab)
        self.position_embedding = embed(config.context)
        self.blocks = nnx.split_rngs(splits=config.layers)(
            nnx.vmap(lambda rngs: Block(config, rngs))
        )(rngs)  # one Block whose parameters are stacked [L, ...]
        self.final_norm = layer_norm(config, rngs)

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [B, T, V] in float32 for tokens [B, T]; dropout only where a key is given."""
        L, T = self.config.layers, tokens.shape[1]
        keys = None if key is None else jax.random.split(key, L + 1)
        x = self.token_embedding(tokens) + self.position_embedding(jnp.arange(T))
        x = dropout(x, self.config.dropout, None if keys is None else keys[L])
        block, stacked = nnx.split(self.blocks)

        def apply(x: jax.Array, inputs: tuple) -> tuple[jax.Array, None]:
            parameters, layer, key = inputs
            return nnx.merge(block, parameters)(x, layer, key), None

        if self.config.unroll:
            for layer, parameters in enumerate(unstack(stacked, L)):
                x, _ = apply(x, (parameters, layer, None if keys is None else keys[layer]))
        else:
            layers = (stacked, jnp.arange(L), None if keys is None else keys[:L])
            x, _ = jax.lax.scan(apply, x, layers)
        dtype = jnp.dtype(self.config.dtype)
        return jnp.einsum(
            "btd,vd->btv",
            self.final_norm(x).astype(dtype),
            self.token_embedding.embedding[...].astype(dtype),
            preferred_element_type=jnp.float32,
        )


def layer_norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.width, epsilon=1e-5, use_bias=config.bias, rngs=rngs)


def unstack(tree: Any, length: int) -> list[Any]:
    """The `length` slices of a tree of stacked arrays [L, ...]."""
    leaves, structure = jax.tree.flatten(tree)
    # The gradient of one split is one concatenation; that of L slices is L padded sums.
    split = [jax.lax.split(leaf, (1,) * length) for leaf in leaves]
    return [jax.tree.unflatten(structure, [parts[i][0] for parts in split]) for i in range(length)]


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: jax.Array | float,
    config: GPTConfig,
    key: jax.Array | None,
) -> jax.Array:
    """q, k, v [B, T, D] -> [B, T, D], every token attending to itself and what came before."""
    B, T, D = q.shape
    heads = (B, T, config.heads, D // config.heads)
    q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(heads)
    implementation = config.attention
    if implementation == "auto":
        implementation = best_attention(config.dtype)
    dropping = key is not None and config.dropout > 0
    if implementation == "einsum" or dropping:  # JAX's attention has no dropout
        q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))  # [B, H, T, K]
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
        weights = dropout(jax.nn.softmax(scores), config.dropout, key).astype(v.dtype)
        y = jnp.swapaxes(jnp.einsum("bhts,bhsk->bhtk", weights, v), 1, 2)
    else:
        # The scale may differ by layer: it is applied to q, since the kernels want a constant.
        q = (q * scale).astype(v.dtype)
        y = jax.nn.dot_product_attention(
            q, k, v, scale=1.0, is_causal=True, implementation=implementation
        )
    return y.reshape(B, T, D)


def best_attention(dtype: str) -> Literal["einsum", "xla", "cudnn"]:
    """The fastest attention on the default device: 1.1 to 2.3 times einsum's way on a CPU."""
    match jax.default_backend():
        case "cpu":
            return "einsum"
        case "gpu" if dtype == "bfloat16":
            return "cudnn"  # which has no float32
        case _:
            return "xla"


def define(config: GPTConfig) -> tuple[nnx.GraphDef, Params]:
    """The network's definition and its parameters' shapes, without any of their memory."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))))
    return graphdef, nnx.to_pure_dict(state)


def init(config: GPTConfig, seed: int) -> Params:
    """Freshly drawn parameters, a nested dict of arrays."""
    draw = jax.jit(lambda key: nnx.to_pure_dict(nnx.state(GPT(config, nnx.Rngs(key)))))
    return draw(jax.random.key(seed))


def count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def logits(
    graphdef: nnx.GraphDef, params: Params, tokens: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    return nnx.merge(graphdef, params)(tokens, key)


def loss(
    graphdef: nnx.GraphDef, params: Params, tokens: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Mean cross-entropy in nats of predicting tokens[:, 1:], for tokens [B, T + 1]."""
    predicted = logits(graphdef, params, tokens[:, :-1], key)
    return optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:]).mean()
