"""Checks of static arguments and trees: each error names the argument, the value and the remedy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_none(x: Any) -> bool:
    return x is None


def is_function(x: Any) -> bool:
    """Whether x is to be called: an Equinox module is callable, but a tree."""
    return callable(x) and jax.tree_util.all_leaves([x])


def check_number(name: str, value: Any, valid: Callable[[Any], bool], remedy: str) -> None:
    """Checks a number; schedules and arrays (which may be traced) pass unseen."""
    if callable(value) or isinstance(value, jax.Array | np.ndarray):
        return
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"`{name}` must be a number, got {value!r}: {remedy}.")
    if not valid(value):
        raise ValueError(f"`{name}` is out of range, got {value!r}: {remedy}.")


def check_decay(name: str, value: Any) -> None:
    check_number(name, value, lambda v: 0 <= v < 1, "use a decay rate in [0, 1), such as 0.95")


def check_non_negative(name: str, value: Any) -> None:
    check_number(name, value, lambda v: v >= 0, "use a number that is at least 0")


def check_learning_rate(name: str, value: Any) -> None:
    check_number(name, value, lambda v: v >= 0, "use a number of at least 0 or a schedule")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` is unknown, got {value!r}: use one of {choices}.")


def check_inexact(name: str, tree: Any) -> None:
    """Raises a TypeError for leaves that have no gradient (integers, booleans, keys)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = jnp.result_type(leaf) if isinstance(leaf, int | float | complex) else leaf.dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"`{name}` must hold floating-point leaves, got dtype {dtype} at "
                f"`{name}{jax.tree_util.keystr(path)}`: leave such leaves out, for example with "
                "`optax.masked`, or cast them to a floating-point dtype."
            )


def check_same_tree(name: str, tree: Any, like_name: str, like: Any) -> None:
    """Checks that `tree` has the structure and the shapes of `like`; a leaf may be None instead."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
    like_leaves, like_structure = jax.tree_util.tree_flatten(like, is_leaf=is_none)
    if structure != like_structure:  # type: ignore[operator]
        raise ValueError(
            f"`{name}` must have the tree structure of {like_name}, got {structure} instead of "
            f"{like_structure}: take both from the same parameters."
        )
    for (path, leaf), like_leaf in zip(leaves, like_leaves, strict=True):
        if leaf is not None and np.shape(leaf) != (
            None if like_leaf is None else np.shape(like_leaf)
        ):
            expected = None if like_leaf is None else np.shape(like_leaf)
            raise ValueError(
                f"`{name}{jax.tree_util.keystr(path)}` has shape {np.shape(leaf)}, but "
                f"{like_name} has {expected} there: take both from the same parameters."
            )
