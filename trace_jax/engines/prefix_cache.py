"""Which rows the local engine's cache holds, and the longest prefix of a history among them. Host side, numpy."""

from __future__ import annotations

import numpy as np


class PrefixCache:
    """R rows of up to S token ids, replaced in least-recently-used order.

    A row that is a prefix of a newer row is overwritten by it, so an episode keeps one row however many turns it has.
    """

    def __init__(self, rows: int, length: int):
        self.evictions = 0
        self._tokens = np.full((rows, length), -1, np.int32)  # -1 past the end, which equals no token
        self._length = np.zeros(rows, np.int64)
        self._salt: list[str] = [""] * rows
        self._used = np.zeros(rows, np.int64)  # time of last use; 0 = empty
        self._clock = 0
        self._filled = 0  # rows 0 .. filled - 1 hold something

    def clear(self) -> None:
        """Forgets every row."""
        self._tokens[:] = -1
        self._length[:] = 0
        self._used[:] = 0
        self._filled = 0

    def longest_prefix(self, tokens: np.ndarray, salt: str) -> tuple[int, int]:
        """(row, n): the row that shares the longest prefix with `tokens`, n <= len(tokens) - 1; (-1, 0) if none does.

        The last token is never taken from the cache, because its hidden state is what the next token is sampled from.
        """
        row, shared = self._match(tokens[:-1], salt)
        if shared == 0:
            return -1, 0
        self._touch(row)
        return row, shared

    def insert(self, tokens: np.ndarray, salt: str) -> int:
        """The row that now stands for `tokens`: one that they extend, else an empty or the least recently used one."""
        row, shared = self._match(tokens, salt)
        if shared == 0 or shared < self._length[row]:
            row = int(np.argmin(self._used))  # the first empty one, if there is any
            self.evictions += int(self._used[row] > 0)
            self._filled = max(self._filled, row + 1)
        self._tokens[row] = -1
        self._tokens[row, : tokens.shape[0]] = tokens
        self._length[row], self._salt[row] = tokens.shape[0], salt
        self._touch(row)
        return row

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock

    def _match(self, tokens: np.ndarray, salt: str) -> tuple[int, int]:
        n = tokens.shape[0]
        if n == 0 or self._filled == 0:
            return -1, 0
        other = self._tokens[: self._filled, :n] != tokens
        first = other.argmax(axis=1)
        shared = np.where(other[np.arange(self._filled), first], first, n)
        row = int(np.argmax(shared))
        if self._salt[row] != salt:  # rare: rows of another name space do not count
            shared[[s != salt for s in self._salt[: self._filled]]] = 0
            row = int(np.argmax(shared))
        return row, int(shared[row])
