"""Scores: rules derived by hand on small records, and the official checker end to end on changed real ones."""

from __future__ import annotations

import pytest

from tests.tasks import bfcl_records
from tests.tasks.bfcl_records import CATEGORIES, handmade
from trace_jax.tasks.bfcl.family import Bfcl
from trace_jax.tasks.bfcl.scoring import succeeded
from trace_jax.tasks.chat.family import Reply, ToolCall

official = pytest.importorskip(
    "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils",
    reason="pip install --no-deps bfcl-eval==2026.3.23, and mpmath and filelock",
)

from experiments.real_tasks_cpu import bfcl_official, bfcl_replay  # noqa: E402

FAMILY = Bfcl()
LS, PWD, DOWN = ("ls", {}), ("pwd", {}), ("cd", {"folder": "deep"})
MKDIR, MKDIR_UPPER = ("mkdir", {"dir_name": "new"}), ("mkdir", {"dir_name": "New"})
WRITE = ("echo", {"content": "x", "file_name": "a.txt"})

CASES = {  # right calls of each user turn, calls that were made, success
    "right": ([["ls()"]], [[LS]], True),
    "nothing called": ([["ls()"]], [[]], False),
    "nothing to call, nothing called": ([[], ["ls()"]], [[], [LS]], True),
    "nothing to call, something harmless called": ([[], ["ls()"]], [[PWD], [LS]], True),
    "nothing to call, state changed: shows a turn later": ([[], ["ls()"]], [[WRITE], [LS]], False),
    "nothing to call in the last turn: not checked": ([["ls()"], []], [[LS], [WRITE]], True),
    "no right calls at all": ([[]], [[MKDIR]], True),
    "extra call that changes no state": ([["ls()"]], [[PWD, LS, PWD]], True),
    "extra call that changes state": ([["ls()"]], [[LS, MKDIR]], False),
    "the folder is private, its result is not": ([["ls()"]], [[LS, DOWN]], True),
    "right result twice in a turn, called once": ([["ls()", "ls()"]], [[LS]], False),
    "right result twice in a turn, called twice": ([["ls()", "ls()"]], [[LS, LS]], True),
    "right result in an earlier turn counts": ([["ls()"], ["ls()"]], [[LS], [PWD]], True),
    "but the turn needs some call": ([["ls()"], ["ls()"]], [[LS], []], False),
    "an unknown function is a call": ([["ls()"], ["ls()"]], [[LS], [("fly", {})]], True),
    "any order": ([["ls()", "pwd()"]], [[PWD, LS]], True),
    "case": ([["mkdir(dir_name='new')"]], [[MKDIR_UPPER]], False),
    "too late": ([["mkdir(dir_name='new')"], ["ls()"]], [[], [MKDIR, LS]], False),
    "too early": ([["pwd()"], ["mkdir(dir_name='new')"]], [[PWD, MKDIR], []], False),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_by_hand(case):
    right, made, success = CASES[case]
    record = handmade(*((f"turn {i}", calls) for i, calls in enumerate(right)))
    turns = [[ToolCall(*call) for call in calls] for calls in made]
    assert bfcl_replay.compare(FAMILY, record, FAMILY.ask(record).state, turns) == (success, success)


def test_an_episode_that_ends_early_fails():
    record = handmade(("one", ["ls()"]), ("two", []))
    state = FAMILY.react(FAMILY.ask(record).state, Reply("", (ToolCall("ls", {}),))).state
    assert FAMILY.score(state).success == FAMILY.score(state).reward == 0.0
    state = FAMILY.react(state, Reply("Done.")).state
    assert not succeeded(state.entry, state.ended) and not bfcl_official.verdict(record, [[["ls()"]]])
    assert succeeded(state.entry, FAMILY.react(state, Reply("No.")).state.ended)


@pytest.mark.parametrize("category", CATEGORIES)
def test_changed_calls_score_as_officially(category):
    """All kinds of changes of some entries; the experiment has all entries."""
    records = bfcl_records.records(category)[3::50]
    starts = [FAMILY.ask(record).state for record in records]
    others = bfcl_replay.right_calls(starts)
    pairs = []
    for record, start in zip(records, starts):
        known = [call for name in record["involved_classes"] for call in others.get(name, ())]
        for kind in bfcl_replay.KINDS:
            turns = bfcl_replay.mutated(start, kind, known)
            if turns is not None:
                pairs.append(bfcl_replay.compare(FAMILY, record, start, turns))
    assert len(pairs) >= 9 * len(records)
    assert all(ours == theirs for ours, theirs in pairs) and {ours for ours, _ in pairs} == {True, False}


def test_three_kinds_of_changes_exist_for_every_entry():
    for category in CATEGORIES:
        for start in (FAMILY.ask(record).state for record in bfcl_records.records(category)[::20]):
            others = [ToolCall("pwd", {})]
            for kind in ("changed value", "dropped call", "added call"):
                turns = bfcl_replay.mutated(start, kind, others)
                extra = sum(map(len, turns)) - sum(map(len, start.entry.truth))
                assert extra == {"changed value": 0, "dropped call": -1, "added call": 1}[kind]


@pytest.mark.parametrize("category", CATEGORIES)
def test_results_are_the_official_runners(category):
    """Every result of the right calls, as the official runner gives it for the call texts of the data set."""
    for record in bfcl_records.records(category)[::25]:
        state = bfcl_replay.replay(FAMILY, record)
        with bfcl_official.clean():
            for turn, texts in zip(state.ended, record["ground_truth"]):
                results, _ = official.execute_multi_turn_func_call(
                    texts,
                    record["initial_config"],
                    record["involved_classes"],
                    "tested",
                    record["id"],
                    long_context=category == "long_context",
                )
                assert list(turn.results) == results, record["id"]


def test_the_reference_evaluates_no_text_that_is_not_ours():
    record = handmade(("one", ["ls()"]))
    for text in ("__import__('os').getcwd()", "ls( )", "cd('deep')", "fly()", "cd(folder=pwd())"):
        with pytest.raises(ValueError):
            bfcl_official.verdict(record, [[[text]]])


def test_the_reference_leaves_nothing_behind():
    record = next(r for r in bfcl_records.records("long_context") if "TravelAPI" in r["involved_classes"])
    before = set(vars(official))
    assert bfcl_official.verdict(record, [[calls] for calls in _written(record)])
    assert set(vars(official)) == before


def _written(record):
    return [[text for step in turn.steps for text in step] for turn in bfcl_replay.replay(FAMILY, record).ended]
