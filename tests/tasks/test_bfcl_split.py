"""The published split against its rule, and what may not stand on both sides."""

from __future__ import annotations

import collections
import json

import pytest

from tests.tasks import bfcl_records
from trace_jax.tasks.bfcl import split


def everything():
    return [record for category in bfcl_records.CATEGORIES for record in bfcl_records.records(category)]


def test_the_file_is_the_rule():
    assert {side: list(ids) for side, ids in split.published().items()} == split.draw(everything())


def test_every_variant_of_160_and_40_numbers():
    numbers = {side: collections.Counter(id.rsplit("_", 1)[1] for id in ids) for side, ids in split.published().items()}
    assert [len(numbers[side]) for side in split.SIDES] == [160, 40]
    assert set(numbers["train"].values()) == set(numbers["eval"].values()) == {4}
    assert not set(numbers["train"]) & set(numbers["eval"])


def test_sides_share_no_scenario():
    """Compared pair by pair over all entries, unlike the rule, which joins groups."""
    sides = {side: [record for record in everything() if split.side(record["id"]) == side] for side in split.SIDES}
    messages = {
        side: {message["content"].strip().lower() for record in found for turn in record["turns"] for message in turn}
        for side, found in sides.items()
    }
    assert len(messages["train"]) > 900 and not messages["train"] & messages["eval"]
    for key in ("initial_config", "ground_truth"):
        held_out = {json.dumps(record[key], sort_keys=True) for record in sides["eval"]}
        assert not [r["id"] for r in sides["train"] if json.dumps(r[key], sort_keys=True) in held_out], key


@pytest.mark.parametrize(("one", "other"), [(63, 83), (66, 74), (100, 133), (40, 43), (102, 148), (120, 124)])
def test_numbers_that_share_a_scenario_stay_together(one, other):
    """Found by looking at the data: equal services, equal user messages, equal right calls."""
    assert split.side(f"multi_turn_base_{one}") == split.side(f"multi_turn_miss_func_{other}")


def test_an_unknown_entry():
    with pytest.raises(ValueError, match="'multi_turn_base_200' is in no split; ids look like 'multi_turn_base_0'"):
        split.side("multi_turn_base_200")


def test_groups_by_hand():
    """Ten numbers, two held out: 0 and 1 share a message, 1 and 2 a service. A group of three is too large for eval."""
    state = {"Api": {"text": "x" * 200}}
    record = lambda n, text, config: {
        "id": f"a_{n}",
        "initial_config": config,
        "turns": [[{"role": "user", "content": text}]],
        "ground_truth": [[f"f({n})"]],
    }
    records = [record(0, "Hello ", {}), record(1, "hello", state), record(2, "b", state)]
    records += [record(n, f"t{n}", {"Api": "short"}) for n in range(3, 10)]
    drawn = split.draw(records)
    assert {"a_0", "a_1", "a_2"} <= set(drawn["train"]) and len(drawn["eval"]) == 2
    assert drawn == split.draw(list(records))
