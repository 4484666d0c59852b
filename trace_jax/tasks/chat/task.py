"""A chat family as a task: text of prompts, turns and observations around the family's messages.

An episode in Qwen3's format; what the policy writes stands between `assistant` and `<|im_end|>`:

    <|im_start|>system ... <tools> ... <|im_end|>
    <|im_start|>user
    What is 17 * 23?<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "python", "arguments": {"code": "print(17 * 23)"}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    391
    </tool_response><|im_end|>
    <|im_start|>assistant
    The answer is \\boxed{391}.<|im_end|>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trace_jax.tasks import base
from trace_jax.tasks.chat.family import Family, Message, Question, Record, Reply
from trace_jax.tasks.chat.records import Records
from trace_jax.tasks.chat.render import Renderer


def opening(family: Family, renderer: Renderer, record: Record, shots: int) -> tuple[Question, str, str]:
    """A record's question and its prompt in two parts: what does not depend on the question's text, and the rest.

    The first `shots` examples of the family stand between its system message and the question. Raises ValueError where
    the family has fewer.
    """
    if shots > len(family.examples):
        raise ValueError(f"{family.name} has {len(family.examples)} solved conversations, not {shots}")
    question = family.ask(record)
    *system, last = question.messages
    shown = [_as_message(renderer, turn) for example in family.examples[:shots] for turn in example]
    begin, end = renderer.opening((*system, *shown, last), question.tools)
    return question, begin, end


class Chat:
    """The task.

    `shots`: solved conversations that every prompt begins with. `preamble`: the text that all prompts begin with, ""
    where they have none in common.
    """

    def __init__(self, family: Family, renderer: Renderer, records: Records, *, shots: int, preamble: str):
        self._family, self._renderer, self._records, self._shots = family, renderer, records, shots
        self.name, self.max_turns, self.tool_timeout = family.name, family.max_turns, family.tool_timeout
        self.stop, self.closings, self.preamble = renderer.format.stop, renderer.closings, preamble

    def size(self, split: str) -> int | None:
        """Number of instances of a split, None without end."""
        return self._records.evaluation_size() if split == "eval" else None

    def benchmarks(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the eval split that belong to each evaluation set."""
        return self._records.benchmarks()

    def too_long(self) -> Mapping[str, int]:
        """How many records of each evaluation set are no instances because of their prompts' length."""
        return self._records.too_long()

    def instance(self, split: str, index: int) -> base.Instance:
        """The question of a record. Its class is the family's, and in the eval split the name of the data set."""
        uid, data_set, record = self._records.find(split, index)
        question, begin, end = opening(self._family, self._renderer, record, self._shots)
        group = data_set if split == "eval" else question.group
        return base.Instance(f"{self.name}/{uid}", begin + end, question.state, group)

    def step(self, state: Any, action: str) -> base.StepResult:
        """The family's reaction to the calls and the text of a turn."""
        reply = self._renderer.format.read(action.removesuffix(self.stop))
        reaction = self._family.react(state, reply)
        observation = "" if reaction.done else self._renderer.following(reaction.messages)
        failed = len(reply.calls) - reaction.tool_calls
        return base.StepResult(reaction.state, observation, reaction.done, reaction.tool_calls, failed)

    def score(self, state: Any) -> base.Outcome:
        """The family's."""
        return self._family.score(state)

    def expert(self, state: Any) -> str:
        """The family's scripted turn as text."""
        return self._renderer.write(self._family.expert(state)) + self.stop

    def slip(self, state: Any, rng: np.random.Generator) -> str:
        """The expert's turn: real records come with no plausible mistakes."""
        del rng
        return self.expert(state)


def _as_message(renderer: Renderer, turn: Message | Reply) -> Message:
    return turn if isinstance(turn, Message) else Message("assistant", renderer.write(turn))
