"""A predictor that measures instead of predicting: the mean success of many extra rollouts, outside the budget.

It is the upper control for learned predictors: with enough rollouts its scores are the policy's true success rates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from trace_jax.budget.account import BudgetCount
from trace_jax.engines.base import Engine
from trace_jax.rollout import replay
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.keys import Stream
from trace_jax.rollout.runner import Runner, Sampling, Start, bare_starts
from trace_jax.rollout.slots import EpisodeSlots, run_all
from trace_jax.types import Finish, Prompt, RolloutTree


class OraclePredictor:
    """Scores by sampling, behind the `collect.Predictor` protocol. It belongs to one policy: make a new one each step.

    An anchor's environment state is rebuilt by replaying the path's actions from the prompt (`rollout/replay.py`).
    What it spends is counted in `counts` only.

    Args:
      engine, environment: as in `collect_batch`.
      sampling: of the step; the stream is replaced by `Stream.ORACLE`, so that no noise is shared with the budget.
      rollouts_per_prompt: R, at least 1, for each prompt's score.
      continuations_per_anchor: K, at least 1, for each anchor's score.
      concurrency: extra episodes in flight at once, beside those of the budget.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        *,
        sampling: Sampling,
        rollouts_per_prompt: int,
        continuations_per_anchor: int,
        concurrency: int,
    ):
        if rollouts_per_prompt < 1 or continuations_per_anchor < 1:
            raise ValueError(
                f"oracle: rollouts_per_prompt is {rollouts_per_prompt} and continuations_per_anchor "
                f"{continuations_per_anchor}; both must be at least 1"
            )
        self.counts = BudgetCount()
        self._rollouts, self._continuations = rollouts_per_prompt, continuations_per_anchor
        self._prompts: dict[str, Prompt] = {}
        sampling = dataclasses.replace(sampling, stream=Stream.ORACLE)
        self._runner = Runner(engine, environment, sampling, EpisodeSlots(concurrency), self._count)

    async def score_prompts(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B]: mean success of R rollouts of each prompt. ValueError as `Runner.check_prompts`.

        Rollouts that the engine gave up on do not count; where it gave up on all, the score is 1/2.
        """
        self._runner.check_prompts(prompts)
        self._prompts.update((prompt.uid, prompt) for prompt in prompts)
        starts = [bare_starts(prompt, range(self._rollouts)) for prompt in prompts]
        return await self._means([prompt.uid for prompt in prompts], starts)

    async def score_anchors(self, tree: RolloutTree, anchors: np.ndarray) -> np.ndarray:
        """float64 [A]: that of K continuations of each anchor. ValueError for a prompt it has not scored."""
        if tree.prompt_uid not in self._prompts:
            raise ValueError(f"oracle: prompt {tree.prompt_uid!r} was not scored in this step; score all prompts first")
        prompt = self._prompts[tree.prompt_uid]
        states, calls = await replay.states_at(self._runner.environment, prompt, tree, anchors)
        self.counts += BudgetCount(tool_calls=calls)
        starts = replay.continuation_starts(
            prompt, tree, states, anchors, copies=self._continuations, first_leaf=self._rollouts
        )
        return await self._means([tree.prompt_uid] * len(starts), starts)

    async def _means(self, uids: Sequence[str], starts: Sequence[Sequence[Start]]) -> np.ndarray:
        groups = await run_all(self._runner.run(uid, group) for uid, group in zip(uids, starts, strict=True))
        last = [[episode.turns[-1] for episode in group] for group in groups]
        known = [[turn.success for turn in group if turn.finish != Finish.ENGINE_ERROR] for group in last]
        return np.array([np.mean(group) if group else 0.5 for group in known], np.float64)

    def _count(self, episode: Any) -> None:
        self.counts += episode.counts
