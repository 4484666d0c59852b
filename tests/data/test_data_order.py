"""The order of records: a permutation an epoch, the same in every process, and a position to go on from."""

from __future__ import annotations

import itertools

import grain
import pytest

from trace_jax.data.order import shuffled

INLINE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # threads that read ahead cost seconds here


def test_every_epoch_is_another_permutation():
    order = shuffled(50, seed=3)
    epochs = [[order[50 * epoch + i] for i in range(50)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4 and list(range(50)) not in epochs
    assert epochs[0] != [shuffled(50, seed=4)[i] for i in range(50)]


def test_a_position_is_all_that_is_needed():
    """Another dataset, asked out of order, far out, gives the same; golden values pin the order across versions."""
    order, again = shuffled(5, seed=3), shuffled(5, seed=3)
    far = 5 * 10**9 + 2
    assert again[far] == order[far] and [again[p] for p in (9, 0, 7)] == [order[p] for p in (9, 0, 7)]
    assert [order[p] for p in range(10)] == [4, 1, 0, 2, 3, 2, 1, 3, 4, 0]


@pytest.mark.parametrize("taken", [0, 3, 7, 8, 20])
def test_iterators_go_on_from_their_state(taken):
    """Mid-epoch, at the edge of an epoch (7 records) and behind it; the oracle is random access."""
    order = shuffled(7, seed=11)
    first = iter(order.to_iter_dataset(INLINE))
    assert list(itertools.islice(first, taken)) == [order[p] for p in range(taken)]
    state = first.get_state()
    second = iter(shuffled(7, seed=11).to_iter_dataset(INLINE))
    second.set_state(state)
    expected = [order[p] for p in range(taken, taken + 20)]
    assert list(itertools.islice(second, 20)) == expected == list(itertools.islice(first, 20))


def test_one_record():
    assert [shuffled(1, seed=0)[p] for p in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("num_records", "seed"), [(0, 0), (3, -1), (3, 2**32)])
def test_bad_arguments(num_records, seed):
    with pytest.raises(ValueError, match="num_records is 0|seed is"):
        shuffled(num_records, seed)
