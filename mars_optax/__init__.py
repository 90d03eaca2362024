"""The MARS optimizers for JAX and Optax: variance reduction in front of a preconditioner."""

from mars_optax.optimizers import (
    keep_dtypes,
    mars_adamw,
    mars_lion,
    mars_m,
    mars_sgdm,
    mars_shampoo,
)
from mars_optax.orthogonalization import orthogonalize, scale_by_orthogonalization
from mars_optax.previous_iterate import ExactState, MarsGrads, exact, multi_steps, value_and_grads
from mars_optax.variance_reduction import (
    MarsMomentumState,
    MarsVRState,
    mars_momentum,
    mars_vr,
)

__version__ = "0.1.0"

__all__ = [
    "ExactState",
    "MarsGrads",
    "MarsMomentumState",
    "MarsVRState",
    "exact",
    "keep_dtypes",
    "mars_adamw",
    "mars_lion",
    "mars_m",
    "mars_momentum",
    "mars_sgdm",
    "mars_shampoo",
    "mars_vr",
    "multi_steps",
    "orthogonalize",
    "scale_by_orthogonalization",
    "value_and_grads",
]
