"""A predictor that reads states which the engine met anyway: it needs no forward pass of its own (ours).

To ask for a history's next turn, an engine feeds it through the policy; an engine that keeps the features of each such
history (`engines.local.LocalEngine.state_record`) has those of every anchor, and of every turn that a fit can use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from trace_jax.engines.local import record_key
from trace_jax.train.history_view import HistoryView
from trace_jax.types import Prompt, RolloutTree

# (params, features [n, F]) -> probabilities float64 [n], or [S, n] of S draws
Probability = Callable[[Any, np.ndarray], np.ndarray]


class RecordingEngine(Protocol):
    """What is needed of an engine."""

    weight_version: int
    state_record: dict[bytes, np.ndarray]

    async def states(self, histories: Sequence[np.ndarray], salt: str = "") -> np.ndarray:
        """float32 [n, F]: on record, or computed now."""
        ...


@dataclasses.dataclass(frozen=True)
class StateRecord:
    """Features of the histories that an engine met under one set of weights."""

    features: Mapping[bytes, np.ndarray]  # bytes of the tokens int32 [n] -> float32 [F]

    def known(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """bool [n]; which histories are on record. One is not where a deadline passed before its next turn began."""
        return np.array([record_key(history) in self.features for history in histories], bool)

    def of(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """float32 [n, F]. Raises ValueError for a history that is not on record."""
        found = [self.features.get(record_key(history)) for history in histories]
        missing = [i for i, features in enumerate(found) if features is None]
        if missing:
            raise ValueError(
                f"history {missing[0]} of {len(found)} ({histories[missing[0]].size} tokens) has no recorded state; no "
                "turn was asked for from it under these weights"
            )
        return np.stack(found)


class RecordedPredictor:
    """`rollout.collect.Predictor` on the engine's record; the interface of `train.predictor.LearnedPredictor`."""

    def __init__(
        self, engine: RecordingEngine, view: HistoryView, probability: Probability, *, draws: bool = False
    ):
        """`view` must leave histories as they are: the record knows them by their tokens.

        `draws`: scores are [S, n], each draw of `probability` (S is 1 where it makes none), instead of their mean, [n].
        """
        self.view = view
        self._engine, self._probability, self._draws = engine, probability, draws
        self._params: Any = None
        self._recalibrate: Callable[[np.ndarray], np.ndarray] | None = None

    def set_params(
        self, params: Any, policy_params: Any, recalibrate: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> None:
        """Takes the predictor's parameters and a map of its scores; the policy's are the engine's."""
        del policy_params
        self._params, self._recalibrate = params, recalibrate

    def raw(self, params: Any, policy_params: StateRecord, histories: Sequence[np.ndarray]) -> np.ndarray:
        """float64 [n]: the mean over draws, not recalibrated, from a record in place of the policy's parameters."""
        if not histories:
            return np.zeros(0)
        return np.atleast_2d(self._probability(params, policy_params.of(histories))).mean(axis=0)

    async def score_prompts(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B], or [S, B]: the predicted success rate of each prompt. Their keys and values are cached then."""
        return await self._score(self.view.of_prompts(prompts))

    async def score_anchors(self, tree: RolloutTree, anchors: np.ndarray) -> np.ndarray:
        """float64 [A], or [S, A]: the predicted success rate from each anchor (node ids of `tree`)."""
        return await self._score(self.view.of_nodes(tree, anchors))

    async def _score(self, histories: list[np.ndarray]) -> np.ndarray:
        if self._params is None:
            raise RuntimeError("no parameters; call set_params first")
        features = await self._engine.states(histories, salt=str(self._engine.weight_version))
        scores = np.atleast_2d(self._probability(self._params, features))
        if not self._draws:
            scores = scores.mean(axis=0)
        return scores if self._recalibrate is None else self._recalibrate(scores)
