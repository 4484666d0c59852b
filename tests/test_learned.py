"""What a learned predictor is fitted to, with which states, and that held-back roots never reach the fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trace_jax.config_allocation import PredictorConfig
from trace_jax.learned import Learned
from trace_jax.objectives.recalibration import Temperature
from trace_jax.train import replay
from trace_jax.train.history_view import HistoryView
from trace_jax.train.state_record import StateRecord
from trace_jax.tree import grow, targets
from trace_jax.types import Finish, Prompt, Stage, Turn

SETTINGS = PredictorConfig(prefix_share=0.5, epochs=3, warmup_steps=7, held_share=0.5)


class Trainer:
    """Writes down what it is asked to fit; its state counts the fits."""

    def __init__(self):
        self.fits = []

    def fit(self, state, policy_params, examples, rng, *, epochs):
        return self._done(state, policy_params, examples, {"epochs": epochs})

    def fit_steps(self, state, policy_params, examples, rng, *, steps):
        return self._done(state, policy_params, examples, {"steps": steps})

    def _done(self, state, policy_params, examples, how):
        self.fits.append((policy_params, examples, how))
        return dataclasses.replace(state, params=state.params + 1), {"predictor/examples": examples.size}


@dataclasses.dataclass(frozen=True)
class State:
    params: int = 0


class Scorer:
    """Says 0.8 to everything."""

    view = HistoryView(max_tokens=64)

    def __init__(self):
        self.published = None

    def raw(self, params, policy_params, histories):
        return np.full(len(histories), 0.8)

    def set_params(self, params, policy_params, recalibrate):
        self.published = (params, policy_params, recalibrate)


def tree(uid, success):
    """Two bare rollouts of two turns, both with this outcome."""

    def turn(last):
        end = {"reward": success, "success": success} if last else {}
        observation = np.zeros(0 if last else 1, np.int32)
        finish = Finish.ANSWER if last else Finish.TURN
        return Turn(np.array([3], np.int32), np.full(1, -1, np.float32), observation, finish, 0, **end)

    start = grow.new_tree(Prompt(uid, np.array([len(uid), ord(uid[-1])], np.int32), None))
    return grow.add_rollouts(start, [(0, Stage.ROOT_ROLLOUT, [turn(False), turn(True)])] * 2)


def learned(calibrate=None, replay_steps=2, frozen=None):
    window = replay.ReplayWindow(replay_steps, decay=0.5)
    return Learned(Trainer(), State(), Scorer(), targets.direct, window, window, calibrate, frozen)


def trees(step, count=4, success=1.0):
    return [tree(f"{step}/{i}", success) for i in range(count)]


def rng():
    return np.random.default_rng(0)


def test_the_warm_up_is_the_first_step_of_the_window():
    parts = learned()
    parts.warm_up(SETTINGS, "policy", trees(0), rng())
    parts.update(SETTINGS, "policy", trees(1), rng())
    parts.update(SETTINGS, "policy", trees(2), rng())
    steps = [{uid[0] for uid in examples.prompt} for _, examples, _ in parts.trainer.fits]
    assert steps == [{"0"}, {"0", "1"}, {"1", "2"}]
    assert [how for _, _, how in parts.trainer.fits] == [{"steps": 7}, {"epochs": 3}, {"epochs": 3}]
    assert parts.state.params == 3
    # 4 roots with 2 outcomes each, and as many of their 8 turns with 1 each; what is a step old weighs half
    _, examples, _ = parts.trainer.fits[1]
    assert examples.size == 16 and sorted(examples.count) == [1] * 8 + [2] * 8
    assert {uid[0]: weight for uid, weight in zip(examples.prompt, examples.weight, strict=True)} == {"0": 0.5, "1": 1.0}


def test_a_fixed_number_of_steps():
    parts = learned()
    parts.update(dataclasses.replace(SETTINGS, update_steps=5), "policy", trees(1), rng())
    assert parts.trainer.fits[0][2] == {"steps": 5}


def test_without_a_calibration_nothing_is_held_back_and_scores_stay():
    parts = learned()
    report = parts.update(SETTINGS, "policy", trees(1), rng())
    parts.publish("policy", "own")
    params, policy, recalibrate = parts.scorer.published
    assert (params, policy) == ("own", "policy") and recalibrate(np.array([0.3])).tolist() == [0.3]
    assert parts.held.steps == () and "predictor/held_roots" not in report


def test_held_back_roots_are_never_fitted_and_calibrate():
    """All outcomes are failures while the scorer says 0.8: the map must bring it down."""
    seen = []

    def calibrate(probability, mean, count):
        seen.append((probability.tolist(), mean.tolist(), count.tolist()))
        return Temperature(1.0, -2.0)

    parts = learned(calibrate)
    for step in range(3):
        report = parts.update(SETTINGS, "policy", trees(step, success=0.0), rng())
    fitted = {uid for _, examples, _ in parts.trainer.fits for uid in examples.prompt}
    held = {uid for step in parts.held.steps for uid in step.prompt}
    assert len(fitted) == 6 and len(held) == 4 and not fitted & held  # a window of 2 steps, 2 held of 4 in each
    assert report["predictor/held_roots"] == 4
    assert seen[-1] == ([0.8] * 4, [0.0] * 4, [1.0, 1.0, 2.0, 2.0])  # 2 outcomes each, half a step later
    parts.publish("policy", "own")
    # logit 0.8 = ln 4, so sigmoid(ln 4 - 2) = 4 / (4 + e^2)
    assert parts.scorer.published[2](np.array(0.8)) == pytest.approx(4 / (4 + np.exp(2)))


def test_only_what_is_on_record_is_fitted():
    """A deadline may pass between a turn and the request for the next one: that turn has no state."""
    parts = learned()
    parts.recorded = True
    grown = trees(1, count=2)
    roots = [np.array(history, np.int32) for history in parts.view.of_nodes(grown[0], [0])]
    record = StateRecord({root.tobytes(): np.zeros(2, np.float32) for root in roots})
    parts.update(SETTINGS, record, grown, rng())
    states, examples, _ = parts.trainer.fits[0]
    assert states is record and examples.prompt == ("1/0",) and examples.is_root.all()


def test_frozen_states():
    parts = learned(frozen="first policy")
    parts.warm_up(SETTINGS, "policy", trees(0), rng())
    parts.update(SETTINGS, "policy", trees(1), rng())
    parts.publish("policy", "own")
    assert [policy for policy, _, _ in parts.trainer.fits] == ["first policy"] * 2
    assert parts.scorer.published[1] == "first policy"
