"""Token weights: by hand, by direct averaging over the loss, and what each choice must conserve."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tree.tree_oracle import Case, build, cases, chain, make_turn
from trace_jax.tree import advantage, aggregate

ESTIMATORS = [advantage.grpo, advantage.dr_grpo, advantage.tree_rpo, advantage.tree_grpo, advantage.tree_rloo]


def weights_of(
    trees, *, mode="sequence_mean_token_mean", prompt_weight="equal", max_tokens=10, estimate=advantage.grpo
):
    credits = [estimate(tree) for tree in trees]
    weights = aggregate.token_weights(trees, credits, mode=mode, prompt_weight=prompt_weight, max_tokens=max_tokens)
    return credits, weights


def mass(trees, credits, weights) -> list[float]:
    """The total weight of each tree: weights times the number of tokens that carry them."""
    return [
        float(np.sum(w * t.action_counts()[c.node])) for t, c, w in zip(trees, credits, weights, strict=True)
    ]


# Tree A: two rollouts of 1 and 3 action tokens. Tree B: two rollouts of 2 and 2.
A = build([[make_turn(1, 0, 1.0)], [make_turn(3, 0, 0.0)]], uid="a").tree
B = build([[make_turn(2, 0, 1.0)], [make_turn(2, 0, 0.0)]], uid="b").tree


@pytest.mark.parametrize(
    ("mode", "prompt_weight", "expected"),
    [
        # two trees, two sequences in each: 1/2 * 1/2 * 1/n
        ("sequence_mean_token_mean", "equal", [[1 / 4, 1 / 12], [1 / 8, 1 / 8]]),
        # four sequences: 1/4 * 1/n, the same since the trees have the same number of sequences
        ("sequence_mean_token_mean", "sequences", [[1 / 4, 1 / 12], [1 / 8, 1 / 8]]),
        ("sequence_mean_token_sum", "equal", [[1 / 4, 1 / 4], [1 / 4, 1 / 4]]),
        # the same divided by max_tokens = 10
        ("sequence_mean_token_scale", "equal", [[1 / 40, 1 / 40], [1 / 40, 1 / 40]]),
        # 4 tokens in each tree
        ("token_mean", "equal", [[1 / 8, 1 / 8], [1 / 8, 1 / 8]]),
        ("token_mean", "sequences", [[1 / 8, 1 / 8], [1 / 8, 1 / 8]]),
    ],
)
def test_weights_by_hand(mode, prompt_weight, expected):
    _, weights = weights_of([A, B], mode=mode, prompt_weight=prompt_weight)
    for got, want in zip(weights, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got.dtype == np.float32


def test_prompt_weight_by_hand_where_trees_differ_in_size():
    # Tree C: four rollouts of one token. "equal": 1/2 * 1/2 * 1/n and 1/2 * 1/4. "sequences": 1/6 * 1/n each.
    c = build([chain(1, r, action=1) for r in (1.0, 0.0, 1.0, 0.0)], uid="c").tree
    _, weights = weights_of([A, c], prompt_weight="equal")
    np.testing.assert_allclose(np.concatenate(weights), [1 / 4, 1 / 12] + [1 / 8] * 4, rtol=1e-6)
    _, weights = weights_of([A, c], prompt_weight="sequences")
    np.testing.assert_allclose(np.concatenate(weights), [1 / 6, 1 / 18] + [1 / 6] * 4, rtol=1e-6)
    # token_mean: 1/2 * 1/4 in both trees for "equal", 1/8 for "sequences" (8 tokens in all)
    _, weights = weights_of([A, c], mode="token_mean", prompt_weight="sequences")
    np.testing.assert_allclose(np.concatenate(weights), 1 / 8, rtol=1e-6)


def reduce_directly(mode, prompt_weight, max_tokens, loss_of_tokens):
    """The loss as nested averages of per-token losses: loss_of_tokens[tree][sequence] is a list of numbers."""

    def over_sequences(sequences):
        if not sequences:
            return 0.0
        if mode == "token_mean":
            return np.mean([x for tokens in sequences for x in tokens])
        inner = {
            "sequence_mean_token_mean": np.mean,
            "sequence_mean_token_sum": np.sum,
            "sequence_mean_token_scale": lambda tokens: np.sum(tokens) / max_tokens,
        }[mode]
        return np.mean([inner(tokens) for tokens in sequences])

    if prompt_weight == "equal":
        return np.mean([over_sequences(sequences) for sequences in loss_of_tokens])
    return over_sequences([tokens for sequences in loss_of_tokens for tokens in sequences])


SMALL = cases(max_rollouts=3, max_turns=3, max_forks=2, min_last_action=1)


@pytest.mark.parametrize("mode", aggregate.AGGREGATIONS)
@pytest.mark.parametrize("prompt_weight", aggregate.PROMPT_WEIGHTS)
@settings(max_examples=25)
@given(batch=st.lists(SMALL, min_size=1, max_size=3), estimate=st.sampled_from(ESTIMATORS))
def test_the_weighted_sum_is_the_nested_average(mode, prompt_weight, batch: list[Case], estimate):
    trees = [case.tree for case in batch]
    credits, weights = weights_of(trees, mode=mode, prompt_weight=prompt_weight, max_tokens=7, estimate=estimate)
    loss, nested = 0.0, []
    for tree, credit, weight in zip(trees, credits, weights, strict=True):
        sequences = [[] for _ in range(credit.num_sequences)]
        for node, s, w in zip(credit.node, credit.sequence, weight, strict=True):
            token_losses = [float(node) + 0.1 * i for i in range(tree.action_counts()[node])]
            sequences[s] += token_losses
            loss += float(w) * sum(token_losses)
        nested.append(sequences)
    expected = reduce_directly(mode, prompt_weight, 7, nested)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["sequence_mean_token_mean", "token_mean"])
@given(batch=st.lists(SMALL, min_size=1, max_size=3), estimate=st.sampled_from(ESTIMATORS))
def test_equal_prompts_share_a_total_weight_of_one(mode, batch: list[Case], estimate):
    trees = [case.tree for case in batch]
    credits, weights = weights_of(trees, mode=mode, estimate=estimate)
    expected = [1 / len(trees) if credit.num_sequences else 0.0 for credit in credits]
    np.testing.assert_allclose(mass(trees, credits, weights), expected, rtol=1e-5)


@given(batch=st.lists(SMALL, min_size=1, max_size=3), estimate=st.sampled_from(ESTIMATORS))
def test_sequences_share_a_total_weight_of_one(batch: list[Case], estimate):
    trees = [case.tree for case in batch]
    credits, weights = weights_of(trees, prompt_weight="sequences", estimate=estimate)
    total = sum(credit.num_sequences for credit in credits)
    expected = [credit.num_sequences / max(total, 1) for credit in credits]
    np.testing.assert_allclose(mass(trees, credits, weights), expected, rtol=1e-5)


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_the_budget_does_not_change_a_prompts_share_of_the_loss(estimate):
    # The same prompt with half of its rollouts right, at m = 4 and m = 16, beside each other.
    few = build([chain(2, float(i % 2)) for i in range(4)]).tree
    many = build([chain(2, float(i % 2)) for i in range(16)]).tree
    credits, weights = weights_of([few, many], estimate=estimate)
    np.testing.assert_allclose(mass([few, many], credits, weights), [0.5, 0.5], rtol=1e-6)
    pull = [
        np.sum(np.abs(w * c.advantage) * t.action_counts()[c.node])
        for t, c, w in zip([few, many], credits, weights, strict=True)
    ]
    if estimate is advantage.tree_rloo:  # it divides by n - 1 where the others divide by n
        pull = [pull[0] * 3 / 4, pull[1] * 15 / 16]
    np.testing.assert_allclose(pull[0], pull[1], rtol=1e-6)
    # The other rule lets the budget in, in proportion to the rollouts.
    credits, weights = weights_of([few, many], prompt_weight="sequences", estimate=estimate)
    np.testing.assert_allclose(mass([few, many], credits, weights), [0.2, 0.8], rtol=1e-6)


def test_a_tree_without_contrast_counts_in_the_denominator():
    flat = build([chain(1, 1.0), chain(1, 1.0)]).tree
    _, alone = weights_of([A], estimate=advantage.tree_rpo)
    _, beside = weights_of([A, flat], estimate=advantage.tree_rpo)
    np.testing.assert_allclose(beside[0], alone[0] / 2, rtol=1e-6)
    assert beside[1].size == 0
    # Under "sequences" only sequences count, and TreeRPO leaves those without contrast out.
    _, beside = weights_of([A, flat], estimate=advantage.tree_rpo, prompt_weight="sequences")
    np.testing.assert_allclose(beside[0], alone[0], rtol=1e-6)


def test_a_sequence_without_tokens_keeps_its_share_of_a_mean_over_sequences():
    # Two trajectories, one of 2 tokens and one of none: 1/2 * 1/2 for each of the two tokens.
    tree = build([[make_turn(2, 0, 1.0)], [make_turn(0, 0, 0.0)]]).tree
    _, weights = weights_of([tree])
    assert weights[0][0] == 0.25
    _, weights = weights_of([tree], mode="token_mean")
    assert weights[0][0] == 0.5


@pytest.mark.parametrize("mode", aggregate.AGGREGATIONS)
@pytest.mark.parametrize("prompt_weight", aggregate.PROMPT_WEIGHTS)
def test_trees_without_a_single_token_give_finite_weights(mode, prompt_weight):
    tree = build([[make_turn(0, 0, 1.0)], [make_turn(0, 0, 0.0)]]).tree
    _, weights = weights_of([tree], mode=mode, prompt_weight=prompt_weight)
    assert np.all(np.isfinite(weights[0]))


def test_no_trees_no_weights():
    assert weights_of([])[1] == []


def test_bad_choices_are_refused():
    credit = advantage.grpo(A)
    good = {"mode": "token_mean", "prompt_weight": "equal", "max_tokens": 1}
    with pytest.raises(ValueError, match="aggregation 'mean' is unknown; use one of sequence_mean_token_mean, "):
        aggregate.token_weights([A], [credit], **{**good, "mode": "mean"})
    with pytest.raises(ValueError, match="prompt_weight 'tokens' is unknown; use one of equal, sequences"):
        aggregate.token_weights([A], [credit], **{**good, "prompt_weight": "tokens"})
    with pytest.raises(ValueError, match="max_tokens is 0"):
        aggregate.token_weights([A], [credit], **{**good, "max_tokens": 0})
    with pytest.raises(ValueError, match="2 trees but 1 credits"):
        aggregate.token_weights([A, B], [credit], **good)
