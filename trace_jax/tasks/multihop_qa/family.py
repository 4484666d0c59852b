"""Multi-hop question answering with a search tool: the paper's QA agent (spec 6.2) as a family of chat tasks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from trace_jax.retrieval.base import RetrievalError, Searcher
from trace_jax.tasks.base import Outcome
from trace_jax.tasks.chat.family import BadCall, Message, Question, Reaction, Reply, ToolCall
from trace_jax.tasks.multihop_qa import prompts, score, tool

MOST_CALLS = 8  # searches of one turn; further ones are refused (our choice)
_SHOWN = 200  # characters of the policy's own text, or a service's, in an error message


@dataclasses.dataclass(frozen=True)
class State:
    """An episode so far."""

    question: str
    references: tuple[str, ...]  # answers that count as right
    turns: int = 0  # of the policy
    response: str = ""  # the last turn's text, which is what counts


class MultihopQa:
    """`tasks.chat.family.Family` over a searcher, which may be an index in this process or a service.

    A turn without a call ends the episode. One that is cut off is scored by its last turn's text, as rLLM does.
    """

    name = "multihop_qa"
    examples = prompts.EXAMPLES

    def __init__(
        self,
        searcher: Searcher,
        *,
        max_turns: int = 5,  # [paper]
        document_characters: int = tool.SHOWN_CHARACTERS,
        turn_seconds: float = 60.0,
        tool_timeout: float = 120.0,
    ):
        """
        Args:
          searcher: finds passages; one that raises RetrievalError is down for the rest of the turn.
          max_turns: model turns of an episode.
          document_characters: that a search shows of each passage, at least 1.
          turn_seconds: after them no further search of the same turn begins.
          tool_timeout: seconds after which a turn is abandoned; above `turn_seconds` and the longest single search.
        Raises ValueError where `tool_timeout` is not above `turn_seconds`, and for no characters.
        """
        if document_characters < 1:
            raise ValueError(f"multihop_qa: document_characters is {document_characters}, must be at least 1")
        if not tool_timeout > turn_seconds > 0:
            raise ValueError(
                f"multihop_qa: tool_timeout is {tool_timeout} and turn_seconds {turn_seconds}; "
                "the former must be above the latter, which must be positive"
            )
        self._searcher, self._turn_seconds, self._characters = searcher, turn_seconds, document_characters
        self.max_turns, self.tool_timeout = max_turns, tool_timeout

    def ask(self, record: Mapping[str, Any]) -> Question:
        """The question of a record {"question", "answers", "group"}. Raises ValueError for another one."""
        question, answers = record.get("question"), record.get("answers")
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"multihop_qa: record {record.get('id')!r} has no question")
        texts = isinstance(answers, (list, tuple)) and all(isinstance(answer, str) for answer in answers)
        references = tuple(dict.fromkeys(answer for answer in answers if answer.strip())) if texts else ()
        if not references:
            raise ValueError(f"multihop_qa: record {record.get('id')!r} has no answers; they are a list of texts")
        return Question(
            messages=(Message("system", prompts.SYSTEM), Message("user", question.strip())),
            tools=(tool.SCHEMA,),
            state=State(question=question.strip(), references=references),
            group=str(record.get("group", "")),
        )

    def react(self, state: State, reply: Reply) -> Reaction:
        """Carries the searches of a turn out, one after the other; a turn without any is the final answer."""
        state = dataclasses.replace(state, turns=state.turns + 1, response=reply.text)
        if not reply.calls:
            return Reaction(state=state, messages=(), done=True, tool_calls=0)
        turn = _Turn(self._searcher, self._characters, time.monotonic() + self._turn_seconds)
        messages = tuple(Message("tool", turn.carry_out(call), name=tool.NAME) for call in reply.calls)
        return Reaction(state=state, messages=messages, done=False, tool_calls=turn.searches)

    def score(self, state: State) -> Outcome:
        """Exact match, or F1 from 0.3 on; see `score.score`."""
        return score.score(state.response, state.references)

    def expert(self, state: State) -> Reply:
        """Searches for the question, then answers with the first reference that can be read back as it is."""
        if state.turns == 0:
            return Reply(text="", calls=(ToolCall(tool.NAME, {"query": state.question}),))
        answer = state.references[0]
        boxed = f"\\boxed{{{answer}}}"
        whole = score.extract(boxed) == answer.strip()  # an answer may hold braces that do not match
        return Reply(text=boxed if whole else f"<answer>{answer}</answer>")


class _Turn:
    """The searches of one turn: at most `MOST_CALLS`, none after the end of its time or after the service failed."""

    def __init__(self, searcher: Searcher, characters: int, end: float):
        self._searcher, self._characters, self._end = searcher, characters, end
        self._calls, self.searches = 0, 0
        self._down = ""

    def carry_out(self, call: ToolCall | BadCall) -> str:
        """What the policy is told about one call."""
        self._calls += 1
        if isinstance(call, BadCall):
            return f"Error: {call.problem[:_SHOWN]}"
        if call.name != tool.NAME:
            return f"Error: there is no tool {call.name[:_SHOWN]!r}; the only tool is {tool.NAME}"
        if self._calls > MOST_CALLS:
            return f"Error: not carried out; a turn may make at most {MOST_CALLS} calls"
        try:
            search = tool.read(call.arguments)
        except tool.BadArguments as error:
            return f"Error: {error}"
        if not self._down and time.monotonic() > self._end:
            return "Error: not carried out; the searches before it took too long"
        return self._down or self._search(search)

    def _search(self, search: tool.Search) -> str:
        try:
            found = self._searcher.search(search.query, search.top_k)
        except RetrievalError as error:
            self._down = f"Error: the search service is not available ({str(error)[:_SHOWN]})"
            return self._down
        self.searches += 1
        return tool.show(found, self._characters)
