"""Budget accounts. Oracles: arithmetic by hand."""

from __future__ import annotations

import dataclasses

import pytest

from trace_jax.budget.account import CONTINUATION_UNITS, ROOT_UNITS, BudgetCount, fallback_roots


def test_counts_add_field_by_field():
    root = BudgetCount(ROOT_UNITS, generated_tokens=10, prefilled_tokens=4, cached_tokens=0, tool_calls=2)
    fork = BudgetCount(CONTINUATION_UNITS, generated_tokens=3, prefilled_tokens=1, cached_tokens=6, tool_calls=1)
    assert root + fork == BudgetCount(1.5, 13, 5, 6, 3)
    assert root == BudgetCount(1.0, 10, 4, 0, 2)
    assert sum([root, fork, fork], BudgetCount()) == BudgetCount(2.0, 16, 6, 12, 4)
    assert sum([], BudgetCount()) == BudgetCount(0.0, 0, 0, 0, 0)


def test_the_paper_s_budgets():
    # M (1 + N / 2) units: 1024 roots with 2 continuations each are 2048 units; 2 roots with 4 continuations are 4.
    assert sum([BudgetCount(ROOT_UNITS)] * 1024 + [BudgetCount(CONTINUATION_UNITS)] * 2048, BudgetCount()).units == 2048
    assert sum([BudgetCount(ROOT_UNITS)] * 2 + [BudgetCount(CONTINUATION_UNITS)] * 4, BudgetCount()).units == 4


def test_counts_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BudgetCount().units = 2.0
    with pytest.raises(TypeError):
        BudgetCount() + 1


def test_fallback_never_costs_more_than_the_continuations():
    # m = 3, N = 2: 6 continuations pay for 3 roots. Half a unit is left over where their number is odd.
    assert [fallback_roots(k) for k in (0, 1, 2, 3, 6)] == [0, 0, 1, 1, 3]
