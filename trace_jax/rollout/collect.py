"""One prompt's tree: bare rollouts, scored anchors, continuations (paper Algorithm 1, lines 3-4).

Everything in the tree is ordered by leaf index, never by arrival, and every random choice has a key of its own, so a
tree is a function of weights, prompt and settings.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from trace_jax.budget.account import BudgetCount, fallback_roots
from trace_jax.budget.strategy import Strategy
from trace_jax.rollout import keys
from trace_jax.rollout.agent import Episode
from trace_jax.rollout.runner import Runner, Start, bare_starts
from trace_jax.tree import grow, query
from trace_jax.types import Prompt, RolloutTree, Stage


class Predictor(Protocol):
    """Predicts success, for the allocator only: it never touches the policy gradient. Many calls may be in flight."""

    async def score_prompts(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """float [B] in [0, 1]: the predicted success rate of each prompt; or [S, B], S draws of each."""
        ...

    async def score_anchors(self, tree: RolloutTree, anchors: np.ndarray) -> np.ndarray:
        """float [A] in [0, 1]: the predicted success rate from each anchor (node ids); reads H_t, nothing after it.

        Or [S, A], S draws of each.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Collected:
    """One prompt's finished tree and what it cost."""

    tree: RolloutTree
    counts: BudgetCount
    fallback_rollouts: int  # extra bare rollouts because there was no anchor (paper E.5); `counts` includes them
    errors: tuple[str, ...]  # messages of the episodes that ended with ENVIRONMENT_ERROR or ENGINE_ERROR
    stage1_seconds: float  # wall clock, waiting for a slot included
    score_seconds: float
    stage2_seconds: float


async def sample_prompt(runner: Runner, prompt: Prompt, samples: int) -> Collected:
    """`samples` independent bare rollouts of one prompt, as a flat tree."""
    growth = _Growth(runner, prompt)
    await growth.bare(samples)
    return growth.collected()


async def collect_prompt(
    runner: Runner, strategy: Strategy, predictor: Predictor | None, prompt: Prompt, rollouts: int
) -> Collected:
    """Spends one prompt's budget: `rollouts` bare rollouts, then `rollouts * N` continuations where they pay most.

    A continuation runs on from the environment's state at its anchor: a value, so siblings share nothing that one of
    them could change. One round only: new turns are not forked again. Without an anchor the continuations become
    floor(rollouts * N / 2) more bare rollouts (paper E.5; the rate is our choice), whose turns are not forked either.
    A rollout that the engine gave up on counts as a failure here, so that a promising prefix of it is tried again.

    Args:
      runner: what runs the episodes.
      strategy: whose N and forks are used.
      predictor: may be None where the strategy needs none.
      prompt: the prompt.
      rollouts: m, at least 1.

    Raises:
      ValueError: scores that are not one number in [0, 1] per anchor, or forks that do not spend the budget exactly.
    """
    growth = _Growth(runner, prompt)
    await growth.bare(rollouts)
    total = rollouts * strategy.continuations_per_root
    if total == 0:
        return growth.collected()
    anchors = query.anchors(growth.tree)
    if anchors.size == 0:
        extra = fallback_roots(total)
        await growth.bare(extra)
        return growth.collected(fallback_rollouts=extra)
    value = await growth.score(predictor, anchors) if strategy.needs_predictor else None
    leaf = query.factual_leaf(growth.tree, anchors)
    rng = keys.forks_rng(runner.sampling.seed, runner.sampling.step, prompt.uid)
    copies = np.asarray(strategy.forks(growth.tree.success[leaf], value, leaf, total, rng))
    if copies.shape != anchors.shape or np.any(copies < 0) or copies.sum() != total:
        raise ValueError(
            f"prompt {prompt.uid!r}: strategy {strategy.name} gave forks {copies.tolist()} for {anchors.size} anchors; "
            f"they must be >= 0 and sum to {total}"
        )
    await growth.fork(anchors, copies)
    return growth.collected()


class _Growth:
    """A prompt's tree while it grows, with the environment's state at each of its nodes."""

    def __init__(self, runner: Runner, prompt: Prompt):
        self.tree = grow.new_tree(prompt)
        self._runner, self._prompt = runner, prompt
        self._states: list[Any] = [prompt.state]  # by node
        self._rollouts = 0
        self._counts = BudgetCount()
        self._errors: list[str] = []
        self._seconds = {"stage1": 0.0, "score": 0.0, "stage2": 0.0}

    async def bare(self, count: int) -> None:
        """Adds `count` bare rollouts."""
        leaves = range(self._rollouts, self._rollouts + count)
        await self._add(bare_starts(self._prompt, leaves), "stage1")

    async def score(self, predictor: Predictor, anchors: np.ndarray) -> np.ndarray:
        """The predictor's values of `anchors`, or draws of them; the tree keeps them, or their mean."""
        begin = time.perf_counter()
        value = np.asarray(await predictor.score_anchors(self.tree, anchors), np.float64)
        self._seconds["score"] += time.perf_counter() - begin
        self.tree = grow.with_values(self.tree, anchors, np.atleast_2d(value).mean(axis=0))
        return value

    async def fork(self, anchors: np.ndarray, copies: np.ndarray) -> None:
        """Adds `copies[i]` continuations from `anchors[i]`."""
        depth, size = query.depth(self.tree), self._prompt.tokens.shape[0]
        starts: list[Start] = []
        for node, count in zip(anchors.tolist(), copies.tolist(), strict=True):
            if count:
                history, turn = query.prefix_tokens(self.tree, node), int(depth[node])
                first = self._rollouts + len(starts)
                starts += [
                    Start(node, Stage.CONTINUATION, leaf, history, self._states[node], turn, size)
                    for leaf in range(first, first + count)
                ]
        await self._add(starts, "stage2")

    def collected(self, fallback_rollouts: int = 0) -> Collected:
        """What has been grown so far."""
        return Collected(
            tree=self.tree,
            counts=self._counts,
            fallback_rollouts=fallback_rollouts,
            errors=tuple(self._errors),
            stage1_seconds=self._seconds["stage1"],
            score_seconds=self._seconds["score"],
            stage2_seconds=self._seconds["stage2"],
        )

    async def _add(self, starts: Sequence[Start], stage: str) -> None:
        begin = time.perf_counter()
        episodes: list[Episode] = await self._runner.run(self._prompt.uid, starts)
        self._seconds[stage] += time.perf_counter() - begin
        new = [(start.node, start.stage, episode.turns) for start, episode in zip(starts, episodes, strict=True)]
        self.tree = grow.add_rollouts(self.tree, new)
        for episode in episodes:  # add_rollouts numbers new nodes rollout by rollout, turn by turn
            self._states += episode.states
            if episode.error:
                self._errors.append(episode.error)
        self._counts = sum((episode.counts for episode in episodes), self._counts)
        self._rollouts += len(starts)
