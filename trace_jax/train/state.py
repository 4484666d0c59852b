"""What an optimiser step changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters with their optimiser's state. A pytree; the jitted steps donate it, so an old one must not be used."""

    params: Any  # float32 leaves
    opt_state: Any  # of the optax chain that the step was built with
    step: jax.Array  # int32 []; optimiser steps taken so far


def create(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """A state at optimiser step 0. It holds `params` themselves, no copy."""
    return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32))
