"""Messages to text, piece by piece, such that the pieces end to end are the rendering of the whole chat.

A history only ever grows: what a later message adds is rendered alone and appended, and no earlier text is written
again. Templates that do rewrite it (Qwen3's stock one drops old thoughts) are refused at the start.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from trace_jax.tasks.chat.family import Message, Reply, ToolCall
from trace_jax.tasks.chat.formats import Format

_HERE = "\x00here\x00"  # stands for a text whose place in a rendering is looked for; `plain` keeps it out of messages
_PROBE_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}

Tools = tuple[Mapping[str, Any], ...]


class Renderer:
    """A format, with or without thinking. `markers`: texts of the tokenizer's special tokens.

    Raises ValueError for a template that rewrites what it has rendered, or that does not render at all.
    """

    def __init__(self, form: Format, *, thinking: bool, markers: Sequence[str] = ()):
        self.format, self._thinking = form, thinking
        texts = sorted({*markers, *form.tags, "\x00"} - {""}, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, texts)))
        self._heads = functools.lru_cache(maxsize=256)(self._split_opening)
        self._check()
        self.closings = tuple(self._closing(role) for role in ("tool", "user"))

    def plain(self, text: str) -> str:
        """`text` in which nothing is a special token or a tag: a blank follows the first character of each.

        What users and tools say must not end a turn or forge another.
        """
        return self._marker.sub(lambda match: f"{match[0][0]} {match[0][1:]}" if len(match[0]) > 1 else " ", text)

    def opening(self, messages: tuple[Message, ...], tools: Tools) -> tuple[str, str]:
        """A prompt in two parts: what stands before the last message's content, and the rest.

        The first part is the same text for all questions with the same messages before the last and the same tools.
        """
        *before, last = messages
        begin, end = self._heads(_Key(tuple(before), last.role, tools))
        return begin, self.plain(last.content).strip() + end

    def following(self, messages: Sequence[Message]) -> str:
        """What `messages` and the beginning of the next turn add behind a turn that the stop has ended."""
        return self._after_turn([self._entry(message) for message in messages])

    def write(self, reply: Reply) -> str:
        """A turn as the policy would write it, without the stop."""
        return self.format.write(reply)

    def _split_opening(self, key: _Key) -> tuple[str, str]:
        entries = [*(self._entry(message) for message in key.before), {"role": key.role, "content": _HERE}]
        begin, end = self._render(entries, key.tools).split(_HERE)
        return begin, end

    def _after_turn(self, entries: list[dict[str, str]]) -> str:
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _HERE}, *entries]
        return self._render(chat).partition(_HERE)[2].removeprefix(self.format.stop)

    def _closing(self, role: str) -> str:
        entries = [{"role": role, "content": _HERE + "."}]
        return self._after_turn(entries).partition(_HERE + ".")[2]

    def _entry(self, message: Message) -> dict[str, str]:
        own = message.role == "assistant"  # the policy's own marks stay
        entry = {"role": message.role, "content": message.content if own else self.plain(message.content)}
        return entry | ({"name": message.name} if message.name else {})

    def _render(self, entries: list[dict[str, str]], tools: Tools = ()) -> str:
        try:
            rendered, _ = render_jinja_template(
                [entries],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self.format.template,
                add_generation_prompt=True,
                enable_thinking=self._thinking,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"chat template {self.format.name}: {str(error).splitlines()[0]}") from error
        return rendered[0]

    def _check(self) -> None:
        """Renders a chat of every kind of turn whole and in pieces."""
        call = ToolCall("f", {"x": 1})
        thought = "a thought" if self._thinking else ""
        turns = [
            (Reply("", (call, call), thought), [Message("tool", "one", "f"), Message("tool", "two", "f")]),
            (Reply("", (call,), thought), [Message("tool", "three", "f")]),
            (Reply("an answer", (), thought), [Message("user", "and then?")]),
            (Reply("", (call,), thought), [Message("tool", "four", "f")]),
        ]
        first = [Message("system", "s"), Message("user", "q")]
        entries = [self._entry(message) for message in first]
        pieces = "".join(self.opening(tuple(first), (_PROBE_TOOL,)))
        for number, (reply, messages) in enumerate(turns, 1):
            text = self.write(reply)
            entries += [{"role": "assistant", "content": text}, *(self._entry(message) for message in messages)]
            pieces += text + self.format.stop + self.following(messages)
            if self._render(entries, (_PROBE_TOOL,)) != pieces:
                raise ValueError(
                    f"chat template {self.format.name} writes the history anew after turn {number}, but tokens that "
                    "were sampled stay as they are; take qwen3, llama3 or a template that only appends"
                )


class _Key:
    """Arguments of a cached rendering: equal where they would render the same."""

    def __init__(self, before: tuple[Message, ...], role: str, tools: Tools):
        self.before, self.role, self.tools = before, role, tools
        self._text = repr((before, role, tools))

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text
