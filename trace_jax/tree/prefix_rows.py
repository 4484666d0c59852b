"""Rows in which token sequences share what they have in common: every common prefix is laid down once.

The sequences form a trie of tokens, which is written in depth-first preorder. A token sees its own path and nothing
else: with `pos` its depth on the path and `end` where its subtree stops, `PackedBatch`'s rule `k <= q and q < end[k]`
says just that. So what a causal model computes at the last token of a sequence is what it would compute for the
sequence alone, and nested sequences (the histories of one rollout's anchors) cost no more than the longest of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trace_jax.tree.layout import fill, lay_out
from trace_jax.types import PackedBatch


def pack_shared(
    sequences: Sequence[np.ndarray], *, row_length: int, rng: np.random.Generator | None = None
) -> tuple[PackedBatch, np.ndarray, np.ndarray]:
    """Rows for scoring, or fitting, at the last token of each sequence.

    Only chains count, the sequences that no other one continues. Chains are taken in lexicographic order, which is a
    preorder of the trie. One joins the segment of the chain before it if the two share their first token and the
    segment still fits a row; otherwise it starts a segment, where everything that it shared is repeated. Segments then
    fill rows as in `layout`. The rows depend on the set of sequences, not on their order. (Our choice: the paper only
    says that the anchors of one prompt reuse a prefix cache.)

    Args:
      sequences: int32 [n_i] each, 1 <= n_i <= row_length.
      row_length: T, tokens per row.
      rng: draws which tokens come before which, so that a fit meets other rows in each epoch; None: by their ids.

    Returns:
      (batch, row, col): the last token of sequence i is in cell [row[i], col[i]], int32 [n] each; equal sequences have
      one cell. `token`, `pos`, `prev` and `end` are filled, the rest is empty. At least one row.

    Raises:
      ValueError: for an empty sequence or one longer than a row.
    """
    for i, sequence in enumerate(sequences):
        if not 1 <= sequence.size <= row_length:
            raise ValueError(
                f"sequence {i} has {sequence.size} tokens, but a row holds 1 to {row_length}; shorten its view"
            )
    segments = [_write(chains) for chains in _segments(_chains(sequences, rng), row_length)]
    size = np.array([segment.token.size for segment in segments], np.int64)
    layout = lay_out(size, row_length=row_length, rows_multiple=1, name=lambda i: f"segment {i}")
    joined = {
        name: np.concatenate([np.zeros(0, np.int64), *[getattr(segment, name) for segment in segments]])
        for name in ("token", "pos", "prev", "end")
    }
    first = layout.cell % row_length - layout.pos  # column in which the segment starts, for each token
    batch = fill(
        dataclasses.replace(
            layout,
            pos=joined["pos"],
            prev=np.where(joined["prev"] >= 0, first + joined["prev"], -1),
            end=first + joined["end"],
        ),
        token=joined["token"],
    )
    row, col = np.zeros(len(sequences), np.int32), np.zeros(len(sequences), np.int32)
    begin = np.cumsum(size) - size
    for start, segment in zip(begin.tolist(), segments, strict=True):
        cell = layout.cell[start + np.array(list(segment.last.values()), np.int64)]
        row[list(segment.last)], col[list(segment.last)] = np.divmod(cell, row_length)
    return batch, row, col


def with_targets(
    batch: PackedBatch, row: np.ndarray, col: np.ndarray, targets: np.ndarray, weights: np.ndarray
) -> PackedBatch:
    """The batch with what is to be predicted at each sequence's last token; examples in one cell are merged.

    A cell with the targets y_i and weights w_i gets W = sum w_i and Y = sum w_i y_i / W, which leaves both losses of
    `objectives.value` as they are, up to a constant. With s the prediction, which is one and the same for them all:

        sum w_i (s - y_i)^2 = W (s - Y)^2 + sum w_i (y_i - Y)^2     since the cross term (s - Y) sum w_i (Y - y_i) is 0
        sum w_i (log(1 + e^z) - y_i z) = W (log(1 + e^z) - Y z)     it is linear in y

    So gradients are those of the examples one by one; the squared error lacks the spread of equal histories' targets.

    Args:
      batch, row, col: as `pack_shared` returns them.
      targets: float [n], in [0, 1].
      weights: float [n], >= 0; a target whose weight is 0 may be anything.

    Raises ValueError for lengths that do not match.
    """
    targets, weights = np.asarray(targets, np.float64), np.asarray(weights, np.float64)
    if not row.shape == col.shape == targets.shape == weights.shape:
        raise ValueError(f"{row.size} sequences, {targets.shape} targets, {weights.shape} weights; pass one of each")
    cell, size = row.astype(np.int64) * batch.shape[1] + col, batch.shape[0] * batch.shape[1]
    total = np.bincount(cell, weights, minlength=size)
    sums = np.bincount(cell, weights * np.where(weights != 0, targets, 0.0), minlength=size)
    mean = np.divide(sums, total, out=np.zeros(size), where=total != 0)
    return dataclasses.replace(
        batch,
        value_target=mean.reshape(batch.shape).astype(np.float32),
        value_weight=total.reshape(batch.shape).astype(np.float32),
    )


@dataclasses.dataclass(frozen=True)
class _Chain:
    """A sequence that no other one continues."""

    token: np.ndarray  # int32 [n]
    shared: int  # leading tokens that it has in common with the chain before it in its segment
    ends: dict[int, int]  # sequence that it continues or is -> length of that sequence


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Chains of one trie in preorder, U distinct tokens; columns count from 0."""

    token: np.ndarray  # int32 [U]
    pos: np.ndarray  # int64 [U]; depth on the path
    prev: np.ndarray  # int64 [U]; column of the token above it, -1 for the first
    end: np.ndarray  # int64 [U]; column where the token's subtree stops
    last: dict[int, int]  # sequence -> column of its last token


def _chains(sequences: Sequence[np.ndarray], rng: np.random.Generator | None) -> list[_Chain]:
    """In lexicographic order; what a chain shares is counted from the chain before it in that order."""
    # Bytes compare and match faster than arrays. Any order of tokens will do, so negative ids need no care, and a
    # random one takes no more than other names for them: i -> (odd * i mod 2^32) xor mask gives no name twice.
    odd, mask = (2 * rng.integers(2**31) + 1, rng.integers(2**32)) if rng else (1, 0)
    names = [sequence.astype(np.uint32) * np.uint32(odd) ^ np.uint32(mask) for sequence in sequences]
    keys = [name.astype(">u4").tobytes() for name in names]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    chains: list[_Chain] = []
    ends: dict[int, int] = {}
    for place, i in enumerate(order, 1):
        ends[i] = sequences[i].size
        if place == len(order) or not keys[order[place]].startswith(keys[i]):
            shared = _common(chains[-1].token, sequences[i]) if chains else 0
            chains.append(_Chain(sequences[i], shared, ends))
            ends = {}
    return chains


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading tokens that two vectors, neither a prefix of the other, have in common."""
    size = min(a.size, b.size)
    return int(np.argmax(a[:size] != b[:size]))


def _segments(chains: Sequence[_Chain], row_length: int) -> list[list[_Chain]]:
    """Consecutive chains that share their first token and fit a row together."""
    segments: list[list[_Chain]] = []
    used = row_length
    for chain in chains:
        new = chain.token.size - chain.shared
        if chain.shared and used + new <= row_length:
            segments[-1].append(chain)
            used += new
        else:
            segments.append([dataclasses.replace(chain, shared=0)])
            used = chain.token.size
    return segments


def _write(chains: Sequence[_Chain]) -> _Segment:
    start = np.cumsum([0, *[chain.token.size - chain.shared for chain in chains]])
    size = int(start[-1])
    longest = max(chain.token.size for chain in chains)
    token, pos, end = np.zeros(size, np.int32), np.zeros(size, np.int64), np.zeros(size, np.int64)
    prev = np.arange(-1, size - 1)
    last: dict[int, int] = {}
    column = np.zeros(longest, np.int64)  # of the token at each depth of the current chain
    for chain, a, b in zip(chains, start[:-1].tolist(), start[1:].tolist(), strict=True):
        token[a:b] = chain.token[chain.shared :]
        pos[a:b] = np.arange(chain.shared, chain.token.size)
        column[chain.shared : chain.token.size] = np.arange(a, b)
        if chain.shared:
            prev[a] = column[chain.shared - 1]
        last |= {i: int(column[length - 1]) for i, length in chain.ends.items()}
    stop = np.full(longest, size)  # where the subtree of a token at each depth stops, seen from the chain before
    for chain, a, b in zip(chains[::-1], start[-2::-1].tolist(), start[:0:-1].tolist(), strict=True):
        end[a:b] = stop[chain.shared : chain.token.size]
        stop[chain.shared :] = a
    return _Segment(token, pos, prev, end, last)
