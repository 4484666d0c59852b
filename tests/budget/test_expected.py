"""Running means and the derived root budget, by hand."""

from trace_jax.budget.expected import ExpectedTokens


def test_root_budget_by_hand():
    costs = ExpectedTokens()
    assert costs.roots(1000, 2, default=64) == 64
    costs = costs.updated(root=20.0, continuation=None)
    # A continuation counts as half a root: 20 + 2 * 10 = 40 tokens a root, 1000 / 40 = 25, made even.
    assert costs.roots(1000, 2, default=64) == 24
    costs = costs.updated(root=None, continuation=5.0)
    # 20 + 2 * 5 = 30, 1000 / 30 = 33.3, made even.
    assert costs.roots(1000, 2, default=64) == 32
    assert costs.roots(10, 2, default=64) == 2


def test_running_means_by_hand():
    costs = ExpectedTokens(root=10.0, continuation=4.0, decay=0.75).updated(root=30.0, continuation=8.0)
    assert (costs.root, costs.continuation) == (0.75 * 10 + 0.25 * 30, 0.75 * 4 + 0.25 * 8)


def test_expected_tokens_by_hand():
    assert ExpectedTokens().expected(4, 8) is None
    # Without a continuation seen each counts half a root: 4 * 10 + 8 * 5.
    assert ExpectedTokens(root=10.0).expected(4, 8) == 80
    assert ExpectedTokens(root=10.0, continuation=3.0).expected(4, 8) == 64
