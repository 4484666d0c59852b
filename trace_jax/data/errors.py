"""What goes wrong with data sets, in one line each."""

from __future__ import annotations


class DataError(Exception):
    """A data set that can't be prepared or read. One line: the set or file, what is wrong, what to do."""


class RowError(ValueError):
    """A row that is not of the expected format: what is wrong with it; the reader adds the file and record number."""


class Unanswered(Exception):
    """A row of the right format that has no answer to score against; such rows are left out and counted."""
