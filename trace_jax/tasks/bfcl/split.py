"""Which BFCL entries train and which are held out: 80/20 by entry, published in `split.json`.

The paper gives neither seed nor lists, so the split is ours. An entry's number has four variants (base, long_context,
miss_func, miss_param): they stay together. So do numbers that share a scenario: the same state of a service (of at
least 200 characters of JSON), the same user message, or the same right calls. Such groups, in the order of a hash of
their lowest number, go to the held-out side as long as they fit, until it has 40 of the 200 numbers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SIDES = ("train", "eval")
HELD_OUT = 0.2
SEED = 0
MIN_SHARED = 200  # characters; shorter states are defaults ("all doors are locked") that many scenarios begin with


@functools.cache
def published() -> Mapping[str, tuple[str, ...]]:
    """Ids of the entries of each side."""
    text = importlib.resources.files("trace_jax.tasks.bfcl").joinpath("split.json").read_text()
    return {side: tuple(ids) for side, ids in json.loads(text).items()}


def side(entry_id: str) -> str:
    """"train" or "eval". Raises ValueError for an entry that the data set does not have."""
    found = _sides().get(entry_id)
    if found is None:
        raise ValueError(f"bfcl: entry {entry_id!r} is in no split; ids look like {published()['train'][0]!r}")
    return found


def draw(records: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The split of these records by the rule above; `split.json` is this of all 800."""
    records = list(records)
    numbers = sorted({_number(record["id"]) for record in records})
    group = {number: number for number in numbers}  # -> lowest number it shares a scenario with
    first: dict[str, int] = {}
    for record in records:
        for shared in _scenario(record):
            a, b = group[_number(record["id"])], group[first.setdefault(shared, _number(record["id"]))]
            group = {number: min(a, b) if of in (a, b) else of for number, of in group.items()} if a != b else group
    left, held_out = round(HELD_OUT * len(numbers)), set()
    for lowest in sorted(set(group.values()), key=_order):
        members = {number for number, of in group.items() if of == lowest}
        if len(members) <= left:
            held_out |= members
            left -= len(members)
    ids = {side: [] for side in SIDES}
    for record in records:
        ids[SIDES[_number(record["id"]) in held_out]].append(record["id"])
    return ids


@functools.cache
def _sides() -> dict[str, str]:
    return {entry: side for side, ids in published().items() for entry in ids}


def _number(entry_id: str) -> int:
    return int(entry_id.rsplit("_", 1)[1])


def _order(number: int) -> bytes:
    return hashlib.blake2b(f"bfcl split {SEED} {number}".encode(), digest_size=8).digest()


def _scenario(record: Mapping[str, Any]) -> Iterator[str]:
    """What an entry has in common with another one if they show the same scenario."""
    for name, state in record["initial_config"].items():
        text = json.dumps(state, sort_keys=True)
        if len(text) >= MIN_SHARED:
            yield f"state {name} {text}"
    for turn in record["turns"]:
        yield from (f"user {message['content'].strip().lower()}" for message in turn)
    yield f"calls {json.dumps(record['ground_truth'])}"
