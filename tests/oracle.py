"""The mathematics once more, in float64 NumPy: what the tests compare the library with.

Trees are flat dicts of arrays, and every leaf is handled in a loop of its own. Nothing here
comes from `mars_optax`, and Newton-Schulz works on the singular values instead of on products of
matrices. `trajectory` at the end drives a real optimizer over the same gradients.
"""

import numpy as np
import optax

NS_COEFFS = (3.4445, -4.7750, 2.0315)
NS_EPS = 1e-8  # what the authors add to the Frobenius norm
KINDS = ("adamw", "lion", "shampoo", "m", "sgdm")
FLAX_MATRIX = (0, 1)  # dimension numbers are pairs (reduction axes, output axes)


def value_at(value, count):
    """A number, or a schedule at a step count, which starts at 0."""
    return value(count) if callable(value) else value


def matrix_axes(numbers, ndim):
    """Reduction, output and batch axes, each a list of non-negative integers."""
    reduction, output = (
        [a % ndim for a in ((axes,) if isinstance(axes, int) else axes)] for axes in numbers
    )
    batch = [a for a in range(ndim) if a not in reduction + output]
    return reduction, output, batch


def batch_indices(shape, numbers):
    """An index for each batch entry, which takes that entry out of an array of this shape."""
    batch = matrix_axes(numbers, len(shape))[2]
    for position in np.ndindex(*(shape[a] for a in batch)):
        index = [slice(None)] * len(shape)
        for axis, i in zip(batch, position, strict=True):
            index[axis] = i
        yield tuple(index)


def fans(shape, numbers=None):
    """fan_in and fan_out."""
    reduction, output, _ = matrix_axes(numbers or FLAX_MATRIX, len(shape))
    return int(np.prod([shape[a] for a in reduction])), int(np.prod([shape[a] for a in output]))


def newton_schulz(matrix, steps=5, coeffs=NS_COEFFS):
    """An odd polynomial of a matrix is that polynomial of its singular values."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / (np.sqrt(np.sum(s**2)) + NS_EPS)
    rows = [coeffs] * steps if np.ndim(coeffs) == 1 else list(coeffs)
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def orthogonalize(x, numbers=None, steps=5, coeffs=NS_COEFFS):
    """Newton-Schulz on each batch entry, seen as a matrix (fan_in, fan_out)."""
    numbers = numbers or FLAX_MATRIX
    reduction, output, _ = matrix_axes(numbers, x.ndim)
    kept = sorted(reduction + output)
    order = [kept.index(a) for a in reduction + output]
    result = np.zeros_like(x)
    for index in batch_indices(x.shape, numbers):
        entry = x[index].transpose(order)
        flat = newton_schulz(entry.reshape(fans(x.shape, numbers)), steps, coeffs)
        result[index] = flat.reshape(entry.shape).transpose(np.argsort(order))
    return result


def norm(*arrays):
    return np.sqrt(sum(np.sum(x**2) for x in arrays))


class VarianceReduction:
    """mars_vr: c = g + k (g - g_prev), clipped. Call it once a step."""

    def __init__(
        self, gamma=0.025, b1=0.95, *, clip_norm=1.0, clip_scope="tensor", exact=False, numbers=None
    ):
        self.gamma, self.b1, self.exact = gamma, b1, exact
        self.clip_norm, self.clip_scope, self.numbers = clip_norm, clip_scope, numbers or {}
        self.count = 0
        self.last_grads = {}

    def __call__(self, grads, prev_grads=None):
        k = value_at(self.gamma, self.count) * self.b1 / (1 - self.b1)
        corrected = {}
        for name, g in grads.items():
            # The gradient before the first step is zero.
            previous = prev_grads[name] if self.exact else self.last_grads.get(name, 0.0)
            corrected[name] = g + k * (g - previous)
            # A tensor that is not finite is not stored.
            for index in self.tensors(name, g):
                if not self.exact and np.all(np.isfinite(g[index])):
                    self.last_grads.setdefault(name, np.zeros_like(g))[index] = g[index]
        self.count += 1
        return self.clip(corrected)

    def tensors(self, name, x):
        """Indices of the matrices; without dimension numbers the array is one tensor."""
        numbers = self.numbers.get(name)
        return [...] if numbers is None else batch_indices(x.shape, numbers)

    def clip(self, corrected):
        if self.clip_norm is None:
            return corrected
        if self.clip_scope == "global":
            factor = max(1.0, norm(*corrected.values()) / self.clip_norm)
            return {name: c / factor for name, c in corrected.items()}
        clipped = {}
        for name, c in corrected.items():
            clipped[name] = np.zeros_like(c)
            for index in self.tensors(name, c):
                clipped[name][index] = c[index] / max(1.0, norm(c[index]) / self.clip_norm)
        return clipped


class AdamW:
    """Adam with bias correction and decoupled decay; also the fallback of all five."""

    def __init__(self, learning_rate, b1, b2, eps, weight_decay):
        self.learning_rate, self.b1, self.b2 = learning_rate, b1, b2
        self.eps, self.weight_decay = eps, weight_decay
        self.m, self.v, self.count = {}, {}, 0

    def updates(self, params, grads, decays):
        rate = value_at(self.learning_rate, self.count)
        self.count += 1
        result = {}
        for name, g in grads.items():
            self.m[name] = self.b1 * self.m.get(name, 0.0) + (1 - self.b1) * g
            self.v[name] = self.b2 * self.v.get(name, 0.0) + (1 - self.b2) * g**2
            m_hat = self.m[name] / (1 - self.b1**self.count)
            v_hat = self.v[name] / (1 - self.b2**self.count)
            decay = self.weight_decay if decays[name] else 0.0
            result[name] = -rate * (m_hat / (np.sqrt(v_hat) + self.eps) + decay * params[name])
        return result


class Momentum:
    """m = b1 m + (1 - b1) c without bias correction, then a direction made from m."""

    def __init__(self, learning_rate, b1, weight_decay, direction):
        self.learning_rate, self.b1, self.weight_decay = learning_rate, b1, weight_decay
        self.direction, self.m, self.count = direction, {}, 0

    def updates(self, params, grads, decays):
        rate = value_at(self.learning_rate, self.count)
        self.count += 1
        result = {}
        for name, c in grads.items():
            self.m[name] = self.b1 * self.m.get(name, 0.0) + (1 - self.b1) * c
            decay = self.weight_decay if decays[name] else 0.0
            result[name] = -rate * (self.direction(name, self.m[name]) + decay * params[name])
        return result


class Mars:
    """One of the five optimizers, named by `kind`. `step` returns the new parameters.

    `mars` and `decays` are dicts of bools, `numbers` of pairs (reduction, output) or None.
    """

    def __init__(
        self,
        kind,
        learning_rate,
        b1=0.95,
        b2=0.99,
        eps=1e-8,
        weight_decay=None,
        gamma=0.025,
        *,
        clip_norm=1.0,
        clip_scope="tensor",
        exact=False,
        numbers=None,
        mars=None,
        decays=None,
        adam_learning_rate=None,
        adam_b1=0.9,
        adam_b2=0.95,
        adam_eps=1e-8,
        adam_weight_decay=0.1,
        ns_steps=5,
        ns_coeffs=NS_COEFFS,
    ):
        self.numbers, self.mars, self.decays = numbers, mars, decays
        self.variance_reduction = VarianceReduction(
            gamma, b1, clip_norm=clip_norm, clip_scope=clip_scope, exact=exact, numbers=numbers
        )
        if weight_decay is None:
            weight_decay = 0.1 if kind == "m" else 0.0

        def orthogonal(name, m):
            return orthogonalize(m, (numbers or {}).get(name), ns_steps, ns_coeffs)

        def shampoo(name, m):
            fan_in, fan_out = fans(m.shape, (numbers or {}).get(name))
            return np.sqrt(max(1.0, fan_out / fan_in)) * orthogonal(name, m) if m.size else m

        def muon(name, m):
            return (
                0.2 * np.sqrt(max(fans(m.shape, (numbers or {}).get(name)))) * orthogonal(name, m)
            )

        directions = {
            "lion": lambda name, m: np.sign(m),
            "shampoo": shampoo,
            "m": muon,
            "sgdm": lambda name, m: m,
        }
        if kind == "adamw":
            self.preconditioner = AdamW(learning_rate, b1, b2, eps, weight_decay)
        else:
            self.preconditioner = Momentum(learning_rate, b1, weight_decay, directions[kind])
        self.fallback = AdamW(
            learning_rate if adam_learning_rate is None else adam_learning_rate,
            adam_b1,
            adam_b2,
            adam_eps,
            adam_weight_decay,
        )

    def is_mars(self, name, param):
        if self.mars is not None:
            return self.mars[name]
        if self.numbers is not None:
            return self.numbers.get(name) is not None
        return param.ndim == 2

    def step(self, params, grads, prev_grads=None):
        decays = self.decays or dict.fromkeys(params, True)
        mars = {n for n, x in params.items() if self.is_mars(n, x)}
        select = lambda tree, names: {n: x for n, x in tree.items() if n in names}  # noqa: E731
        corrected = self.variance_reduction(
            select(grads, mars), None if prev_grads is None else select(prev_grads, mars)
        )
        updates = self.preconditioner.updates(params, corrected, decays)
        updates |= self.fallback.updates(params, select(grads, set(params) - mars), decays)
        return {n: x + updates[n] for n, x in params.items()}


def trajectory(optimizer, params, grads, prev_grads=None, update=None):
    """The parameters of an Optax optimizer after each step, as NumPy trees."""
    state = optimizer.init(params)
    points = []
    for t, g in enumerate(grads):
        extra = {} if prev_grads is None else {"prev_grad": prev_grads[t]}
        updates, state = (update or optimizer.update)(g, state, params, **extra)
        params = optax.apply_updates(params, updates)
        points.append(params)
    return points
