"""The order in which a run takes records: shuffled anew in every epoch, without end, with a position to go on from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grain


def shuffled(num_records: int, seed: int) -> grain.MapDataset:
    """Record numbers in the order of a run: element p is the record at position p, for every p >= 0.

    Positions e * num_records .. (e + 1) * num_records - 1 are a permutation of all records, another one in each epoch
    e, a function of seed and e. Random access: a run that keeps p as its cursor goes on exactly from there, and
    `.map(records.__getitem__)` gives the records themselves. `.to_iter_dataset()` gives an iterator with get_state and
    set_state for grain's own checkpoints.

    Raises ValueError for no records, and for a seed outside 0 .. 2**32 - 1.
    """
    import grain  # imports jax (starts no backend), which no other module of this package does

    if num_records < 1:
        raise ValueError(f"num_records is {num_records}, must be at least 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}, must be in 0..{2**32 - 1}")
    return grain.MapDataset.range(num_records).seed(seed).shuffle().repeat()
