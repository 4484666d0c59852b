"""The one interface of all ways to spend a rollout budget, and what the flat ones share.

A strategy is a frozen dataclass in a file of its own: its fields are the budget, its two methods the choices.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from trace_jax.budget import checks


class Strategy(Protocol):
    """Decides where rollouts start. Holds no state and draws all randomness from the generator it is given."""

    @property
    def name(self) -> str:
        """Short lower-case name for configs and logs."""

    @property
    def needs_predictor(self) -> bool:
        """Whether prompts and anchors have to be scored; if not, the scores handed in are None."""

    @property
    def continuations_per_root(self) -> int:
        """N: a prompt with m root rollouts receives m * N continuations; 0 for flat strategies."""

    def roots(
        self, success_probability: np.ndarray | None, pool_size: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Root rollouts of every prompt in the pool, for one step.

        Args:
          success_probability: float [pool_size] in [0, 1], or float [S, pool_size]: S draws of the predictor's belief
            about each (ours). None unless `needs_predictor`.
          pool_size: number of candidate prompts.
          rng: a generator of this step.

        Returns:
          m int64 [pool_size]; 0 skips the prompt. The sum is the same at every step.
        """

    def forks(
        self, success: np.ndarray, value: np.ndarray | None, rollout: np.ndarray, total: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Continuations of every anchor of one prompt.

        Args:
          success: [A], 0 or 1: the outcome of the bare rollout on which each anchor lies.
          value: float [A] in [0, 1], the predicted success rate from each anchor, or float [S, A], S draws of it.
            None unless `needs_predictor`.
          rollout: int [A], which bare rollout each anchor lies on (equal numbers, equal rollout).
          total: continuations to hand out.
          rng: a generator of this prompt and step, so that the result does not depend on which prompt finishes first.

        Returns:
          K int64 [A], whose sum is `total` exactly. ValueError where total > 0 and there is no anchor.
        """


def prompt_scores(name: str, success_probability: np.ndarray | None, pool_size: int) -> np.ndarray:
    """Returns the scores that a strategy called `name` needs, float64 [pool_size] or [S, pool_size].

    Raises:
      ValueError: there are none, or not one (or S) for each prompt.
    """
    got = "none" if success_probability is None else (np.shape(success_probability) or (0,))[-1]
    if got != pool_size:
        raise ValueError(f"{name} needs a predicted success for each of {pool_size} prompts, got {got}")
    return checks.probability_draws("success_probability", success_probability)


def flat_prompts(total_rollouts: int, rollouts_per_prompt: int) -> int:
    """How many prompts a flat budget serves, `total_rollouts / rollouts_per_prompt`.

    Raises:
      ValueError: groups of fewer than 2, no group at all, or a budget that groups do not divide.
    """
    if rollouts_per_prompt < 2:
        raise ValueError(f"rollouts_per_prompt is {rollouts_per_prompt}; a group needs at least 2 rollouts")
    if total_rollouts < rollouts_per_prompt or total_rollouts % rollouts_per_prompt:
        raise ValueError(
            f"total_rollouts is {total_rollouts}, which is no positive multiple of rollouts_per_prompt="
            f"{rollouts_per_prompt}; change one of them"
        )
    return total_rollouts // rollouts_per_prompt


def flat_roots(ranking: np.ndarray, total_rollouts: int, rollouts_per_prompt: int) -> np.ndarray:
    """Gives `rollouts_per_prompt` rollouts to the prompts that come first in `ranking`, until the budget is spent.

    Args:
      ranking: int [pool], a permutation of the pool's indices.
      total_rollouts: the budget, a multiple of `rollouts_per_prompt`.
      rollouts_per_prompt: G, the same for every chosen prompt.

    Returns:
      m int64 [pool].

    Raises:
      ValueError: as `flat_prompts`, or the pool is too small.
    """
    chosen = flat_prompts(total_rollouts, rollouts_per_prompt)
    if chosen > ranking.size:
        raise ValueError(
            f"total_rollouts={total_rollouts} at {rollouts_per_prompt} per prompt needs {chosen} prompts, but the pool "
            f"has {ranking.size}; enlarge the pool or lower the budget"
        )
    m_B = np.zeros(ranking.size, dtype=np.int64)
    m_B[ranking[:chosen]] = rollouts_per_prompt
    return m_B


def no_forks(success: np.ndarray, total: int) -> np.ndarray:
    """The forks of a flat strategy: zeros int64 [A]. ValueError where a positive total asks for some."""
    if total:
        raise ValueError(f"total is {total}, but a flat strategy forks nothing; its continuations_per_root is 0")
    return np.zeros(len(success), dtype=np.int64)
