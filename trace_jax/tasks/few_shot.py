"""Any task as a pretrained model can read it: labelled lines behind a few solved examples.

An episode of `arithmetic`, after two solved examples that every prompt begins with:

    Question: ((3+4)*2)
    Step: 3+4
    Result: 7
    Step: 7*2
    Result: 14
    Answer: 14

A line is a turn as before, and the line end closes it, so that no token of a byte-level tokenizer reaches across the
border of two blocks (`check_borders` makes sure for the tokenizer in use). The labels stand for the marks of the task's
own lines; a line without a label reaches the task as it is. Everything else is the wrapped task's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trace_jax.tasks import base
from trace_jax.tasks.demonstrations import demonstrate

_MOST_TRIES = 10_000  # demonstrations that are looked through for one of each difficulty class asked for


class FewShot:
    """`task` with labelled lines and examples: `shots` maps a difficulty class (the instance's group) to their number.

    The examples are the first expert demonstrations of each class, in the order of `shots`. They come from the demo
    split of `examples`, the same family with a difficulty of its own. Raises ValueError for counts below 0 and for a
    class that `examples` does not draw.
    """

    word_level = False

    def __init__(self, task: base.SmallTask, examples: base.SmallTask, shots: Mapping[str, int]):
        self._task, self._labels = task, task.labels
        self.name, self.stop, self.labels = task.name, task.stop, task.labels
        self.closings = task.closings
        self.max_turns, self.tool_timeout = task.max_turns, task.tool_timeout
        self.preamble = "".join(self._example(examples, index) for index in _choose(examples, shots))

    def symbols(self) -> tuple[str, ...]:
        """The characters of the preamble and of the wrapped task's symbols, for the small tokenizer."""
        return tuple(sorted(set("".join((self.preamble, *self._task.symbols())))))

    def size(self, split: str) -> int | None:
        """The task's."""
        return self._task.size(split)

    def instance(self, split: str, index: int) -> base.Instance:
        """The task's instance with the preamble before its question."""
        instance = self._task.instance(split, index)
        return dataclasses.replace(instance, text=self.preamble + self._labels.question + instance.text)

    def step(self, state: Any, action: str) -> base.StepResult:
        """The task's answer to the action without its label."""
        for mark, label in self._labels.actions:
            if action.startswith(label):
                action = mark + action.removeprefix(label)
                break
        return self._shown(self._task.step(state, action))

    def score(self, state: Any) -> base.Outcome:
        """The task's."""
        return self._task.score(state)

    def expert(self, state: Any) -> str:
        """The task's, labelled."""
        return self._labelled(self._task.expert(state))

    def slip(self, state: Any, rng: np.random.Generator) -> str:
        """The task's, labelled."""
        return self._labelled(self._task.slip(state, rng))

    def _labelled(self, action: str) -> str:
        for mark, label in self._labels.actions:
            if action.startswith(mark):
                return label + action.removeprefix(mark)
        return action

    def _shown(self, result: base.StepResult) -> base.StepResult:
        if not result.observation:
            return result
        return dataclasses.replace(result, observation=self._labels.observation + result.observation)

    def _example(self, task: base.Task, index: int) -> str:
        played = demonstrate(task, task.instance("demo", index), np.random.default_rng(0), slip_rate=0.0)
        lines = [self._labels.question + played.prompt]
        for action, observation in played.turns:
            lines.append(self._labelled(action))
            if observation:
                lines.append(self._labels.observation + observation)
        return "".join(lines)


def _choose(task: base.Task, shots: Mapping[str, int]) -> list[int]:
    """Indices of the demo split, class by class in the order of `shots`."""
    for group, count in shots.items():
        if count < 0:
            raise ValueError(f"{task.name}: {count} examples of difficulty {group}; a number of examples is at least 0")
    found: dict[str, list[int]] = {group: [] for group, count in shots.items() if count}
    for index in range(_MOST_TRIES):
        if all(len(found[group]) == shots[group] for group in found):
            return [index for indices in found.values() for index in indices]
        group = task.instance("demo", index).group
        if group in found and len(found[group]) < shots[group]:
            found[group].append(index)
    short = next(group for group in found if len(found[group]) < shots[group])
    raise ValueError(f"{task.name}: no {shots[short]} examples of difficulty {short}; give that class a weight")


def check_borders(encode: Callable[[str], np.ndarray], blocks: list[str]) -> None:
    """Raises ValueError where the tokens of the joined blocks are not the blocks' own tokens end to end.

    Otherwise a policy would meet one text in two ways: as the blocks that a rollout appends, and as it was pretrained.
    """
    parts = [encode(block) for block in blocks]
    if np.array_equal(encode("".join(blocks)), np.concatenate(parts)):
        return
    for i in range(len(blocks) - 1):
        if not np.array_equal(encode(blocks[i] + blocks[i + 1]), np.concatenate(parts[i : i + 2])):
            raise ValueError(
                f"the border between {blocks[i][-20:]!r} and {blocks[i + 1][:20]!r} is no border of tokens in this "
                "tokenizer; end the block with a line end or a special token"
            )
    raise ValueError(f"a border of the blocks from {blocks[0][:20]!r} on is no border of tokens in this tokenizer")
