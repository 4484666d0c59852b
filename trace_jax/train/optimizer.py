"""The optimiser as one optax chain: clip the gradient, take a step, limit the step.

The paper uses Adam with learning rate 1e-6 and gradients clipped to norm 1.0 (E.3). Schedules, SGD and the limit on the
update are our choice: on a small policy Adam at ordinary rates moves so far in one step that it spoils the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import optax


def constant(learning_rate: float) -> optax.Schedule:
    """The same learning rate at every optimiser step."""
    return optax.constant_schedule(learning_rate)


def warmup_cosine(
    learning_rate: float, *, warmup_steps: int, total_steps: int, final_fraction: float
) -> optax.Schedule:
    """Linear from 0 to `learning_rate` over `warmup_steps`, then half a cosine to `final_fraction * learning_rate`.

    Steps are optimiser steps, not rollout batches. At step s >= total_steps the rate stays at its end value.
    Raises ValueError unless 0 <= warmup_steps < total_steps.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"schedule: warmup_steps {warmup_steps} must be >= 0 and below total_steps {total_steps}; "
            "shorten the warm-up"
        )
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup_steps else learning_rate,
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=total_steps,
        end_value=final_fraction * learning_rate,
    )


def adamw(
    schedule: optax.Schedule, *, b1: float, b2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW: -rate * (m / (sqrt(v) + eps) + weight_decay * params) with bias-corrected moments (arXiv 1711.05101)."""
    return optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)


def sgd(schedule: optax.Schedule, *, momentum: float) -> optax.GradientTransformation:
    """SGD: -rate * u with u = gradient + momentum * u. `momentum = 0` keeps no state."""
    return optax.sgd(schedule, momentum=momentum if momentum else None)


SCHEDULES: Mapping[str, Callable[..., optax.Schedule]] = {"constant": constant, "warmup_cosine": warmup_cosine}
OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {"adamw": adamw, "sgd": sgd}


def build(
    base: optax.GradientTransformation, *, clip_norm: float, max_update_norm: float | None
) -> optax.GradientTransformation:
    """clip the gradient to global norm `clip_norm` -> `base` -> limit the update to global norm `max_update_norm`.

    Args:
      base: an entry of `OPTIMIZERS`, with its learning rate inside.
      clip_norm: limit on the global norm of the gradient; the paper's is 1.0 (E.3).
      max_update_norm: limit on the global norm of the final change of the parameters, None for no limit (our choice).
    Raises ValueError for a limit that is not positive.
    """
    for name, limit in (("clip_norm", clip_norm), ("max_update_norm", max_update_norm)):
        if limit is not None and not limit > 0:
            raise ValueError(f"optimizer: {name} is {limit}, must be positive")
    parts = [optax.clip_by_global_norm(clip_norm), base]
    if max_update_norm is not None:
        parts.append(optax.clip_by_global_norm(max_update_norm))
    return optax.chain(*parts)
