"""What a family of chat tasks provides: questions in messages, tools, reactions to a model's turns, a score.

`tasks.chat.task.Chat` makes a `tasks.base.Task` of a family: it renders messages to text by a chat template and reads a
model's text back into a `Reply`. A family never sees a template or a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from trace_jax.tasks.base import Outcome

Record = Mapping[str, Any]  # one entry of a data set


@dataclasses.dataclass(frozen=True)
class Message:
    """One message that the policy reads."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    name: str = ""  # of the tool, for role "tool"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it; neither the name nor the arguments are checked."""

    name: str
    arguments: Mapping[str, Any]  # a JSON object


@dataclasses.dataclass(frozen=True)
class BadCall:
    """Something that was meant as a call and could not be read."""

    problem: str  # one line that the policy may be shown


@dataclasses.dataclass(frozen=True)
class Reply:
    """One turn of the policy."""

    text: str  # outside of thoughts and calls, without blanks around it
    calls: tuple[ToolCall | BadCall, ...] = ()  # in order; none: a final answer
    thought: str = ""


@dataclasses.dataclass(frozen=True)
class Question:
    """Where an episode starts."""

    messages: tuple[Message, ...]  # system and user
    tools: tuple[Mapping[str, Any], ...]  # {"type": "function", "function": {"name", "description", "parameters"}}
    state: Any  # before the first turn; immutable
    group: str  # difficulty class, for reports only


@dataclasses.dataclass(frozen=True)
class Reaction:
    """What follows a turn."""

    state: Any  # after the turn; immutable
    messages: tuple[Message, ...]  # a tool message for each call in order, or the next user message; () when done
    done: bool
    tool_calls: int  # well-formed calls that were carried out


class Family(Protocol):
    """A kind of question with its tools, its scoring rule and its scripted solution."""

    name: str
    max_turns: int  # model turns after which an episode is cut off
    tool_timeout: float | None  # seconds a reaction may take, above its tools' own limits; None: it runs inline
    examples: tuple[tuple[Message | Reply, ...], ...]  # solved conversations for few-shot prompts

    def ask(self, record: Record) -> Question:
        """The question of a record. Raises ValueError for a record that is none of this family's."""
        ...

    def react(self, state: Any, reply: Reply) -> Reaction:
        """Carries a turn out; never changes `state`. Whatever the policy wrote, a tool's failure is an observation."""
        ...

    def score(self, state: Any) -> Outcome:
        """Scores an episode that is finished or was cut off."""
        ...

    def expert(self, state: Any) -> Reply:
        """The right next turn; followed from the question to the end, it succeeds."""
        ...
