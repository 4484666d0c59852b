"""What a policy is told before a question, and two solved questions for few-shot prompts.

The system prompt says the same as the one that the paper prints (Appendix F), in words of our own.
"""

from __future__ import annotations

from trace_jax.retrieval.base import Passage
from trace_jax.tasks.chat.family import Message, Reply, ToolCall
from trace_jax.tasks.multihop_qa import tool

SYSTEM = r"""You answer questions with the help of a search tool. Most questions need facts from more than one source.

Work like this:
1. Decide which facts the question needs, and search for them with the tool. One search finds one fact best.
2. Read what was found. If a fact is missing or unclear, search again with other words.
3. When you know enough, stop calling the tool and answer. Think it through first, then write the answer.

Put the final answer into \boxed{}, as short as possible: a name, a date, a number, yes or no.
For example: \boxed{Lisbon}"""


def _call(query: str) -> Reply:
    return Reply(text="", calls=(ToolCall(tool.NAME, {"query": query, "top_k": 2}),))


def _found(*passages: tuple[str, str]) -> Message:
    return Message("tool", tool.show([Passage(title=title, text=text) for title, text in passages]), name=tool.NAME)


EXAMPLES: tuple[tuple[Message | Reply, ...], ...] = (
    (
        Message("user", "In which country was the composer of the opera Rusalka born?"),
        _call("composer of the opera Rusalka"),
        _found(
            ("Rusalka (opera)", "Rusalka is an opera by Antonín Dvořák, first performed in Prague in 1901."),
            ("Rusalka", "In Slavic folklore, a rusalka is a spirit of the water."),
        ),
        _call("Antonín Dvořák place of birth"),
        _found(
            ("Antonín Dvořák", "Antonín Dvořák was a composer, born in Nelahozeves in what is now the Czech Republic."),
            ("Nelahozeves", "Nelahozeves is a village on the Vltava, north of Prague."),
        ),
        Reply(text="Dvořák wrote Rusalka. He was born in Nelahozeves.\n\\boxed{Czech Republic}"),
    ),
    (
        Message("user", "Are the Loire and the Rhône rivers of the same country?"),
        _call("Loire river"),
        _found(
            ("Loire", "The Loire is the longest river of France. It ends in the Atlantic Ocean."),
            ("Loir", "The Loir is a river in the west of France."),
        ),
        _call("Rhône river"),
        _found(
            ("Rhône", "The Rhône rises in Switzerland, runs through France and ends in the Mediterranean Sea."),
            ("Rhône (department)", "Rhône is a French department around the city of Lyon."),
        ),
        Reply(text="The Loire runs in France and the Rhône in Switzerland and France: both in France.\n\\boxed{yes}"),
    ),
)
