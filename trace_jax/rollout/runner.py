"""Many episodes at once: where each starts, how all are sampled, and in which slot they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trace_jax.budget.account import CONTINUATION_UNITS, ROOT_UNITS
from trace_jax.engines.base import Engine
from trace_jax.rollout import keys
from trace_jax.rollout.agent import Episode, Limits, run_episode
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.slots import EpisodeSlots, run_all
from trace_jax.types import Prompt, Stage

UNITS = {Stage.ROOT_ROLLOUT: ROOT_UNITS, Stage.CONTINUATION: CONTINUATION_UNITS}
PRIORITY = {Stage.ROOT_ROLLOUT: 1, Stage.CONTINUATION: 0}  # the reason is in rollout/slots.py


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the episodes of one step are sampled."""

    limits: Limits
    temperature: float  # > 0
    seed: int  # >= 0, the run's seed
    stream: keys.Stream
    step: int  # >= 0
    salt: str  # name space of the prefix cache: the weight version
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0: all tokens

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")


@dataclasses.dataclass(frozen=True)
class Start:
    """Where one rollout starts."""

    node: int  # tree node that it hangs on: 0 or an anchor
    stage: Stage
    leaf: int  # its index among the prompt's rollouts, for the sampling key
    history: np.ndarray  # int32 [n], the tokens from the prompt to `node`
    state: Any  # the environment's state at `node`
    turn: int  # turns already done at `node`
    prompt_tokens: int  # of `history`, those of the prompt


def bare_starts(prompt: Prompt, leaves: range) -> list[Start]:
    """Starts of bare rollouts with these leaf indices."""
    size = prompt.tokens.shape[0]
    return [Start(0, Stage.ROOT_ROLLOUT, leaf, prompt.tokens, prompt.state, 0, size) for leaf in leaves]


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs rollouts of one step on one engine."""

    engine: Engine
    environment: Environment
    sampling: Sampling
    slots: EpisodeSlots
    on_episode: Callable[[Episode], None] | None = None  # called after each finished episode

    async def run(self, uid: str, starts: Sequence[Start]) -> list[Episode]:
        """Runs all `starts` of prompt `uid` at once, each in a slot of its own.

        Returns:
          Episodes in the order of `starts`, whose counts include their budget units.

        Raises:
          The first unexpected exception, after the other episodes of this call were cancelled.
        """
        return await run_all(
            self.slots.run(lambda start=start: self._one(uid, start), priority=PRIORITY[start.stage])
            for start in starts
        )

    async def _one(self, uid: str, start: Start) -> Episode:
        sampling = self.sampling
        episode = await run_episode(
            self.engine,
            self.environment,
            history=start.history,
            state=start.state,
            turn=start.turn,
            limits=sampling.limits.of_prompt(start.prompt_tokens),
            temperature=sampling.temperature,
            key=keys.episode_key(sampling.seed, sampling.stream, sampling.step, uid, start.leaf),
            salt=sampling.salt,
            group=uid,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        counts = dataclasses.replace(episode.counts, units=UNITS[start.stage])
        episode = dataclasses.replace(episode, counts=counts)
        if self.on_episode is not None:
            self.on_episode(episode)
        return episode

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError before anything is spent: a prompt that does not fit, or two of the same uid.

        Equal uids would draw equal noise and so waste the second one's budget (our rule).
        """
        limit, seen = self.sampling.limits.context_length, set()
        if limit > self.engine.context_length:
            raise ValueError(
                f"limits.context_length is {limit}, but the engine holds {self.engine.context_length} tokens; "
                "lower the limit or enlarge the engine's context"
            )
        for prompt in prompts:
            size = prompt.validate().tokens.shape[0]
            if size + 1 > limit:
                raise ValueError(
                    f"prompt {prompt.uid!r} has {size} tokens, but context_length {limit} leaves room for "
                    f"{limit - 1}; raise context_length or shorten the prompt"
                )
            if prompt.uid in seen:
                raise ValueError(f"prompt {prompt.uid!r} appears twice in one batch; uids must be unique in a batch")
            seen.add(prompt.uid)
        kept = self.sampling.limits.max_observation_tokens
        closing = max(tokens.size for _, tokens in self.environment.closings)
        if kept < closing:
            raise ValueError(f"limits.max_observation_tokens is {kept}, but what ends one has {closing} tokens alone")
