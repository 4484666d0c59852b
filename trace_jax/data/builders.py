"""tensorflow-datasets builders, one class a row of the table in `sources.py`: array_record files, no TensorFlow.

A builder reads either the files it is told to (`inputs`) or downloads the official ones. It downloads through
tensorflow-datasets, which verifies size and SHA-256 of a file before it is read; a file of which the table knows the
git object instead is verified here. The order of records is that of the official file.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import requests
import tensorflow_datasets as tfds

from trace_jax.data import bfcl, fields, readers
from trace_jax.data.errors import DataError, RowError, Unanswered
from trace_jax.data.formats import Record
from trace_jax.data.sources import Download, Source

_PATIENCE_SECONDS = 20
Watch = Callable[[str, int], readers.Tick]  # called with what begins and its size in bytes; returns its tick


@dataclasses.dataclass(frozen=True)
class Input:
    """The file that one split is read from."""

    path: Path
    member: str = ""  # where `path` is a ZIP file


class Records(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """What all sets share; `make` adds the source."""

    VERSION = tfds.core.Version(fields.VERSION)
    source: Source
    inputs: Mapping[str, Input]  # of each split that is to be prepared; empty: download those of the source
    watch: Watch
    left_out: dict[str, int]  # rows without an answer, of each split

    def _info(self) -> tfds.core.DatasetInfo:
        keys = (*self.source.fields.texts, *self.source.fields.nested)
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({key: tfds.features.Text() for key in keys}),
            homepage=self.source.homepage,
            license=self.source.licence,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        inputs = self.inputs or self._download(dl_manager)
        return {split: self._generate_examples(split, given) for split, given in inputs.items()}

    def _download(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Input]:
        urls = {name: split.download.url for name, split in self.source.splits.items()}
        paths = dl_manager.download(urls)  # verified, those with a SHA-256
        for name, path in paths.items():
            _verify_blob(self.source.splits[name].download, Path(path))
        zipped = {name: bool(readers.members(Path(path))) for name, path in paths.items()}
        return {
            name: Input(Path(path), self.source.splits[name].member if zipped[name] else "")
            for name, path in paths.items()
        }

    def _generate_examples(self, split: str, given: Input) -> Iterator[tuple[int, dict[str, str]]]:
        tick = self.watch(f"{self.name} {split}", readers.size(given.path, given.member))
        seen: dict[str, int] = {}
        for number, record in self._records(split, given, tick):
            first = seen.setdefault(record["id"], number)
            if first != number:
                raise DataError(f"{given.path}: record {number} has id {record['id']!r}, which record {first} has too")
            try:
                yield number, self.source.fields.encode(record)
            except RowError as error:
                raise DataError(f"{given.path}: record {number} {error}") from error
        if not seen:
            raise DataError(f"{given.path} holds no record with an answer")

    def _records(self, split: str, given: Input, tick: readers.Tick) -> Iterator[tuple[int, Record]]:
        source = self.source
        if source.read is None:
            yield from enumerate(bfcl.records(given.path, source.category, tick))
            return
        for number, row in enumerate(readers.rows(given.path, given.member, source.password, tick)):
            try:
                yield number, source.read(row, f"{source.name}/{number}")
            except Unanswered:
                self.left_out[split] = self.left_out.get(split, 0) + 1
            except RowError as error:
                where = f"{given.path}:{given.member}" if given.member else given.path
                raise DataError(f"{where}: record {number} {error}; this is no file of {source.name}") from error


def make(source: Source, folder: Path, inputs: Mapping[str, Input], watch: Watch) -> Records:
    """The builder of a set; it writes to folder/name/version."""
    downloads = [split.download for split in source.splits.values() if split.download]
    infos = {
        item.url: tfds.core.download.checksums.UrlInfo(size=item.size, checksum=item.sha256, filename=None)
        for item in downloads
        if item.sha256
    }

    class Builder(Records, skip_registration=True):
        name = source.name
        url_infos = infos

    Builder.source = source
    builder = Builder(data_dir=folder)
    builder.inputs, builder.watch, builder.left_out = inputs, watch, {}
    return builder


def build(builder: Records, downloads: Path) -> None:
    """Downloads what must be downloaded, to `downloads`, and prepares the set. A failure leaves no set behind.

    Raises DataError for anything that is wrong with the files or that keeps them from being downloaded.
    """
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    tfds.disable_progress_bar()  # ours is shown instead
    try:
        if not builder.inputs:
            _knock({split.download.url for split in builder.source.splits.values()})
        builder.download_and_prepare(download_dir=downloads, download_config=config, file_format="array_record")
    except tfds.core.download.download_manager.NonMatchingChecksumError as error:
        problem = " ".join(str(error).split()).split(" To debug")[0]
        raise DataError(f"{builder.name}: {problem}; try again, or give a file with --data_dir") from error
    except (requests.RequestException, tfds.download.DownloadError) as error:
        problem = " ".join(str(error).split())
        remedy = f"get it from {builder.source.homepage} and give --data_dir"
        raise DataError(f"{builder.name} can't be downloaded ({problem}); {remedy}") from error
    except OSError as error:
        raise DataError(f"{builder.name}: {error}") from error


def _verify_blob(download: Download, path: Path) -> None:
    """Compares a file with the id of its git object, SHA-1 of "blob SIZE" NUL CONTENT; removes it if it is another."""
    if not download.git_blob:
        return
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(readers.BLOCK):
            digest.update(block)
    if digest.hexdigest() != download.git_blob:
        size = path.stat().st_size
        for file in (path, path.with_name(path.name + ".INFO")):  # the second is tensorflow-datasets' own record of it
            file.unlink(missing_ok=True)
        raise DataError(
            f"{download.url} is not the published file: {size:,} bytes, git object {digest.hexdigest()}, expected "
            f"{download.git_blob}; try again, or give a file with --data_dir"
        )


def _knock(urls: Iterable[str]) -> None:
    """Asks once for every file: tensorflow-datasets would try a server that is not there for minutes."""
    for url in urls:
        with requests.get(url, stream=True, timeout=_PATIENCE_SECONDS) as reply:
            reply.raise_for_status()


def records_of(path: Path, split: str) -> Any:
    """Random access to the stored examples of a prepared set (a folder with its version), as dicts of bytes."""
    return tfds.builder_from_directory(path).as_data_source(split)
