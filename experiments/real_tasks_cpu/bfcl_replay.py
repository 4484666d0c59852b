"""Replays the right calls of BFCL's 800 multi-turn entries, and changed ones, and compares with the official checker.

    python -m experiments.real_tasks_cpu.bfcl_replay [--records NUMBER]

Right calls: each entry's are taken from its first message to its last and scored by the family. Changed calls: one call
of each entry is changed, in each of the ways of `KINDS`, which are a function of the entry's id; the changed calls go
through the family, and what it then says is compared with the official checker on the same texts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tqdm

from experiments.real_tasks_cpu import bfcl_official
from trace_jax.data import bfcl
from trace_jax.tasks.bfcl.family import Bfcl, State
from trace_jax.tasks.chat.family import Reply, ToolCall

CALLS_A_REPLY = 3  # an entry has 34 right calls in one user turn, which may have 20 replies
CATEGORIES = ("base", "long_context", "miss_func", "miss_param")
Turns = list[list[ToolCall]]  # the calls of each user turn
Mutation = Callable[[Turns, Sequence[ToolCall], np.random.Generator], None]  # changes the turns in place


def records(category: str) -> list[Mapping[str, Any]]:
    """The records of a category, from the installed package."""
    path = bfcl.installed_folder() / bfcl.file_name(category)
    return list(bfcl.records(path, category, lambda _: None))


def replay(family: Bfcl, record: Mapping[str, Any]) -> State:
    """The state after the scripted solution of an entry."""
    state, done = family.ask(record).state, False
    while not done:
        reaction = family.react(state, family.expert(state))
        state, done = reaction.state, reaction.done
    return state


def play(family: Bfcl, start: State, turns: Turns) -> State:
    """The state after these calls, `CALLS_A_REPLY` at a time."""
    state = start
    for calls in turns:
        for first in range(0, len(calls), CALLS_A_REPLY):
            state = family.react(state, Reply("", tuple(calls[first : first + CALLS_A_REPLY]))).state
        state = family.react(state, Reply("Done.")).state
    return state


def _somewhere(turns: Turns, rng: np.random.Generator) -> tuple[int, int]:
    """User turn and place of one of the calls."""
    places = [(turn, place) for turn, calls in enumerate(turns) for place in range(len(calls))]
    return places[rng.integers(len(places))]


def _with_arguments(turns: Turns, rng: np.random.Generator) -> tuple[int, int]:
    """User turn and place of one of the calls that have arguments, of any call if none has."""
    places = [(turn, place) for turn, calls in enumerate(turns) for place, call in enumerate(calls) if call.arguments]
    return places[rng.integers(len(places))] if places else _somewhere(turns, rng)


def _change_value(turns: Turns, _: Sequence[ToolCall], rng: np.random.Generator) -> None:
    turn, place = _with_arguments(turns, rng)
    call = turns[turn][place]
    arguments = dict(call.arguments)
    if arguments:
        name = sorted(arguments)[rng.integers(len(arguments))]
        arguments[name] = _other(arguments[name])
    else:
        arguments["extra"] = 1
    turns[turn][place] = ToolCall(call.name, arguments)


def _other(value: Any) -> Any:
    """A value of the same type that is another one."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value[:-1] if len(value) > 1 else value + "x"
        case list():
            return value[1:] if value else [1]
        case dict():
            return {key: _other(item) for key, item in value.items()}
    return 0


def _change_type(turns: Turns, _: Sequence[ToolCall], rng: np.random.Generator) -> None:
    turn, place = _with_arguments(turns, rng)
    call = turns[turn][place]
    arguments = dict(call.arguments)
    if arguments:
        name = sorted(arguments)[rng.integers(len(arguments))]
        old = arguments[name]
        arguments[name] = [old] if isinstance(old, (int, float)) else f"{old} (x)"
    turns[turn][place] = ToolCall(call.name, arguments)


def _forget_argument(turns: Turns, _: Sequence[ToolCall], rng: np.random.Generator) -> None:
    turn, place = _with_arguments(turns, rng)
    call = turns[turn][place]
    turns[turn][place] = ToolCall(call.name, dict(sorted(call.arguments.items())[1:]))


def _change_function(turns: Turns, others: Sequence[ToolCall], rng: np.random.Generator) -> None:
    turn, place = _somewhere(turns, rng)
    turns[turn][place] = others[rng.integers(len(others))]


def _drop(turns: Turns, _: Sequence[ToolCall], rng: np.random.Generator) -> None:
    turn, place = _somewhere(turns, rng)
    del turns[turn][place]


def _drop_turn(turns: Turns, _: Sequence[ToolCall], rng: np.random.Generator) -> None:
    turns[_somewhere(turns, rng)[0]].clear()


def _add(turns: Turns, others: Sequence[ToolCall], rng: np.random.Generator) -> None:
    calls = turns[rng.integers(len(turns))]
    calls.insert(rng.integers(len(calls) + 1), others[rng.integers(len(others))])


def _repeat(turns: Turns, _: Sequence[ToolCall], rng: np.random.Generator) -> None:
    turn, place = _somewhere(turns, rng)
    turns[turn].insert(place, turns[turn][place])


def _earlier(turns: Turns, _: Sequence[ToolCall], rng: np.random.Generator) -> None:
    turn, place = _somewhere(turns, rng)
    if turn:
        turns[turn - 1].append(turns[turn].pop(place))


def _unknown(turns: Turns, _: Sequence[ToolCall], rng: np.random.Generator) -> None:
    turn, place = _somewhere(turns, rng)
    turns[turn][place] = ToolCall("no_such_function", turns[turn][place].arguments)


KINDS: Mapping[str, Mutation] = {
    "changed value": _change_value,
    "changed type": _change_type,
    "forgotten argument": _forget_argument,
    "changed function": _change_function,
    "unknown function": _unknown,
    "dropped call": _drop,
    "dropped turn": _drop_turn,
    "added call": _add,
    "repeated call": _repeat,
    "call one turn earlier": _earlier,
}


def mutated(state: State, kind: str, others: Sequence[ToolCall]) -> Turns | None:
    """The right calls of an entry with one change of that kind; `others` are calls to take new ones from.

    None where the change leaves everything as it was, e.g. a call of the first user turn cannot be made a turn earlier.
    """
    turns = [list(calls) for calls in state.entry.truth]
    seed = hashlib.blake2b(f"{kind} {state.entry.id}".encode(), digest_size=8).digest()
    KINDS[kind](turns, others, np.random.default_rng(int.from_bytes(seed)))
    return turns if turns != [list(calls) for calls in state.entry.truth] else None


def compare(family: Bfcl, record: Mapping[str, Any], start: State, turns: Turns) -> tuple[bool, bool]:
    """(our verdict, the official one) on these calls."""
    state = play(family, start, turns)
    return bool(family.score(state).success), bfcl_official.verdict(record, [turn.steps for turn in state.ended])


def right_calls(starts: Sequence[State]) -> dict[str, list[ToolCall]]:
    """All right calls of these entries by the class that has their function: calls that make sense somewhere."""
    found: dict[str, list[ToolCall]] = {}
    for start in starts:
        for call in (call for calls in start.entry.truth for call in calls):
            found.setdefault(start.entry.methods[call.name], []).append(call)
    return found


def measure(number: int) -> dict[str, Any]:
    """The figures over the first `number` records of each category."""
    family, everything = Bfcl(), [record for category in CATEGORIES for record in records(category)[:number]]
    valid, ended, milliseconds = 0, [], {category: [] for category in CATEGORIES}
    for record in tqdm.tqdm(everything, desc="right calls", unit="entry"):
        begin = time.perf_counter()
        state = replay(family, record)
        valid += family.score(state).success == 1.0
        milliseconds[record["group"]].append(1e3 * (time.perf_counter() - begin))
        ended.append(bfcl_official.verdict(record, [turn.steps for turn in state.ended]))
    starts = [family.ask(record).state for record in everything]
    by_class = right_calls(starts)
    rows: dict[str, list[tuple[bool, bool]]] = {kind: [] for kind in KINDS}
    differ = []
    for record, start in tqdm.tqdm(list(zip(everything, starts)), desc="changed calls", unit="entry"):
        others = [call for name in record["involved_classes"] for call in by_class[name]]
        for kind in KINDS:
            turns = mutated(start, kind, others)
            if turns is None:
                continue
            ours, official = compare(family, record, start, turns)
            rows[kind].append((ours, official))
            differ += [f"{record['id']}: {kind}: ours {ours}"] if ours != official else []
    pairs = [pair for kind in KINDS for pair in rows[kind]]
    return {
        "entries": len(everything),
        "ground_truth_valid_share": valid / len(everything),
        "ground_truth_official_share": sum(ended) / len(everything),
        "milliseconds_mean": {category: round(float(np.mean(times)), 2) for category, times in milliseconds.items()},
        "milliseconds_max": {category: round(float(np.max(times)), 2) for category, times in milliseconds.items()},
        "mutated": len(pairs),
        "mutated_agreement_share": sum(ours == official for ours, official in pairs) / len(pairs),
        "mutated_official_valid_share": {
            kind: round(sum(official for _, official in rows[kind]) / len(rows[kind]), 3) for kind in KINDS
        },
        "mutated_of_each_kind": {kind: len(rows[kind]) for kind in KINDS},
        "differ": differ,
    }


def main() -> dict[str, Any]:
    """Prints the figures and returns them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200, help="of each category, from the first")
    figures = measure(parser.parse_args().records)
    print(json.dumps(figures, indent=2))
    return figures


if __name__ == "__main__":
    main()
