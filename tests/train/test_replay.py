"""Which nodes become examples, by hand on a small tree; the window against a list."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trace_jax.train import replay
from trace_jax.train.history_view import HistoryView
from trace_jax.tree import grow, query, targets
from trace_jax.types import Finish, Prompt, Stage, Turn

WHOLE = HistoryView(max_tokens=99)  # histories as they are


def _turns(token, count, success):
    return [
        Turn(
            action=np.array([token + t], np.int32),
            logprobs=np.array([-1.0], np.float32),
            observation=np.zeros(0, np.int32) if t == count - 1 else np.array([90 + t], np.int32),
            finish=Finish.ANSWER if t == count - 1 else Finish.TURN,
            weight_version=0,
            reward=success if t == count - 1 else None,
            success=success if t == count - 1 else None,
        )
        for t in range(count)
    ]


def _tree(uid="p"):
    """Nodes: 0 prompt; 1, 2, 3 first bare rollout (success 1); 4, 5 second (0); 6 and 7-8 continuations of 2 and 1.

    Leaves below: 0 has 3, 5, 6, 8; node 1 has 3, 6, 8; node 2 has 3, 6; node 4 has 5; node 7 has 8.
    """
    tree = grow.new_tree(Prompt(uid=uid, tokens=np.array([1, 2, 3], np.int32), state=None))
    tree = grow.add_rollouts(
        tree, [(0, Stage.ROOT_ROLLOUT, _turns(10, 3, 1.0)), (0, Stage.ROOT_ROLLOUT, _turns(20, 2, 0.0))]
    )
    return grow.add_rollouts(
        tree, [(2, Stage.CONTINUATION, _turns(30, 1, 0.0)), (1, Stage.CONTINUATION, _turns(40, 2, 1.0))]
    )


def test_roots_and_branch_nodes_by_hand():
    # share .65 of one root: round(.65 / .35) = 2 prefixes, and there are just two branch nodes: 1 and 2 (not 4 and 7)
    got = replay.examples_from_trees([_tree()], WHOLE, prefix_share=0.65, rng=np.random.default_rng(0))
    assert [p.tolist() for p in got.prefixes] == [[1, 2, 3], [1, 2, 3, 10, 90], [1, 2, 3, 10, 90, 11, 91]]
    # leaves 3, 5, 6, 8 = 1, 0, 0, 1 -> 1/2; leaves 3, 6, 8 = 1, 0, 1 -> 2/3; leaves 3, 6 = 1, 0 -> 1/2
    np.testing.assert_allclose(got.target, [1 / 2, 2 / 3, 1 / 2], rtol=1e-6)
    assert got.count.tolist() == [4, 3, 2] and got.is_root.tolist() == [True, False, False]
    assert got.target.dtype == np.float32 and got.count.dtype == np.int32
    assert got.weight.tolist() == [1, 1, 1] and got.weight.dtype == np.float32 and got.prompt == ("p",) * 3


def test_other_targets_have_other_turns():
    """`direct`: 2 outcomes of root 0; 1 and 2 with their rollout's success and a continuation's, the others alone."""
    rng = np.random.default_rng(0)
    got = replay.examples_from_trees([_tree()], WHOLE, prefix_share=0.9, rng=rng, targets=targets.direct)
    assert [p.size for p in got.prefixes] == [3, 5, 7, 5, 7]  # nodes 0, 1, 2, 4, 7
    assert got.count.tolist() == [2, 2, 2, 1, 1] and got.target.tolist() == [0.5, 1, 0.5, 0, 1]


def test_a_prompt_whose_rollouts_all_failed_in_the_engine_has_no_example():
    finish = np.where(_tree().finish == Finish.ANSWER, Finish.ENGINE_ERROR, _tree().finish).astype(np.int8)
    trees = [dataclasses.replace(_tree("lost"), finish=finish), _tree("kept")]
    got = replay.examples_from_trees(trees, WHOLE, prefix_share=0.5, rng=np.random.default_rng(0))
    assert got.prompt == ("kept", "kept") and got.is_root.tolist() == [True, False]
    assert replay.examples_from_trees(trees[:1], WHOLE, prefix_share=0.5, rng=np.random.default_rng(0)).size == 0


def test_examples_are_what_the_predictor_reads():
    # limit 4: of [1, 2, 3] the first 2 and the newest turn of 2 tokens; the window keeps it so
    view, rng = HistoryView(max_tokens=4), np.random.default_rng(0)
    got = replay.examples_from_trees([_tree()], view, prefix_share=0.65, rng=rng)
    assert [p.tolist() for p in got.prefixes] == [[1, 2, 3], [1, 2, 10, 90], [1, 2, 11, 91]]
    assert replay.ReplayWindow(1).push(got).to_arrays()["token"].shape == (3, 4)


@pytest.mark.parametrize("share, prefixes", [(0.0, 0), (0.06, 3), (0.5, 47), (0.9, 94)])
def test_share_of_prefixes(share, prefixes):
    # 47 roots: 47 * .06 / .94 = 3 exactly, 47 at one half; at .9 all 2 * 47 branch nodes are fewer than 423
    trees = [_tree(str(i)) for i in range(47)]
    got = replay.examples_from_trees(trees, WHOLE, prefix_share=share, rng=np.random.default_rng(0))
    assert np.sum(got.is_root) == 47 and np.sum(~got.is_root) == prefixes
    assert got.prefix_share == pytest.approx(prefixes / (47 + prefixes))


def test_sample_is_drawn_by_the_generator_alone():
    trees = [_tree(str(i)) for i in range(20)]
    draw = lambda seed: replay.examples_from_trees(trees, WHOLE, prefix_share=0.3, rng=np.random.default_rng(seed))
    lengths = lambda examples: [p.size for p in examples.prefixes]
    assert lengths(draw(1)) == lengths(draw(1)) != lengths(draw(2))
    # both branch nodes of every tree can be drawn, none twice in one sample
    assert {n for seed in range(5) for n in lengths(draw(seed))[20:]} == {5, 7}


def test_fresh_roots_without_leaves_are_an_error():
    tree = grow.new_tree(Prompt(uid="lonely", tokens=np.array([1], np.int32), state=None))
    with pytest.raises(ValueError, match="'lonely' has no leaves"):
        replay.examples_from_trees([tree], WHOLE, prefix_share=0.0, rng=np.random.default_rng(0))


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_share_out_of_range(share):
    with pytest.raises(ValueError, match="prefix_share is"):
        replay.examples_from_trees([_tree()], WHOLE, prefix_share=share, rng=np.random.default_rng(0))


def test_weights():
    count = np.array([1, 4, 9], np.int32)
    assert replay.equal_weight(count).tolist() == [1, 1, 1] and replay.count_weight(count).tolist() == [1, 4, 9]
    assert replay.equal_weight(count).dtype == replay.count_weight(count).dtype == np.float32


def _examples(seed, n):
    rng = np.random.default_rng(seed)
    return replay.Examples(
        prefixes=tuple(rng.integers(0, 99, rng.integers(1, 9)).astype(np.int32) for _ in range(n)),
        target=rng.random(n).astype(np.float32),
        count=rng.integers(1, 9, n).astype(np.int32),
        is_root=rng.random(n) < 0.5,
        weight=rng.random(n).astype(np.float32),
        prompt=tuple(f"prøblem/{'x' * k}" for k in rng.integers(0, 6, n)),
    )


def _same(a, b):
    assert [p.tolist() for p in a.prefixes] == [p.tolist() for p in b.prefixes]
    assert a.prompt == b.prompt
    for name in ("target", "count", "is_root", "weight"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype
    assert all(p.dtype == np.int32 for p in a.prefixes)


@pytest.mark.parametrize("size", [1, 3])
def test_window_keeps_the_last_steps_and_survives_a_checkpoint(size):
    steps = [_examples(seed, n) for seed, n in enumerate((4, 0, 3, 5))]
    window = replay.ReplayWindow(size)
    for i, step in enumerate(steps):
        window = window.push(step)
        kept = steps[max(0, i + 1 - size) : i + 1]
        _same(window.examples(), replay.concatenate(kept))
        again = replay.window_from_arrays(window.to_arrays(), size=size)
        _same(again.push(_examples(9, 2)).examples(), window.push(_examples(9, 2)).examples())
        assert [s.size for s in again.steps] == [s.size for s in kept]


def test_age_is_counted_in_steps_with_examples_or_without():
    """Pushed 3, 1 and 0 steps ago, nothing 2 steps ago: an eighth, a half, all of their own weights."""
    window = replay.ReplayWindow(4, decay=0.5)
    for n in (2, 0, 1, 3):
        window = window.push(_examples(n, n))
    own = np.concatenate([_examples(n, n).weight for n in (2, 1, 3)])
    factor = np.array([0.125, 0.125, 0.5, 1, 1, 1], np.float32)
    np.testing.assert_array_equal(window.examples().weight, own * factor)
    again = replay.window_from_arrays(window.to_arrays(), size=4, decay=0.5)
    for _ in range(3):
        _same(again.examples(), window.examples())
        again, window = (w.push(_examples(0, 0)) for w in (again, window))
    # three more steps: what is left was pushed 3 steps ago
    np.testing.assert_array_equal(window.examples().weight, _examples(3, 3).weight * np.float32(0.125))


@pytest.mark.parametrize(
    "size, decay, message", [(2, 0.0, "decay is 0.0"), (2, 1.5, "decay is 1.5"), (50, 0.1, "next to nothing")]
)
def test_decay_out_of_range(size, decay, message):
    with pytest.raises(ValueError, match=message):
        replay.ReplayWindow(size, decay=decay).push(_examples(0, 1))


def test_checkpoints_hold_numbers_only():
    arrays = replay.ReplayWindow(2).push(_examples(0, 3)).to_arrays()
    assert {array.dtype.kind for array in arrays.values()} <= set("biuf")


def _prompts(count):
    """A root and two longer histories for each of `count` prompts, and a history of a prompt without a root."""
    uids = [f"p{i}" for i in range(count) for _ in range(3)] + ["rootless"]
    return replay.Examples(
        prefixes=tuple(np.array([i], np.int32) for i in range(len(uids))),
        target=np.linspace(0, 1, len(uids), dtype=np.float32),
        count=np.ones(len(uids), np.int32),
        is_root=np.array([True, False, False] * count + [False]),
        prompt=tuple(uids),
    )


def test_held_back_roots_leave_no_trace_of_their_prompts():
    examples, drawn = _prompts(10), []
    for seed in range(8):
        fit, held = replay.split_roots(examples, 0.3, np.random.default_rng(seed))
        assert held.size == 3 and held.is_root.all()
        assert set(fit.prompt) | set(held.prompt) == set(examples.prompt) and not set(fit.prompt) & set(held.prompt)
        assert fit.size == 3 * 7 + 1
        index = [int(p[0]) for p in fit.prefixes + held.prefixes]  # which example each was
        np.testing.assert_array_equal(np.append(fit.target, held.target), examples.target[index])
        drawn.append(held.prompt)
    assert len(set(drawn)) > 4
    again = replay.split_roots(examples, 0.3, np.random.default_rng(7))
    assert again[1].prompt == drawn[-1]


def test_a_prompt_of_two_steps_is_held_back_in_both():
    twice = replay.concatenate([_prompts(4), _prompts(4)])
    fit, held = replay.split_roots(twice, 0.5, np.random.default_rng(0))
    assert held.size == 4 and len(set(held.prompt)) == 2 and not set(fit.prompt) & set(held.prompt)


def test_splits_of_nothing_and_refused():
    rng = np.random.default_rng(0)
    assert [part.size for part in replay.split_roots(replay.concatenate([]), 0.5, rng)] == [0, 0]
    assert [part.size for part in replay.split_roots(_prompts(3), 0.0, rng)] == [10, 0]
    with pytest.raises(ValueError, match="held back is 1.0"):
        replay.split_roots(_prompts(3), 1.0, rng)
    nameless = dataclasses.replace(_prompts(3), prompt=("p", "", *["p"] * 8))
    with pytest.raises(ValueError, match="example 1 has no prompt's uid"):
        replay.split_roots(nameless, 0.5, rng)


def test_empty_window():
    window = replay.ReplayWindow(2)
    assert window.examples().size == 0 and window.examples().prefix_share == 0
    arrays = window.to_arrays()
    assert arrays["token"].shape == (0, 0)
    assert replay.window_from_arrays(arrays, size=2).steps == ()
    with pytest.raises(ValueError, match="replay window of 0 steps"):
        replay.ReplayWindow(0).push(_examples(0, 1))


def test_arrays_are_plain_and_padded():
    window = replay.ReplayWindow(2).push(_examples(0, 3))
    arrays = window.to_arrays()
    prefixes = window.examples().prefixes
    assert arrays["token"].shape == (3, max(p.size for p in prefixes))
    for row, prefix in zip(arrays["token"], prefixes, strict=True):
        assert row.tolist() == prefix.tolist() + [0] * (row.size - prefix.size)


def test_targets_agree_with_a_walk_over_paths():
    """The mean over all leaves whose path passes through the history's node, found leaf by leaf."""
    tree = _tree()
    got = replay.examples_from_trees([tree], WHOLE, prefix_share=0.9, rng=np.random.default_rng(0))
    for prefix, target, count in zip(got.prefixes, got.target, got.count, strict=True):
        below = [
            float(tree.success[leaf])
            for leaf in query.leaves(tree)
            if query.prefix_tokens(tree, leaf)[: prefix.size].tolist() == prefix.tolist()
        ]
        assert count == len(below) and target == pytest.approx(np.mean(below))
