"""GPT-2 in Flax nnx, its parameters stacked over layers.

Shape letters, the same in every file:
B batch, T tokens of a sequence, D width, H heads, K width of a head, L layers, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
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
    """Of the matrix products, Newton–Schulz's too. Parameters, norms, softmax and loss are always
    float32."""
    unroll: bool = False
    """Unroll the loop over layers: faster steps on a CPU, longer compilation."""
    attention: Literal["auto", "einsum", "xla", "cudnn"] = "auto"
    """`jax.nn.dot_product_attention` by xla or cudnn, or a plain einsum. auto: by the device."""
    remat: bool = False
    """Compute each block a second time in the backward pass instead of keeping its insides."""
    loss_chunk: int = 0
    """Positions whose logits exist at a time in the loss, which takes them twice; 0 for all."""

    def __post_init__(self) -> None:
        if self.loss_chunk < 0 or (self.loss_chunk and self.context % self.loss_chunk):
            raise ValueError(
                f"context {self.context} is not a multiple of loss_chunk {self.loss_chunk}: change "
                "one of them; 0 takes all logits at once."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: use a share of at least 0 and below 1.")
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}: change one of them."
            )

    @property
    def padded_vocab(self) -> int:
        return math.ceil(self.vocab_size / 128) * 128


# The authors' runs, and nanoGPT's, have no biases.
_authors = partial(GPTConfig, bias=False, scale_by_layer=True, loss_chunk=128)
PRESETS: dict[str, GPTConfig] = {
    "demo": GPTConfig(4, 4, 96, context=128, bias=False, unroll=True),
    "small": _authors(12, 12, 768),
    "medium": _authors(24, 16, 1024, remat=True),
    "large": _authors(36, 20, 1280, remat=True),
    "xl": _authors(48, 25, 1600, remat=True),
}


class Linear(nnx.Linear):
    """Adds its bias in float32, so that the bias's gradient is a sum in float32."""

    def __call__(self, x: jax.Array) -> jax.Array:
        # Flat, since XLA copies transposed what a gradient contracts over two axes.
        y = x.astype(self.dtype).reshape(-1, x.shape[-1]) @ self.kernel[...].astype(self.dtype)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else (y + self.bias[...]).astype(self.dtype)


class Block(nnx.Module):
    """Attention and feed-forward network, each behind a norm and around a residual."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        D = config.width
        linear = partial(Linear, use_bias=config.bias, dtype=jnp.dtype(config.dtype), rngs=rngs)
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
        q, k, v = self.project(x)
        y = causal_attention(q, k, v, self.scale(layer), self.config, keys[0])
        return self.finish(x, y, keys[1:])

    def project(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Queries, keys and values, each [B, T, H, K], of x [B, T, D]."""
        H = self.config.heads
        y = self.attention_in(self.attention_norm(x).astype(self.config.dtype))
        return tuple(a.reshape(*x.shape[:2], H, -1) for a in jnp.split(y, 3, axis=-1))

    def scale(self, layer: jax.Array | int) -> jax.Array | float:
        """What the scores of a layer, counted from 0, are multiplied by."""
        scale = 1 / math.sqrt(self.config.width // self.config.heads)
        return scale / (layer + 1) if self.config.scale_by_layer else scale

    def finish(
        self, x: jax.Array, y: jax.Array, keys: tuple[jax.Array | None, ...] = (None, None)
    ) -> jax.Array:
        """Adds what attention found, y [B, T, H, K], to x [B, T, D], then the network's share."""
        rate = self.config.dropout
        y = self.attention_out(y.reshape(x.shape))
        x = x + dropout(y, rate, keys[0]).astype(x.dtype)
        y = jax.nn.gelu(self.mlp_in(self.mlp_norm(x).astype(self.config.dtype)), approximate=True)
        return x + dropout(self.mlp_out(y), rate, keys[1]).astype(x.dtype)


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
        return head(self.hidden(tokens, key), self.token_embedding.embedding[...], self.config)

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """[B, T, D] for tokens [B, T] at positions [T]."""
        return self.token_embedding(tokens) + self.position_embedding(positions)

    def hidden(
        self,
        tokens: jax.Array,
        key: jax.Array | None = None,
        gather: Callable[[Params], Params] = lambda parameters: parameters,
    ) -> jax.Array:
        """What the head takes, [B, T, D] in float32. `gather` sees each layer's parameters."""
        L = self.config.layers
        keys = None if key is None else jax.random.split(key, L + 1)
        x = self.embed(tokens, jnp.arange(tokens.shape[1]))
        x = dropout(x, self.config.dropout, None if keys is None else keys[L])
        block, stacked = nnx.split(self.blocks)

        def apply(x: jax.Array, inputs: tuple) -> tuple[jax.Array, None]:
            parameters, layer, key = inputs
            return nnx.merge(block, gather(parameters))(x, layer, key), None

        if self.config.remat:  # inside a scan nothing tempts XLA to merge the two computations
            apply = jax.checkpoint(apply, prevent_cse=self.config.unroll)
        if self.config.unroll:
            for layer, parameters in enumerate(unstack(stacked, L)):
                x, _ = apply(x, (parameters, layer, None if keys is None else keys[layer]))
        else:
            layers = (stacked, jnp.arange(L), None if keys is None else keys[:L])
            x, _ = jax.lax.scan(apply, x, layers)
        return self.final_norm(x)


def head(x: jax.Array, embedding: jax.Array, config: GPTConfig) -> jax.Array:
    """Logits [..., V] in float32 of x [..., D], by the token embedding [V, D]."""
    logits = jnp.einsum(
        "nd,vd->nv",
        x.astype(config.dtype).reshape(-1, x.shape[-1]),
        embedding.astype(config.dtype),
        preferred_element_type=jnp.float32,
    )
    return logits.reshape(*x.shape[:-1], -1)


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
    """q, k, v [B, T, H, K] -> the same, every token attending to itself and what came before."""
    T = q.shape[1]
    implementation = config.attention
    if implementation == "auto":
        implementation = best_attention(config.dtype)
    dropping = key is not None and config.dropout > 0
    if implementation == "einsum" or dropping:  # JAX's attention has no dropout
        mask = jnp.tril(jnp.ones((T, T), bool))
        if dropping:
            return masked_attention(q, k, v, scale, mask, config.dropout, key)
        half = math.ceil(T / 2)  # the first half of the queries sees as many keys
        first = masked_attention(*(a[:, :half] for a in (q, k, v)), scale, mask[:half, :half])
        return jnp.concatenate([first, masked_attention(q[:, half:], k, v, scale, mask[half:])], 1)
    # The scale may differ by layer: it is applied to q, since the kernels want a constant.
    q = (q * scale).astype(v.dtype)
    return jax.nn.dot_product_attention(
        q, k, v, scale=1.0, is_causal=True, implementation=implementation
    )


def masked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: jax.Array | float,
    mask: jax.Array,
    rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """q [B, T, H, K] over k, v [B, S, H, K] where mask [T, S] allows it -> [B, T, H, K]."""
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))  # [B, H, T, K]
    q = (q * scale).astype(k.dtype)
    if key is None or rate == 0:
        return jnp.swapaxes(attend(q, k, v, mask), 1, 2)
    weights = dropout(attention_weights(q, k, mask), rate, key)
    return jnp.swapaxes(weigh(weights, v), 1, 2)


@jax.custom_vjp
def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B, H, T, K] over k, v [B, H, S, K] where mask [T, S] allows it -> [B, H, T, K]."""
    return _attend_forward(q, k, v, mask)[0]


def attention_weights(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
    """[B, H, T, S] in float32."""
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k, preferred_element_type=jnp.float32)
    return jax.nn.softmax(scores + jnp.where(mask, 0, -jnp.inf))


def weigh(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhts,bhsk->bhtk", weights.astype(v.dtype), v)


def _attend_forward(q, k, v, mask):
    weights = attention_weights(q, k, mask)
    return weigh(weights, v), (q, k, v, weights)


def _attend_backward(kept, dy):
    """The derivative in products that XLA's CPU backend is fast at."""
    q, k, v, weights = kept
    dweights = jnp.einsum("bhtk,bhsk->bhts", dy, v, preferred_element_type=jnp.float32)
    total = jnp.sum(weights * dweights, axis=-1, keepdims=True)
    dscores = weights * (dweights - total)
    # Contractions over the last axis are fast; without the barrier XLA would undo the transposes.
    by_key, dby_key = jax.lax.optimization_barrier(
        (jnp.swapaxes(weights, 2, 3), jnp.swapaxes(dscores, 2, 3))
    )
    dq = jnp.einsum("bhts,bhsk->bhtk", dscores, k)
    dk = jnp.einsum("bhst,bhtk->bhsk", dby_key, q)
    dv = jnp.einsum("bhst,bhtk->bhsk", by_key, dy)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend.defvjp(_attend_forward, _attend_backward)


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
    graphdef: nnx.GraphDef,
    params: Params,
    tokens: jax.Array,
    key: jax.Array | None = None,
    gather: Callable[[Params], Params] = lambda parameters: parameters,
) -> jax.Array:
    """Mean cross-entropy in nats of predicting tokens[:, 1:], for tokens [B, T + 1].

    `gather` brings parameters to where they are used, those of a layer within the loop over layers.
    """
    outside = {name: tree if name == "blocks" else gather(tree) for name, tree in params.items()}
    network = nnx.merge(graphdef, outside)
    x, targets = network.hidden(tokens[:, :-1], key, gather), tokens[:, 1:]
    chunk, T = network.config.loss_chunk, targets.shape[1]
    one = partial(_summed_loss, network.token_embedding.embedding[...], config=network.config)
    if chunk in (0, T):
        return one(x, targets) / targets.size
    if T % chunk:
        raise ValueError(f"{T} positions are not a multiple of loss_chunk {chunk}: change it.")
    chunks = [jnp.stack(jnp.split(a, T // chunk, axis=1)) for a in (x, targets)]
    # Logits are not kept for the backward pass but computed again: V is much more than D.
    again = jax.checkpoint(one, prevent_cse=False)
    total, _ = jax.lax.scan(lambda total, c: (total + again(*c), None), jnp.float32(0), chunks)
    return total / targets.size


def _summed_loss(
    embedding: jax.Array, x: jax.Array, targets: jax.Array, *, config: GPTConfig
) -> jax.Array:
    predicted = head(x, embedding, config)
    if config.padded_vocab > config.vocab_size:  # what is never a target has no probability
        occurs = jnp.arange(config.padded_vocab) < config.vocab_size
        predicted = jnp.where(occurs, predicted, -jnp.inf)
    return optax.softmax_cross_entropy_with_integer_labels(predicted, targets).sum()
