"""BFCL v4, multi-turn: records from the data folder of the bfcl-eval package, or from a folder of the same layout.

    BFCL_v4_multi_turn_{base,long_context,miss_func,miss_param}.json   one entry a line
    possible_answer/BFCL_v4_multi_turn_....json                        the ground truth of each entry
    multi_turn_func_doc/gorilla_file_system.json, ...                  one function a line
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trace_jax.data import cells, readers
from trace_jax.data.errors import DataError, RowError
from trace_jax.data.formats import Record

PACKAGE = "bfcl_eval"
DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system.json",
    "MathAPI": "math_api.json",
    "MessageAPI": "message_api.json",
    "TicketAPI": "ticket_api.json",
    "TradingBot": "trading_bot.json",
    "TravelAPI": "travel_booking.json",
    "TwitterAPI": "posting_api.json",
    "VehicleControlAPI": "vehicle_control.json",
}


def installed_folder() -> Path:
    """The data folder of the installed package. Raises DataError where it is not installed; does not import it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DataError(
            "bfcl-eval is not installed: pip install --no-deps bfcl-eval==2026.3.23, or give --data_dir, a copy of its "
            "data folder"
        )
    return Path(spec.origin).parent / "data"


def file_name(category: str) -> str:
    """The file of a category ("base", "long_context", "miss_func", "miss_param"), also below possible_answer."""
    return f"BFCL_v4_multi_turn_{category}.json"


def records(path: Path, category: str, tick: readers.Tick) -> Iterator[Record]:
    """The records of a category; `path` is its file, the other files lie around it.

    Entries and ground truths are matched by id. `functions` documents every function of the involved classes, also
    those that are missing at first (miss_func) or excluded. Raises DataError for files that do not fit together.
    """
    truth_path = path.parent / "possible_answer" / path.name
    truths = {}
    for number, row in enumerate(readers.rows(truth_path, "", "", lambda _: None)):
        try:
            truths[cells.text(row, "id")] = cells.items(row, "ground_truth")
        except RowError as error:
            raise DataError(f"{truth_path}: record {number} {error}") from error
    documents: dict[str, list[Mapping[str, Any]]] = {}
    for number, row in enumerate(readers.rows(path, "", "", tick)):
        try:
            record = _record(row, category, truths)
        except RowError as error:
            raise DataError(f"{path}: record {number} {error}; this is no BFCL multi-turn file") from error
        for name in record["involved_classes"]:
            if name not in documents:
                documents[name] = _documents(path.parent, name)
        record["functions"] = [document for name in record["involved_classes"] for document in documents[name]]
        yield record


def _record(row: Mapping[str, Any], category: str, truths: Mapping[str, list[Any]]) -> Record:
    name = cells.text(row, "id")
    turns = cells.items(row, "question")
    if not all(isinstance(turn, list) and all(isinstance(message, dict) for message in turn) for turn in turns):
        raise RowError("has something other than lists of messages in 'question'")
    messages = [
        [{"role": cells.text(message, "role"), "content": cells.text(message, "content")} for message in turn]
        for turn in turns
    ]
    config, classes = cells.mapping(row, "initial_config"), cells.texts(row, "involved_classes")
    unknown = [name for name in classes if name not in DOCUMENTS]
    if unknown:
        raise RowError(f"involves {unknown[0]!r}, which is none of {', '.join(DOCUMENTS)}")
    if name not in truths:
        raise RowError(f"has id {name!r}, for which possible_answer has no ground truth")
    if len(truths[name]) != len(turns):
        raise RowError(f"has {len(turns)} turns, but a ground truth of {len(truths[name])}")
    return {
        "id": name,
        "category": f"multi_turn_{category}",
        "turns": messages,
        "initial_config": dict(config),
        "involved_classes": classes,
        "excluded_functions": cells.texts(row, "excluded_function") if "excluded_function" in row else [],
        "missed_functions": dict(cells.mapping(row, "missed_function")) if "missed_function" in row else {},
        "ground_truth": truths[name],
        "group": category,
    }


def _documents(folder: Path, name: str) -> list[Mapping[str, Any]]:
    path = folder / "multi_turn_func_doc" / DOCUMENTS[name]
    found = []
    for number, row in enumerate(readers.rows(path, "", "", lambda _: None)):
        try:
            cells.text(row, "name")
        except RowError as error:
            raise DataError(f"{path}: record {number} {error}; this is no BFCL function document") from error
        found.append(row)
    return found
