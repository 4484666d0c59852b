"""Which nodes become examples, by hand on a small tree; the window against a list."""

from __future__ import annotations

import numpy as np
import pytest

from trace_jax.train import replay
from trace_jax.train.history_view import HistoryView
from trace_jax.tree import grow, query
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
    )


def _same(a, b):
    assert [p.tolist() for p in a.prefixes] == [p.tolist() for p in b.prefixes]
    for name in ("target", "count", "is_root"):
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
