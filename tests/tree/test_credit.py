"""The credit of whole trajectories, against the routes of the nested form."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from tests.tree.tree_oracle import Case, cases
from trace_jax.tree.credit import Credit, whole_paths


@given(cases())
def test_whole_paths_trains_every_turn_of_every_route(case: Case):
    routes = case.routes()
    credit = whole_paths(case.tree, np.arange(len(routes)) - 0.5)
    expected = [
        (route[-1].index, node.index, i, i - 0.5) for i, route in enumerate(routes) for node in route[1:]
    ]
    rows = zip(credit.leaf, credit.node, credit.sequence, credit.advantage, strict=True)
    assert [tuple(x.item() for x in row) for row in rows] == expected
    assert credit.num_sequences == len(routes)
    assert [a.dtype for a in vars(credit).values()] == [np.int32, np.int32, np.int32, np.float32]


def test_credit_without_rows_has_no_sequences():
    none = np.zeros(0, np.int32)
    assert Credit(none, none, none, np.zeros(0, np.float32)).num_sequences == 0
