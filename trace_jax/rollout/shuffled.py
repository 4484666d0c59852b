"""A predictor whose scores go to the wrong prompts: the lower control of what scores are worth (ours)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_jax.rollout import keys
from trace_jax.rollout.collect import Predictor
from trace_jax.types import Prompt, RolloutTree


class ShuffledPredictor:
    """Another predictor's scores, permuted at random among the prompts of a call and among the anchors of a tree.

    The scores have the same distribution and say nothing; what an allocator gains over this is what it was told. Of S
    draws [S, n] all are permuted alike. Permutations are functions of (seed, step, prompt).
    """

    def __init__(self, predictor: Predictor, seed: int, step: int):
        """`seed` and `step`, both >= 0, are the run's."""
        self._predictor, self._seed, self._step = predictor, seed, step

    async def score_prompts(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """As the other predictor's, permuted over the prompts."""
        return self._permuted(await self._predictor.score_prompts(prompts), "")

    async def score_anchors(self, tree: RolloutTree, anchors: np.ndarray) -> np.ndarray:
        """As the other predictor's, permuted over the anchors of this tree."""
        return self._permuted(await self._predictor.score_anchors(tree, anchors), tree.prompt_uid)

    def _permuted(self, scores: np.ndarray, uid: str) -> np.ndarray:
        scores = np.asarray(scores)
        rng = keys.host_rng(self._seed, self._step, f"shuffle {uid}")
        return scores[..., rng.permutation(scores.shape[-1])]
