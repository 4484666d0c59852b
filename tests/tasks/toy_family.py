"""A chat family that fits on a page: sums with an `add` tool."""

from __future__ import annotations

import dataclasses

from trace_jax.tasks.base import Outcome
from trace_jax.tasks.chat.family import BadCall, Message, Question, Reaction, Reply, ToolCall

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum, what the tool said of it, and the answer."""

    x: int
    y: int
    read: tuple[int, ...] = ()
    answer: str | None = None


class Sums:
    """A record is {"id", "x", "y"}; the class is the parity of x."""

    name, max_turns, tool_timeout = "sums", 4, None
    examples = (
        (
            Message("user", "2 + 3?"),
            Reply("", (ToolCall("add", {"x": 2, "y": 3}),)),
            Message("tool", "5", "add"),
            Reply("5"),
        ),
        (Message("user", "0 + 0?"), Reply("0")),
    )

    def ask(self, record):
        """"x + y?" with one tool."""
        text = f"{record['x']} + {record['y']}?"
        state = Sum(record["x"], record["y"])
        return Question((Message("system", "Add."), Message("user", text)), (TOOL,), state, "even odd".split()[state.x % 2])

    def react(self, state, reply):
        """Adds for each call; a text is the answer."""
        if not reply.calls:
            return Reaction(dataclasses.replace(state, answer=reply.text), (), True, 0)
        messages, done = [], 0
        for call in reply.calls:
            if isinstance(call, BadCall):
                messages.append(Message("tool", call.problem))
            elif call.name != "add":
                messages.append(Message("tool", f"there is no {call.name}"))
            else:
                total, done = call.arguments["x"] + call.arguments["y"], done + 1
                state = dataclasses.replace(state, read=(*state.read, total))
                messages.append(Message("tool", str(total), "add"))
        return Reaction(state, tuple(messages), False, done)

    def score(self, state):
        """1 for the sum, half a reward for another number."""
        right = state.answer == str(state.x + state.y)
        return Outcome(1.0 if right else 0.5 * (state.answer or "").isdigit(), float(right))

    def expert(self, state):
        """Adds, then answers."""
        if state.read:
            return Reply(str(state.read[-1]))
        return Reply("", (ToolCall("add", {"x": state.x, "y": state.y}),))
