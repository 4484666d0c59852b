"""The laboratory of faults on stand-ins: what it counts, and how it names what happened."""

from __future__ import annotations

import asyncio
import dataclasses
import types

import numpy as np
import pytest

from experiments.sglang_cpu import faults, faults_lab, faults_main
from experiments.sglang_cpu.faults_lab import Lab, record
from tests import sglang_faults as behaviour
from tests import tiny_run
from tests.sglang_stand_in import StandIn
from trace_jax.assemble import assemble
from trace_jax.budget.account import BudgetCount
from trace_jax.types import Finish


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The tiny config's parts with random parameters."""
    config = tiny_run.settings({"engine": "sglang", "sglang.urls": "http://127.0.0.1:1"})
    return assemble(config, tmp_path_factory.mktemp("fault_drills"), may_train=False)


def run(policy, folder, drill, *stand_ins, limit=20.0, **settings):
    """The record of a drill on stand-ins, and its lab."""

    async def main():
        for stand_in in stand_ins:
            await stand_in.start()
        servers = [
            types.SimpleNamespace(program=types.SimpleNamespace(url=stand_in.url), start=lambda: None)
            for stand_in in stand_ins
        ]
        lab = Lab(policy, servers, folder, **settings)
        try:
            return lab, await record(lab, "a fault", drill, "completed", limit)
        finally:
            for stand_in in stand_ins:
                await stand_in.stop()

    return asyncio.run(main())


def test_a_step_without_a_fault_loses_nothing(policy, tmp_path):
    lab, row = run(policy, tmp_path / "w", faults.nothing, StandIn(), StandIn(seed=1))
    assert row["outcome"] == "completed" and row["retries"] == 0
    assert (row["leaves_lost"], row["units_lost"], row["engine_error_leaves"]) == (0, 0.0, 0)
    assert row["units"] == row["units_planned"] == 64.0
    fallback = sum(collected.fallback_rollouts for collected in lab.collected)
    assert row["leaves"] == row["leaves_expected"] == 32 + 64 - fallback  # a fallback root costs two continuations
    assert not (tmp_path / "w").exists()


def test_what_is_lost_is_counted(policy, tmp_path):
    """One prompt's tree is exchanged for a smaller prompt's, and half a unit is not booked."""

    async def lossy(lab):
        await faults.nothing(lab)
        largest = max(range(len(lab.collected)), key=lambda i: lab.collected[i].tree.num_nodes)
        first = lab.collected[largest]
        leaves = np.flatnonzero(first.tree.kind == 2)
        bare = first.tree.stage[leaves[0]]
        assert bare == 1
        counts = first.counts + BudgetCount(units=-0.5)
        lab.collected[largest] = dataclasses.replace(first, counts=counts, tree=_without_last_leaf(first.tree))

    _, row = run(policy, tmp_path / "w", lossy, StandIn())
    assert (row["leaves_lost"], row["units_lost"]) == (1, 0.5)


def _without_last_leaf(tree):
    """Keeps the nodes before the last one, a leaf that is one of several children or hangs on the root."""
    last = tree.num_nodes - 1
    keep = last
    while np.count_nonzero(tree.parent == tree.parent[keep - 1 + 1]) == 1:  # its whole chain
        keep -= 1
    return dataclasses.replace(
        tree,
        **{
            name: getattr(tree, name)[:keep]
            for name in ("parent", "kind", "stage", "finish", "weight_version", "reward", "success", "value")
        },
        offset=tree.offset[: keep + 1],
        **{name: getattr(tree, name)[: tree.offset[keep]] for name in ("token", "is_action", "logprob")},
    )


def test_requests_that_are_given_up_are_leaves_that_say_so_and_count_as_lost(policy, tmp_path):
    lab, row = run(
        policy, tmp_path / "w", faults.spoiled(behaviour.says({}, 400), share=0.3), StandIn(), retry_wait=0.01
    )
    marked = sum(int(np.sum(collected.tree.finish == Finish.ENGINE_ERROR)) for collected in lab.collected)
    assert row["engine_error_leaves"] == marked > 0
    assert row["leaves"] == row["leaves_expected"]  # they are in their trees, and paid for
    assert (row["outcome"], row["leaves_lost"], row["units_lost"]) == ("completed", marked, 0.0)


def test_the_end_of_a_run_has_its_name_and_its_reason(policy, tmp_path):
    _, row = run(policy, tmp_path / "w", faults.refused, StandIn())
    assert row["outcome"] == faults.DOWN and "Failed to load weights" in row["message"]
    _, row = run(policy, tmp_path / "w", faults.disk_full, StandIn())
    assert row["outcome"] == faults.DOWN and "No space left on device" in row["message"]


def test_what_does_not_end_is_named_too(policy, tmp_path):
    _, row = run(policy, tmp_path / "w", faults.spoiled(behaviour.hang), StandIn(), limit=0.5)
    assert row["outcome"] == "not over after 0.5 s"


def test_random_values_are_the_same_in_every_run():
    tree = types.SimpleNamespace(prompt_uid="arithmetic/train/3")
    first, second = (asyncio.run(faults_lab.RandomPredictor().score_anchors(tree, np.arange(5))) for _ in range(2))
    assert first.tolist() == second.tolist() and len(set(first.tolist())) == 5
    assert first.min() >= 0.05 and first.max() <= 0.95


def test_records_are_kept_by_fault_and_odd_ones_are_named(tmp_path):
    good = {"fault": "a", "outcome": "completed", "expected": "completed", "leaves_lost": 0, "units_lost": 0.0}
    path = tmp_path / "raw" / "faults.json"
    records = faults.Records(path)
    for row in (good, good | {"fault": "b", "leaves_lost": 1}, good | {"fault": "c", "outcome": "slow"}):
        records.add(row)
    assert records.odd() == ["b", "c"]
    again = faults.Records(path)
    again.add(good | {"fault": "b"})
    assert again.odd() == ["c"] and list(faults.Records(path).rows) == ["a", "b", "c"]


def test_every_fault_that_is_promised_has_a_case():
    names = " ".join([*faults.CASES, *faults_main.CASES])
    for word in ("killed", "hanging", "slow (2 s", "500", "truncated JSON", "refused at the start", "never up"):
        assert word in names
    assert "update refused" in names and "out of disk" in names
