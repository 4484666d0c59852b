"""Who draws which noise: sampling keys are tuples of integers that name the place of a turn, never the time of a call.

A turn's key is `(seed, stream, step, prompt_key(uid), leaf, turn)`; an engine folds it into its noise. So a rollout can
be replayed alone, and what it draws does not depend on what else is in flight. (Our choice.)
"""

from __future__ import annotations

import enum
import hashlib

import numpy as np


class Stream(enum.IntEnum):
    """Families of keys that never share noise."""

    TRAIN = 0  # rollouts inside the budget
    EVAL = 1  # evaluation samples
    ORACLE = 2  # extra rollouts of the oracle predictor, outside the budget
    FORKS = 3  # tie-breaking of a strategy's forks, drawn on the host
    WARM_UP = 4  # rollouts that a predictor is fitted to before the first step, outside the budget
    HOST = 5  # everything else that the host draws in a step


def prompt_key(uid: str) -> int:
    """First 8 bytes of blake2b(uid), big-endian: an integer in [0, 2**64) that is stable across processes."""
    return int.from_bytes(hashlib.blake2b(uid.encode("utf-8")).digest()[:8], "big")


def episode_key(seed: int, stream: Stream, step: int, uid: str, leaf: int) -> tuple[int, ...]:
    """Key of one rollout; the agent appends the turn index. Bare rollout j is leaf j, continuation c is leaf m + c."""
    return (seed, int(stream), step, prompt_key(uid), leaf)


def forks_rng(seed: int, step: int, uid: str) -> np.random.Generator:
    """Generator for one prompt's fork allocation in one step. seed and step must be >= 0."""
    return np.random.default_rng(np.random.SeedSequence((seed, int(Stream.FORKS), step, prompt_key(uid))))


def host_rng(seed: int, step: int, purpose: str) -> np.random.Generator:
    """Generator for one purpose of one step ("roots", "policy", ...), so that no generator state outlives a step."""
    return np.random.default_rng(np.random.SeedSequence((seed, int(Stream.HOST), step, prompt_key(purpose))))
