"""A run as a checkpoint, and back.

What is saved: policy and optimiser, predictor and its optimiser, replay window, held-back roots and calibration, data
cursor, the allocator's expected tokens, step (also the weight version). Noise is derived from (seed, step), so there is
no generator to save.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from trace_jax import config as config_lib
from trace_jax.budget.expected import ExpectedTokens
from trace_jax.config import RunConfig
from trace_jax.learned import Learned
from trace_jax.loop import Run
from trace_jax.objectives import recalibration
from trace_jax.train import replay
from trace_jax.train.checkpoint import Checkpointer, CheckpointError, Snapshot
from trace_jax.train.policy_step import PolicyTrainer

_HELD = "held_"  # before the names of the held-back roots' arrays


def open_checkpoints(config: RunConfig, folder: str | os.PathLike[str]) -> Checkpointer:
    """A run's checkpoints. CheckpointError for a folder of something else, or with a run of another config in it."""
    checkpoints = Checkpointer(folder, fingerprint=config_lib.fingerprint(config), keep=config.checkpoint.keep)
    checkpoints.check()
    return checkpoints


def snapshot(run: Run) -> Snapshot:
    """Everything that the next step depends on."""
    arrays = {"policy": run.policy}
    host = {}
    if run.learned is not None:
        arrays["predictor"] = run.learned.state
        host = _learned_arrays(run.learned)
    document = {"cursor": run.cursor, "weight_version": run.step, "costs": dataclasses.asdict(run.costs)}
    document |= {"base": run.base}
    return Snapshot(step=run.step, arrays=arrays, host=host, document=document)


def restore(run: Run, checkpoints: Checkpointer) -> bool:
    """Puts the newest checkpoint into `run`; False if there is none. CheckpointError for one that cannot be used."""
    template = {"policy": run.trainer.abstract_state()}
    if run.learned is not None:
        template["predictor"] = run.learned.trainer.abstract_state()
    found = checkpoints.restore_latest(template)
    if found is None:
        return False
    _check_base(found, run.base, run.config)
    run.policy = found.arrays["policy"]
    if run.learned is not None:
        run.learned.state = found.arrays["predictor"]
        _restore_learned(run.learned, found.host)
    run.step, run.cursor = found.step, found.document["cursor"]
    run.costs = ExpectedTokens(**found.document["costs"])
    return True


def _learned_arrays(learned: Learned) -> dict[str, np.ndarray]:
    """What the next step needs of a learned predictor beside its parameters."""
    arrays = learned.window.to_arrays() | {"recalibration": learned.recalibration.to_array()}
    return arrays | {f"{_HELD}{name}": array for name, array in learned.held.to_arrays().items()}


def _restore_learned(learned: Learned, arrays: dict[str, np.ndarray]) -> None:
    held = {name.removeprefix(_HELD): array for name, array in arrays.items() if name.startswith(_HELD)}
    for name, source in (("window", arrays), ("held", held)):
        window = getattr(learned, name)
        setattr(learned, name, replay.window_from_arrays(source, size=window.size, decay=window.decay))
    learned.recalibration = recalibration.from_array(arrays["recalibration"])


def restore_policy(
    config: RunConfig, trainer: PolicyTrainer, base: str, checkpoints: Checkpointer
) -> tuple[Any, int] | None:
    """(parameters of the policy, as in a state of `trainer`; step) of the newest checkpoint; None if there is none.

    Nothing else of the checkpoint is read: no optimiser, no predictor. CheckpointError for one that cannot be used.
    """
    found = checkpoints.restore_part({"policy": {"params": trainer.abstract_state().params}})
    if found is None:
        return None
    _check_base(found, base, config)
    return found.arrays["policy"]["params"], found.step


def _check_base(found: Snapshot, base: str, config: RunConfig) -> None:
    if found.document["base"] != base:
        raise CheckpointError(
            f"checkpoint: the adapters of step {found.step} belong to other weights than those of "
            f"{config.model.path or 'the warm start'} now; put the old ones back or use another folder"
        )
