"""A predictor that is fitted while the policy learns: its warm-up, its update after each step, its calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trace_jax.config_allocation import PredictorConfig
from trace_jax.objectives.recalibration import Recalibration, Temperature
from trace_jax.train import replay
from trace_jax.train.bayes_step import BayesianTrainer
from trace_jax.train.history_view import HistoryView
from trace_jax.train.predictor import LearnedPredictor
from trace_jax.train.predictor_step import PredictorTrainer
from trace_jax.train.replay import ReplayWindow, TargetKind
from trace_jax.train.state import TrainState
from trace_jax.train.state_record import RecordedPredictor
from trace_jax.types import RolloutTree

Calibrate = Callable[[np.ndarray, np.ndarray, np.ndarray], Recalibration]  # (probability, mean, count) -> map


@dataclasses.dataclass
class Learned:
    """The parts of a learned predictor and everything that a step changes in it."""

    trainer: PredictorTrainer | BayesianTrainer
    state: TrainState
    scorer: LearnedPredictor | RecordedPredictor
    targets: TargetKind
    window: ReplayWindow  # what it is fitted to
    held: ReplayWindow  # roots of other prompts, for the calibration; empty without one
    calibrate: Calibrate | None  # None: scores stay as they are
    frozen: Any = None  # parameters of the policy whose states it reads, where those are not the present one's
    recorded: bool = False  # it reads states that the engine recorded (train/state_record.py)
    recalibration: Recalibration = Temperature()  # of the scores as they are now; this one changes nothing

    @property
    def view(self) -> HistoryView:
        """What it reads of a history."""
        return self.scorer.view

    def publish(self, policy_params: Any, params: Any) -> None:
        """Lets the scorer see the policy's parameters, `params` of the predictor's own, and the calibration."""
        self.scorer.set_params(params, self._states_of(policy_params), self.recalibration.apply)

    def warm_up(
        self, settings: PredictorConfig, policy_params: Any, trees: Sequence[RolloutTree], rng: np.random.Generator
    ) -> dict[str, float]:
        """Fits to flat trees that were sampled outside the budget, for `warmup_steps` optimiser steps (ours).

        They are the first step of the replay window. `policy_params`: of the policy that sampled them, or, where
        `recorded`, the `StateRecord` of its engine. Returns the fit's metrics under `predictor/`.
        """
        self._push(settings, policy_params, trees, rng)
        self.state, report = self.trainer.fit_steps(
            self.state, self._states_of(policy_params), self.window.examples(), rng, steps=settings.warmup_steps
        )
        return report | self._recalibrate(policy_params)

    def update(
        self, settings: PredictorConfig, policy_params: Any, trees: Sequence[RolloutTree], rng: np.random.Generator
    ) -> dict[str, float]:
        """Eq. 19 on this step's trees, and on those of the replay window if it is longer than one step.

        Arguments and result as of `warm_up`.
        """
        self._push(settings, policy_params, trees, rng)
        examples, states = self.window.examples(), self._states_of(policy_params)
        if settings.update_steps is None:
            self.state, report = self.trainer.fit(self.state, states, examples, rng, epochs=settings.epochs)
        else:
            self.state, report = self.trainer.fit_steps(
                self.state, states, examples, rng, steps=settings.update_steps
            )
        return report | self._recalibrate(policy_params)

    def _states_of(self, policy_params: Any) -> Any:
        return policy_params if self.frozen is None else self.frozen

    def _push(
        self, settings: PredictorConfig, policy_params: Any, trees: Sequence[RolloutTree], rng: np.random.Generator
    ) -> None:
        """One step more in both windows. What is held back of this step's prompts is never fitted to."""
        fresh = replay.examples_from_trees(
            trees, self.view, prefix_share=settings.prefix_share, rng=rng, targets=self.targets
        )
        if self.recorded:
            fresh = fresh.take(np.flatnonzero(policy_params.known(fresh.prefixes)))
        if self.calibrate is not None:
            fresh, held = replay.split_roots(fresh, settings.held_share, rng)
            self.held = self.held.push(held)
        self.window = self.window.push(fresh)

    def _recalibrate(self, policy_params: Any) -> dict[str, float]:
        """Fits the map of the scores to the roots that are held back."""
        if self.calibrate is None:
            return {}
        held = self.held.examples()
        raw = self.scorer.raw(self.state.params, self._states_of(policy_params), held.prefixes)
        self.recalibration = self.calibrate(raw, held.target, held.count * held.weight)
        return {"predictor/held_roots": held.size}
