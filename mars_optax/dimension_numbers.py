"""Which axes of a parameter form its matrix: `optax.contrib.MuonDimensionNumbers`, resolved."""

import math
import typing
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from mars_optax._checks import is_function, is_none

WeightDimensionNumbers: TypeAlias = (
    MuonDimensionNumbers | optax.Params | Callable[[optax.Params], optax.Params] | None
)


class MatrixAxes(typing.NamedTuple):
    """The axes of one array, all non-negative and disjoint."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]  # the input side: fan_in
    output: tuple[int, ...]  # the output side: fan_out


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers | optax.MaskedNode)


def resolve(spec: WeightDimensionNumbers, tree: Any) -> list[MuonDimensionNumbers | None]:
    """The dimension numbers of each leaf of `tree` (None counts as a leaf), in its order.

    `spec` is a tree (or a prefix of one), a callable that makes it from `tree`, or None.
    """
    if spec is None or not jax.tree.leaves(tree):
        return [None] * len(jax.tree.leaves(tree, is_leaf=is_none))
    if is_function(spec):
        spec = spec(tree)
    resolved: list[MuonDimensionNumbers | None] = []

    def add(numbers: Any, subtree: Any) -> None:
        if not _is_spec(numbers):
            raise TypeError(
                "`weight_dimension_numbers` must hold optax.contrib.MuonDimensionNumbers or None, "
                f"got {numbers!r}: write MuonDimensionNumbers(reduction_axis=0, output_axis=1)."
            )
        numbers = numbers if isinstance(numbers, MuonDimensionNumbers) else None
        resolved.extend([numbers] * len(jax.tree.leaves(subtree, is_leaf=is_none)))

    try:
        jax.tree.map(add, spec, tree, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            "`weight_dimension_numbers` must be a tree of the parameters' structure or a prefix "
            f"of it, got {spec!r}: give each parameter MuonDimensionNumbers or None. ({error})"
        ) from error
    return resolved


def matrix_axes(numbers: MuonDimensionNumbers, shape: tuple[int, ...]) -> MatrixAxes:
    """Normalizes dimension numbers for an array of `shape`; axes not named are batch axes."""

    def normalize(axes: Any) -> tuple[int, ...]:
        axes = (axes,) if isinstance(axes, int | np.integer) else tuple(axes)
        for axis in axes:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"`weight_dimension_numbers` name axis {axis}, which is out of range for a "
                    f"parameter of shape {shape}, got {numbers}: name existing axes, or give this "
                    "parameter None."
                )
        return tuple(axis % len(shape) for axis in axes)

    reduction, output = normalize(numbers.reduction_axis), normalize(numbers.output_axis)
    if len(set(reduction + output)) != len(reduction + output):
        raise ValueError(
            f"`weight_dimension_numbers` name an axis twice, got {numbers} for a parameter of "
            f"shape {shape}: reduction and output axes must be disjoint."
        )
    batch = tuple(axis for axis in range(len(shape)) if axis not in reduction + output)
    return MatrixAxes(batch, reduction, output)


def fans(axes: MatrixAxes, shape: tuple[int, ...]) -> tuple[int, int]:
    """(fan_in, fan_out) of the matrices that `axes` name."""
    return (
        math.prod(shape[axis] for axis in axes.reduction),
        math.prod(shape[axis] for axis in axes.output),
    )
