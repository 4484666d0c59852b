"""BFCL v4, multi-turn categories, as a family of chat tasks.

The environment is the official one: all documented functions of a record's classes can be called at any time, also
those that a miss-func record tells later (one record's own right calls use such a function before it is told), and
those that the data set marks as excluded stay in the list (the official package never reads that mark). A reply without
a call ends a user turn. More than 20 replies with calls in one user turn end the episode: it fails unless that was the
last user turn, which is then scored as it stands. Ours, not official: a call that cannot be read is answered with what
was wrong, where the official handlers end the user turn; calls of unknown functions and calls that would take unbounded
time or memory are refused.
"""

from __future__ import annotations

import copy
import dataclasses

from trace_jax.tasks.base import Outcome
from trace_jax.tasks.bfcl import entry as entries
from trace_jax.tasks.bfcl import literal_calls, scoring, services
from trace_jax.tasks.bfcl.entry import Entry
from trace_jax.tasks.bfcl.literal_calls import CallError
from trace_jax.tasks.bfcl.scoring import EndedTurn
from trace_jax.tasks.chat.family import BadCall, Message, Question, Reaction, Record, Reply, ToolCall

SYSTEM = (
    "You act for a user by calling functions of simulated services. The user asks for several things, one after the "
    "other. For each of them call the functions that it takes, read their results, and go on until it is done; then "
    "reply without a call, and the user goes on. Do what was asked and nothing else. If the functions that you have "
    "cannot do it, or the user has not said something that a call needs and no function can tell you, do not guess: "
    "reply without a call and say what is missing."
)
MAX_CALLING_REPLIES = 20  # in one user turn; official
REFUSED = "refused()"  # stands in the history for a call that was not carried out; names no function
ERROR = "Error during execution: {}"


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """Where an episode stands. Services are never changed; all states of a record share its `entry`."""

    entry: Entry
    services: services.Services
    turn: int = 0  # user turn
    steps: tuple[tuple[str, ...], ...] = ()  # this user turn's call texts, reply by reply
    results: tuple[str, ...] = ()  # of these calls
    replies: int = 0  # with calls, readable or not, in this user turn
    ended: tuple[EndedTurn, ...] = ()


@dataclasses.dataclass(frozen=True)
class Bfcl:
    """The multi-turn categories base, long_context, miss_func and miss_param; ValueError without package bfcl-eval."""

    max_turns: int = 40  # [paper]
    name = "bfcl"
    tool_timeout = None  # the services are objects in memory, each call's work is bounded
    examples = ()

    def __post_init__(self) -> None:
        services.require()

    def ask(self, record: Record) -> Question:
        """The first user turn of a record, with the functions that are told at its start."""
        entry = entries.read(record)
        messages = (Message("system", SYSTEM), *entry.turns[0])
        return Question(messages, entry.tools, State(entry, entry.services), entry.group)

    def react(self, state: State, reply: Reply) -> Reaction:
        """Carries out a reply's calls in order; a reply without calls ends the user turn."""
        if not reply.calls:
            after = _next_turn(state)
            done = after.turn == len(state.entry.turns)
            return Reaction(after, () if done else state.entry.turns[after.turn], done, 0)
        current, steps, results, messages, carried = state.services, [], [], [], 0
        for call in reply.calls:
            if isinstance(call, BadCall):
                messages.append(Message("tool", ERROR.format(call.problem)))
                continue
            try:
                current, result, text = _carry_out(state.entry, current, call)
                carried += 1
            except CallError as error:
                result, text = ERROR.format(error), REFUSED
            steps.append(text)
            results.append(result)
            messages.append(Message("tool", result, name=call.name if text != REFUSED else ""))
        after = dataclasses.replace(
            state,
            services=current,
            steps=state.steps + ((tuple(steps),) if steps else ()),
            results=state.results + tuple(results),
            replies=state.replies + 1,
        )
        if after.replies > MAX_CALLING_REPLIES:
            return Reaction(_next_turn(after), (), True, carried)
        return Reaction(after, tuple(messages), False, carried)

    def score(self, state: State) -> Outcome:
        """The official verdict; an episode whose user turns are not all over has failed."""
        success = float(scoring.succeeded(state.entry, state.ended))
        return Outcome(reward=success, success=success)

    def expert(self, state: State) -> Reply:
        """The right calls of the current user turn in one reply, then a reply that ends it."""
        right = state.entry.truth[state.turn]
        if right and not state.replies:
            return Reply("", tuple(ToolCall(call.name, copy.deepcopy(call.arguments)) for call in right))
        return Reply("That is done." if right else "I cannot do this with the functions and the details that I have.")


def _carry_out(entry: Entry, current: services.Services, call: ToolCall) -> tuple[services.Services, str, str]:
    """(services after a call, its result, its text). Raises CallError for a call that is refused."""
    if type(call.name) is not str:
        raise CallError("the name of a function is a string")
    if call.name not in entry.methods:
        raise CallError(f"there is no function {call.name[:80]!r}")
    arguments = literal_calls.checked_arguments(call.arguments)
    if not all(name.isidentifier() and name.isascii() for name in arguments):
        raise CallError("the names of arguments are letters, digits and underscores")
    text = literal_calls.call_text(call.name, arguments)
    after, result = services.run(
        current, entry.methods[call.name], call.name, literal_calls.as_run(call.name, arguments)
    )
    return after, result, text


def _next_turn(state: State) -> State:
    """The state in which the current user turn is over."""
    ended = (*state.ended, EndedTurn(state.steps, state.results, state.services))
    return State(state.entry, state.services, state.turn + 1, ended=ended)
