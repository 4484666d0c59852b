"""What every task family provides, and the few rules that all of them share.

A task is a set of questions and an environment. The environment is a value: `step` maps a state and an action to a new
state and never changes the old one, so that a fork of a rollout is a reference to a state.

Splits: "train" (rollouts), "eval" (held out) and "demo" (scripted demonstrations) share no instance. How that is kept
is each task's business; each states it in its own docstring.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

SPLITS = ("train", "eval", "demo")
_SHARES = (("train", 128), ("eval", 192), ("demo", 256))  # upper ends, of 256: a half, a quarter, a quarter


@dataclasses.dataclass(frozen=True)
class Instance:
    """One question of a task."""

    uid: str  # "name/split/index"
    text: str  # the prompt's text, begins with the task's `preamble`
    state: Any  # the environment before the first turn; immutable
    group: str  # difficulty class, for reports only


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the environment did with one action."""

    state: Any  # the environment after the action; immutable
    observation: str  # text shown to the policy; ends with one of the task's `closings`, empty when `done`
    done: bool  # True after a final answer
    tool_calls: int  # number of tool calls that the action made, malformed ones not counted
    failed_calls: int = 0  # what was meant as a call, but could not be read or carried out


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an episode ended."""

    reward: float  # what the policy is trained on
    success: float  # 0.0 or 1.0: what the allocator, the predictor's targets and the reports use


@dataclasses.dataclass(frozen=True)
class Labels:
    """How a task's lines are labelled for a pretrained policy (`few_shot.py`)."""

    question: str
    observation: str
    actions: tuple[tuple[str, str], ...]  # (mark that the task's own line begins with, label in its place), first match


class Task(Protocol):
    """A family of questions with its tools, its scoring rule and its scripted demonstrator."""

    name: str
    stop: str  # the text that ends every turn
    closings: tuple[str, ...]  # texts that an observation may end with; of one that ends with another, the longer first
    preamble: str  # the text that every prompt begins with; "" where there is none
    max_turns: int  # turns after which an episode is cut off
    tool_timeout: float | None  # seconds a step may take; None where tools are in memory and run inline

    def size(self, split: str) -> int | None:
        """Number of instances of a split; None where there is no end."""
        ...

    def instance(self, split: str, index: int) -> Instance:
        """Question number `index` >= 0 of a split: a function of the task's arguments, split and index alone."""
        ...

    def step(self, state: Any, action: str) -> StepResult:
        """The environment's answer to one action, with or without its closing `stop`. Accepts any text."""
        ...

    def score(self, state: Any) -> Outcome:
        """Scores an episode that is finished or was cut off."""
        ...

    def expert(self, state: Any) -> str:
        """The right next action in this state, `stop` included; after a mistake it goes on from the mistake."""
        ...

    def slip(self, state: Any, rng: np.random.Generator) -> str:
        """A plausible wrong next action, `stop` included; the expert's own where a slip makes no sense."""
        ...


class SmallTask(Task, Protocol):
    """A task of generated questions in short lines, which a small tokenizer of its own can read."""

    word_level: bool  # the small tokenizer: one token a blank-separated word (True) or one a character (False)
    labels: Labels

    def symbols(self) -> tuple[str, ...]:
        """The vocabulary of the small tokenizer, in a fixed order, `stop` included."""
        ...


def instance_rng(seed: int, split: str, index: int) -> np.random.Generator:
    """The random stream of one instance: independent for each (seed, split, index).

    Raises ValueError for a split that does not exist and for a negative index.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, must be one of {', '.join(SPLITS)}")
    if index < 0:
        raise ValueError(f"index of the {split} split is {index}, must be at least 0")
    return np.random.default_rng([seed, SPLITS.index(split), index])


def check_seed(seed: int, *, task: str) -> int:
    """Returns a seed that is fit for numpy's generators. Raises ValueError for a negative one."""
    if seed < 0:
        raise ValueError(f"{task}: seed is {seed}, must be at least 0")
    return seed


def owner(text: str) -> str:
    """The split that owns a question text: a half of all texts is train's, a quarter eval's, a quarter demo's.

    By a hash of the text alone, so the same for every seed. A task that draws until the text belongs to the split it
    draws for has splits that are disjoint even where a difficulty class has few questions.
    """
    share = hashlib.blake2b(text.encode(), digest_size=1).digest()[0]
    return next(split for split, end in _SHARES if share < end)


@dataclasses.dataclass(frozen=True)
class Difficulty:
    """A distribution over difficulty classes."""

    levels: np.ndarray  # int64 [C], rising
    probability: np.ndarray  # float64 [C], sums to 1

    def draw(self, rng: np.random.Generator) -> int:
        """One difficulty level."""
        return int(rng.choice(self.levels, p=self.probability))


def difficulty_of(weights: Mapping[int, float], *, task: str, unit: str, highest: int) -> Difficulty:
    """Normalises weights of difficulty levels 1..highest; a level of weight 0 is never drawn.

    Raises ValueError, with the task and the unit of its levels in the message, for no weights, for a level that is not
    an integer in 1..highest, and for weights that are negative, not finite, or all 0.
    """
    if not weights:
        raise ValueError(f"{task}: difficulty is empty; give a number of {unit} a weight, e.g. {{1: 1.0}}")
    for level, weight in weights.items():
        if isinstance(level, bool) or not isinstance(level, (int, np.integer)) or not 1 <= level <= highest:
            raise ValueError(f"{task}: difficulty has level {level!r}; {unit} are integers in 1..{highest}")
        if not np.isfinite(weight) or weight < 0:
            raise ValueError(f"{task}: difficulty gives {level} {unit} weight {weight}; weights are finite and >= 0")
    levels = np.array(sorted(level for level in weights if weights[level] > 0), dtype=np.int64)
    if levels.size == 0:
        raise ValueError(f"{task}: all difficulty weights are 0; give a number of {unit} a positive weight")
    weight = np.array([weights[int(level)] for level in levels], dtype=np.float64)
    return Difficulty(levels=levels, probability=weight / weight.sum())
