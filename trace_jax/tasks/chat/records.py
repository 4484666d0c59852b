"""The records of a chat task's splits: training records in an order of their own each epoch, named evaluation sets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from trace_jax.tasks.chat.family import Record


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A named data set, or those of its records that are used."""

    name: str
    records: Sequence[Record]
    kept: tuple[int, ...]  # numbers of the records that are used, rising
    too_long: int = 0  # records that would be used if their prompts were shorter

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, number: int) -> Record:
        return self.records[self.kept[number]]

    def where(self, fits: Callable[[Record], bool]) -> DataSet:
        """Those records for which `fits` is true."""
        return dataclasses.replace(self, kept=tuple(i for i in self.kept if fits(self.records[i])))


def data_set(name: str, records: Sequence[Record]) -> DataSet:
    """All records of a set."""
    return DataSet(name, records, tuple(range(len(records))))


@dataclasses.dataclass(frozen=True)
class Records:
    """The splits of a chat task.

    train: position p of epoch e is record `order[p + e * len(train)]`: a position is all that a run has to remember.
    eval: the sets by turns, so that any first n prompts are spread over all of them.
    demo: the training records in their own order, for checks of the format; nothing is learnt from them.
    """

    train: DataSet
    evaluation: tuple[DataSet, ...]
    order: Sequence[int]  # random access without end: numbers of training records, each once an epoch

    def __post_init__(self) -> None:
        for chosen in (self.train, *self.evaluation):
            if not len(chosen):
                raise ValueError(f"no record of data set {chosen.name} can be used; raise chat.max_prompt_tokens")

    def find(self, split: str, index: int) -> tuple[str, str, Record]:
        """(uid without the task's name, name of the data set, record). Raises ValueError for what does not exist."""
        if index < 0:
            raise ValueError(f"index of the {split} split is {index}, must be at least 0")
        if split == "train":
            record = self.train[self.order[index]]
            return f"{self.train.name}/{record['id']}/{index // len(self.train)}", self.train.name, record
        if split == "demo":
            record = self.train[index % len(self.train)]
            return f"demo/{record['id']}", self.train.name, record
        if split != "eval":
            raise ValueError(f"split is {split!r}, must be train, eval or demo")
        if index >= self.evaluation_size():
            raise ValueError(f"index of the eval split is {index}, but it has {self.evaluation_size()} records")
        chosen, number = self._turns[index]
        record = self.evaluation[chosen][number]
        return f"{self.evaluation[chosen].name}/{record['id']}", self.evaluation[chosen].name, record

    def evaluation_size(self) -> int:
        """Number of records of the eval split."""
        return sum(map(len, self.evaluation))

    def benchmarks(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the eval split that belong to each evaluation set."""
        found: dict[str, list[int]] = {chosen.name: [] for chosen in self.evaluation}
        for index, (chosen, _) in enumerate(self._turns):
            found[self.evaluation[chosen].name].append(index)
        return {name: tuple(indices) for name, indices in found.items()}

    def too_long(self) -> Mapping[str, int]:
        """How many records of each evaluation set are left out because of their prompts' length."""
        return {chosen.name: chosen.too_long for chosen in self.evaluation}

    @functools.cached_property
    def _turns(self) -> list[tuple[int, int]]:
        """(set, number of the record in it) of every index of the eval split."""
        pairs = ((number, chosen) for chosen, records in enumerate(self.evaluation) for number in range(len(records)))
        return [(chosen, number) for number, chosen in sorted(pairs)]
