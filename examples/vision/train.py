"""Trains an image classifier: `python -m examples.vision.train --help`.

python -m examples.vision.train                                      # digits, half a minute
python -m examples.vision.train --data cifar10 --data-dir cifar-10-batches-bin --epochs 100
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import mars_optax
from examples.vision import data, model

Name = Literal["adamw", "muon", "mars_adamw", "mars_m"]
WARMUP = 0.05  # the share of the steps


@dataclasses.dataclass(frozen=True)
class Config:
    data: Literal["digits", "cifar10", "cifar100"] = "digits"
    """CIFAR trains ResNet-18, from the files in --data-dir."""
    data_dir: Path = Path("data")
    """The folder of CIFAR's .bin files."""
    optimizer: Name = "mars_m"
    learning_rate: float = 4e-3
    """The peak, after 5 % of warm-up; a cosine to zero follows."""
    weight_decay: float = 0.1
    gamma: float = 0.025
    """Scale of the variance reduction, of MARS."""
    exact: bool = False
    """Correct by the gradient at the previous parameters, of MARS."""
    epochs: int = 20
    batch_size: int = 64
    seed: int = 0


class Training(NamedTuple):
    params: model.Tree
    rest: model.Tree
    state: optax.OptState


def schedule(rate: Any, steps: int) -> optax.Schedule:
    """Linear warm-up and a cosine to zero; the rate may be traced."""
    warmup = max(1, round(WARMUP * steps))
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, max(steps, warmup + 1))
    return lambda count: rate * shape(count + 1)


def build(
    name: str, rate: optax.Schedule, weight_decay: float, gamma: Any = 0.025, exact: bool = False
) -> optax.GradientTransformationExtraArgs:
    """All kernels are matrices, through their dimension numbers; the rest gets AdamW."""
    decay: dict[str, Any] = {"weight_decay": weight_decay}
    match name:
        case "adamw":
            tx = optax.adamw(rate, mask=model.is_kernel, **decay)
        case "muon":  # scaled as MARS-M is, so that one rate serves matrices and fallback
            tx = optax.contrib.muon(
                rate,
                nesterov=False,
                consistent_rms=0.2,
                weight_decay_mask=model.is_kernel,
                muon_weight_dimension_numbers=model.kernel_dimensions,
                **decay,
            )
        case _:
            return getattr(mars_optax, name)(
                rate,
                gamma=gamma,
                exact=exact,
                weight_decay_mask=model.is_kernel,
                weight_dimension_numbers=model.kernel_dimensions,
                **decay,
            )
    return optax.with_extra_args_support(tx)


def epoch(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformationExtraArgs,
    training: Training,
    images: data.Images,
    key: jax.Array,
    batch_size: int,
    exact: bool = False,
) -> tuple[Training, jax.Array]:
    """Every image once, in a new order, but for an incomplete last batch; and the mean loss."""
    loss_fn = partial(model.loss, graphdef)
    take_gradient = mars_optax.value_and_grads if exact else jax.value_and_grad
    steps = len(images.labels) // batch_size
    order = jax.random.permutation(key, len(images.labels))[: steps * batch_size]

    def step(training, inputs):
        rows, key = inputs
        pixels = prepare(images.pixels[rows], key)
        extra = {"state": training.state} if exact else {}
        (loss, rest), grads = take_gradient(loss_fn, has_aux=True)(
            training.params, training.rest, pixels, images.labels[rows], **extra
        )
        updates, state = optimizer.update(grads, training.state, training.params)
        params = optax.apply_updates(training.params, updates)
        return Training(params, rest, state), loss

    inputs = (order.reshape(steps, batch_size), jax.random.split(key, steps))
    training, losses = jax.lax.scan(step, training, inputs)
    return training, losses.mean()


def prepare(pixels: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Bytes (of CIFAR) to about [-2, 2]; with a key, shifted by up to 4 pixels and mirrored."""
    if pixels.dtype != jnp.uint8:
        return pixels
    pixels = (pixels.astype(jnp.float32) - 121) / 64
    if key is None:
        return pixels
    shift, flip = jax.random.split(key)
    corners = jax.random.randint(shift, (len(pixels), 2), 0, 9)
    mirrored = jax.random.bernoulli(flip, shape=(len(pixels), 1, 1, 1))
    padded = jnp.pad(pixels, ((0, 0), (4, 4), (4, 4), (0, 0)))
    crop = lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), pixels.shape[1:])  # noqa: E731
    cropped = jax.vmap(crop)(padded, corners)
    return jnp.where(mirrored, cropped[:, :, ::-1], cropped)


def evaluate(
    graphdef: nnx.GraphDef, params: model.Tree, rest: model.Tree, images: data.Images
) -> tuple[float, float]:
    """(mean cross-entropy in nats, share of errors)."""
    count = len(images.labels)
    sums = [
        _evaluate_batch(graphdef, params, rest, *images.part(start, start + 500))
        for start in range(0, count, 500)
    ]
    loss, errors = (float(sum(values)) / count for values in zip(*sums, strict=True))
    return loss, errors


@partial(jax.jit, static_argnums=0)
def _evaluate_batch(graphdef, params, rest, pixels, labels):
    return model.evaluate(graphdef, params, rest, prepare(pixels), labels)


def train(config: Config) -> tuple[float, float]:
    """Trains and prints; returns the test loss and the share of errors."""
    for name in ("epochs", "batch_size"):
        if getattr(config, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(config, name)}."
            )
    if config.exact and not config.optimizer.startswith("mars_"):
        raise ValueError(
            f"--exact needs a MARS optimizer, not {config.optimizer}, which takes one gradient: "
            "leave --exact out."
        )
    is_digits = config.data == "digits"
    images = data.digits() if is_digits else data.cifar(config.data, config.data_dir)
    count = len(images.train.labels)
    if config.batch_size > count:
        raise ValueError(
            f"--batch-size {config.batch_size} is more than the {count} training images: lower it."
        )
    network = (model.SmallNet if is_digits else model.ResNet18)(
        images.classes, rngs=nnx.Rngs(config.seed)
    )
    graphdef, params, rest = model.split(network)
    steps = config.epochs * (count // config.batch_size)
    optimizer = build(
        config.optimizer,
        schedule(config.learning_rate, steps),
        config.weight_decay,
        config.gamma,
        config.exact,
    )
    run_epoch = jax.jit(
        lambda training, images, key: epoch(
            graphdef, optimizer, training, images, key, config.batch_size, config.exact
        ),
        donate_argnums=0,
    )
    training = Training(params, rest, optimizer.init(params))
    on_device = jax.device_put(images.train)
    for number, key in enumerate(jax.random.split(jax.random.key(config.seed), config.epochs)):
        training, loss = run_epoch(training, on_device, key)
        held_out, errors = evaluate(graphdef, training.params, training.rest, images.validation)
        print(
            f"epoch {number + 1:3d}  training loss {loss:.4f}  validation loss {held_out:.4f}, "
            f"errors {errors:.2%}",
            flush=True,
        )
    loss, errors = evaluate(graphdef, training.params, training.rest, images.test)
    print(f"test loss {loss:.4f}, errors {errors:.2%}")
    return loss, errors


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        train(config)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
