"""Prepares public data sets: `python -m trace_jax.data prepare NAME ...`, `python -m trace_jax.data list`.

    python -m trace_jax.data list
    python -m trace_jax.data prepare hotpotqa aime24 math500
    python -m trace_jax.data prepare deepscaler --data_dir=deepscaler.json
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from trace_jax.data import sources, store
from trace_jax.data.errors import DataError
from trace_jax.data.prepare import Prepared, prepare


def table(folder: Path) -> str:
    """All sets: their splits, the number of records of those that are prepared, where they come from, the licence."""
    rows = []
    for source in sources.SOURCES.values():
        try:
            counts = store.prepared(source.name, folder)
            records = ", ".join(f"{count:,}" for count in (counts or {}).values()) or "-"
        except DataError:
            counts, records = None, "damaged"
        size = source.download_size()
        download = "package" if source.read is None else f"{size / 1e6:,.2f} MB" if size else "size not known"
        splits = ", ".join(counts or source.splits)
        rows.append((source.name, splits, records, download, source.licence, source.homepage))
    return tabulate(rows, headers=("name", "splits", "records", "download", "licence", "source"), disable_numparse=True)


def describe(result: Prepared) -> str:
    """One line on a set that is ready."""
    counts = ", ".join(f"{count:,} {split}" for split, count in result.counts.items())
    if not result.new:
        return f"{result.name}: already prepared ({counts}) in {result.path}; remove that folder to prepare it anew"
    lost = result.left_out.items()
    left_out = "".join(f"; {count:,} {split} rows without an answer left out" for split, count in lost)
    notes = "".join(f"; note: {note}" for note in result.notes)
    return f"{result.name}: {counts} records in {result.path}{left_out}{notes}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trace_jax.data", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="show all data sets")
    preparing = commands.add_parser("prepare", help="download and convert data sets")
    preparing.add_argument("names", nargs="+", metavar="NAME", help="see `list`")
    preparing.add_argument("--data_dir", type=Path, help="official file, or folder of official files, to read instead")
    preparing.add_argument("--split", help="prepare this split alone, e.g. what the file given as --data_dir holds")
    for command in (listing, preparing):
        command.add_argument("--folder", type=Path, help=f"of prepared sets (default: {store.default_folder()})")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status. Errors are one line on standard error."""
    options = _parser().parse_args(arguments)
    for chatty in ("absl", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    folder = options.folder.absolute() if options.folder else store.default_folder()
    try:
        if options.command == "list":
            print(table(folder), flush=True)
            return 0
        for name in options.names:
            sources.find(name)  # a wrong name is told before an hour of downloads
        if len(options.names) > 1 and options.data_dir is not None and options.data_dir.is_file():
            raise DataError(f"{options.data_dir} is one file, of one set; name that set alone, or give a folder")
        for name in options.names:
            print(describe(prepare(name, folder, data_dir=options.data_dir, split=options.split)), flush=True)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads the table has read enough; nothing is left to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted: nothing of the unfinished set was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
