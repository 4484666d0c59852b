"""Prepares a data set from its official files: what is there already, which files, a progress bar, a clean end."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import fnmatch
import io
import shutil
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import tqdm

from trace_jax.data import bfcl, readers, sources, store
from trace_jax.data.errors import DataError
from trace_jax.data.sources import Source

if TYPE_CHECKING:
    from trace_jax.data import builders

_POLL_SECONDS = 0.5  # how often the size of a download is looked up


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A set that is ready."""

    name: str
    counts: Mapping[str, int]  # records of each split
    left_out: Mapping[str, int]  # rows without an answer, of each split; empty where the set was there already
    new: bool  # False: it was there already
    notes: tuple[str, ...]  # what may be wrong with it
    path: Path


def prepare(
    name: str,
    folder: Path | None = None,
    *,
    data_dir: Path | None = None,
    split: str | None = None,
    show_progress: bool = True,
) -> Prepared:
    """Prepares a set, or finds that it is there.

    Args:
      name: a name of `sources.SOURCES`.
      folder: where to; None: `store.default_folder()`.
      data_dir: the official file, or a folder that holds the official files; None: download (or, for BFCL, read the
        installed package).
      split: prepare this split alone; None: all that there are. Needed where neither the table nor the name of a
        single file tells what it holds.
      show_progress: whether a progress bar is drawn on standard error.

    Raises DataError; nothing of the set is left behind then.
    """
    source = sources.find(name).only(split)
    folder = store.default_folder() if folder is None else Path(folder)
    library = store.import_builders()
    with _alone(name, folder):
        path = store.set_folder(name, folder)
        counts = store.prepared(name, folder)
        if counts is not None and split not in (None, *counts):
            raise DataError(f"{name} is there without its {split} split: remove {path}, then prepare both at once")
        if counts is not None:
            return Prepared(name, counts, {}, False, (), path)
        inputs = {key: library.Input(*given) for key, given in find_inputs(source, data_dir).items()}
        for stale in path.parent.glob("incomplete.*"):  # of a process that was killed
            shutil.rmtree(stale)
        downloads = folder / "downloads"
        # tensorflow-datasets reports on standard output, also to those who did not ask.
        with _Progress(show_progress) as progress, contextlib.redirect_stdout(io.StringIO()), _emptied(downloads):
            builder = library.make(source, folder, inputs, progress.phase)
            with progress.downloading(source, downloads / name) if not inputs else contextlib.nullcontext():
                library.build(builder, downloads)
            shutil.rmtree(downloads / name, ignore_errors=True)
        counts, notes = store.prepared(name, folder) or {}, _notes(source, inputs)
        return Prepared(name, counts, dict(builder.left_out), True, notes, path)


def find_inputs(source: Source, data_dir: Path | None) -> dict[str, tuple[Path, str]]:
    """The file, and its member if it is an archive, that each split is read from; empty: download.

    Raises DataError where nothing fits, with the names that would.
    """
    if data_dir is None and source.read is None:
        data_dir = bfcl.installed_folder()
    if data_dir is None:
        if all(item.download for item in source.splits.values()):
            return {}
        raise DataError(
            f"{source.name} is never downloaded (nothing is known to verify its files by): get "
            f"{' and '.join(item.names[0] for item in source.splits.values())} from {source.homepage} and give "
            "--data_dir=FILE_OR_FOLDER"
        )
    data_dir = Path(data_dir)
    if data_dir.is_dir():
        return _in_folder(source, data_dir)
    if not data_dir.exists():
        raise DataError(f"{source.name}: {data_dir} does not exist")
    return _of_file(source, data_dir)


def _in_folder(source: Source, folder: Path) -> dict[str, tuple[Path, str]]:
    found = {}
    for key, item in source.splits.items():
        path = next((folder / name for name in item.names if (folder / name).is_file()), None)
        if path is not None:
            found[key] = (path, "")
    if not found:
        names = [name for item in source.splits.values() for name in item.names]
        raise DataError(f"{source.name}: {folder} holds none of {', '.join(names)}; name the file itself")
    return found


def _of_file(source: Source, path: Path) -> dict[str, tuple[Path, str]]:
    """Splits by the members of an archive, by being the only one, or by the file's name."""
    inside = readers.members(path)
    wanted = dict(source.splits)
    if inside:
        found = {key: (path, item.member) for key, item in wanted.items() if item.member in inside}
        if found:
            return found
        expected = ", ".join(item.member or f"nothing ({item.names[0]} is not zipped)" for item in wanted.values())
        raise DataError(f"{source.name}: {path} is a ZIP file without {expected}")
    if len(wanted) > 1:
        patterns = {"train": ("*train*",), "test": ("*test*", "*dev*", "*valid*")}
        fits = lambda key: any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in patterns[key])
        wanted = {key: item for key, item in wanted.items() if fits(key)}
    if len(wanted) != 1:
        raise DataError(f"{source.name}: is {path} the {' or the '.join(source.splits)} split? Give --split")
    return {next(iter(wanted)): (path, "")}


def _notes(source: Source, inputs: Mapping[str, builders.Input]) -> tuple[str, ...]:
    """Says of every file with the name of a published one that it has another size: it may be cut or a sample."""
    notes = []
    for split, given in inputs.items():
        published = source.splits[split].download
        if published is None or published.size is None:
            continue
        size = given.path.stat().st_size
        if Path(urllib.parse.urlparse(published.url).path).name == given.path.name and size != published.size:
            notes.append(f"{given.path.name} has {size:,} bytes, the published file {published.size:,}")
    return tuple(dict.fromkeys(notes))


@contextlib.contextmanager
def _alone(name: str, folder: Path) -> Iterator[None]:
    """Keeps a second process from preparing the same set in the same folder; the lock goes with the process."""
    try:
        (folder / name).mkdir(parents=True, exist_ok=True)
        lock = open(folder / name / ".lock", "w")
    except OSError as error:
        raise DataError(f"{folder} can't be written to ({error}); choose another with --folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{name} is being prepared in {folder} by another process; wait for it") from error
        try:
            yield
        finally:
            if not store.set_folder(name, folder).exists():
                (folder / name / ".lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it holds another version's records
                    (folder / name).rmdir()


@contextlib.contextmanager
def _emptied(downloads: Path) -> Iterator[None]:
    """Removes the folder of downloads if it holds no file in the end: one that arrived whole is kept for a next try."""
    try:
        yield
    finally:
        for folder in (*(downloads.iterdir() if downloads.is_dir() else ()), downloads):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


class _Progress:
    """One progress bar, relabelled from phase to phase."""

    def __init__(self, show: bool):
        self._bar = tqdm.tqdm(unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=not show)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def phase(self, label: str, size: int | None) -> readers.Tick:
        """Starts a phase of so many bytes (None: not known); the tick is called with the bytes that are done."""
        self._bar.reset(total=size)
        self._bar.set_description(label)
        return self._to

    def _to(self, position: int) -> None:
        self._bar.update((position if self._bar.total is None else min(position, self._bar.total)) - self._bar.n)

    @contextlib.contextmanager
    def downloading(self, source: Source, folder: Path) -> Iterator[None]:
        """Shows the size of the files that arrive in a folder; removes those that did not arrive whole."""
        total = source.download_size()
        done = threading.Event()

        def follow() -> None:
            tick = self.phase(f"{source.name} download", total)
            while not done.wait(_POLL_SECONDS):
                arrived = _bytes_in(folder)
                tick(arrived)
                if total is not None and arrived >= total:
                    return  # the bar belongs to the next phase

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            for partial in folder.glob("*.tmp.*"):
                shutil.rmtree(partial, ignore_errors=True)


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a file may be renamed meanwhile
            total += path.stat().st_size if path.is_file() and not path.name.endswith(".INFO") else 0
    return total
