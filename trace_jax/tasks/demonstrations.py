"""Scripted demonstrations: the task's expert plays an episode and now and then slips."""

from __future__ import annotations

import dataclasses

import numpy as np

from trace_jax.tasks.base import Instance, Outcome, Task


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One played episode as text."""

    prompt: str
    turns: tuple[tuple[str, str], ...]  # (action, observation); after an answer the observation is empty
    outcome: Outcome


def demonstrate(task: Task, instance: Instance, rng: np.random.Generator, slip_rate: float) -> Demonstration:
    """Plays one episode: each action is `task.slip` with probability `slip_rate`, else `task.expert`.

    After a slip the expert goes on from the state that the slip led to, as a policy would. Ends with the answer or
    after `task.max_turns` turns. Raises ValueError for a rate outside [0, 1].
    """
    if not 0 <= slip_rate <= 1:
        raise ValueError(f"slip_rate is {slip_rate}, must be in [0, 1]")
    state, turns = instance.state, []
    for _ in range(task.max_turns):
        slips = rng.random() < slip_rate
        action = task.slip(state, rng) if slips else task.expert(state)
        result = task.step(state, action)
        state = result.state
        turns.append((action, result.observation))
        if result.done:
            break
    return Demonstration(instance.text, tuple(turns), task.score(state))
