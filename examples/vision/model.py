"""A small convolutional network, ResNet-18 for 32 x 32 pixels, and their loss."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

Tree = Any  # a nested dict of arrays


class SmallNet(nnx.Module):
    """Two convolutions and a linear layer, for images of 8 x 8 x 1."""

    def __init__(self, classes: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 32, classes, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        return self.head(x.reshape(len(x), -1))


class Block(nnx.Module):
    """Two 3 x 3 convolutions beside an identity, which is projected where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        conv = partial(nnx.Conv, padding="SAME", use_bias=False, rngs=rngs)
        self.conv1 = conv(inputs, outputs, (3, 3), strides=stride)
        self.norm1 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.conv2 = conv(outputs, outputs, (3, 3))
        self.norm2 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.is_projected = stride != 1 or inputs != outputs
        if self.is_projected:
            self.projection = conv(inputs, outputs, (1, 1), strides=stride)
            self.norm3 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        average = not train
        y = nnx.relu(self.norm1(self.conv1(x), use_running_average=average))
        y = self.norm2(self.conv2(y), use_running_average=average)
        if self.is_projected:
            x = self.norm3(self.projection(x), use_running_average=average)
        return nnx.relu(x + y)


class ResNet18(nnx.Module):
    """He et al., 2016, with the 3 x 3 stem without pooling that is usual for 32 x 32 pixels."""

    def __init__(self, classes: int, rngs: nnx.Rngs, width: int = 64, stages: int = 4) -> None:
        self.stem = nnx.Conv(3, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        widths = [width * 2**stage for stage in range(stages)]
        self.blocks = nnx.List(
            block
            for stage, (before, own) in enumerate(zip([width, *widths], widths, strict=False))
            for block in (
                Block(before, own, 1 if stage == 0 else 2, rngs),
                Block(own, own, 1, rngs),
            )
        )
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x), use_running_average=not train))
        for block in self.blocks:
            x = block(x, train)
        return self.head(x.mean((1, 2)))


def split(network: nnx.Module) -> tuple[nnx.GraphDef, Tree, Tree]:
    """The definition, the parameters, and the rest: batch statistics."""
    graphdef, params, rest = nnx.split(network, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def loss(
    graphdef: nnx.GraphDef, params: Tree, rest: Tree, pixels: jax.Array, labels: jax.Array
) -> tuple[jax.Array, Tree]:
    """Mean cross-entropy in nats of training, and the new batch statistics."""
    network = nnx.merge(graphdef, params, rest)
    losses = optax.softmax_cross_entropy_with_integer_labels(network(pixels, train=True), labels)
    return losses.mean(), split(network)[2]


def evaluate(
    graphdef: nnx.GraphDef, params: Tree, rest: Tree, pixels: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(summed cross-entropy in nats, number of errors)."""
    logits = nnx.merge(graphdef, params, rest)(pixels)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), jnp.sum(jnp.argmax(logits, -1) != labels)


def kernel_dimensions(params: Tree) -> Tree:
    """Convolution kernels [h, w, in, out] are matrices h·w·in x out; dense ones in x out."""

    def of(path, leaf):
        if path[-1].key != "kernel":
            return None  # biases and norms
        axes = tuple(range(leaf.ndim - 1))
        return MuonDimensionNumbers(reduction_axis=axes, output_axis=leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, params)


def is_kernel(params: Tree) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
