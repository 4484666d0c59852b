"""The fields of each kind of record, and how a record is stored: texts as they are, anything nested as JSON text.

(tensorflow-datasets can't store a sequence of a sequence without TensorFlow.)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from trace_jax.data.errors import RowError

VERSION = "1.1.0"  # of the records: a change of their fields or of what is in them is a new version


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of one kind of record."""

    texts: tuple[str, ...]  # str
    nested: tuple[str, ...]  # lists and dicts of JSON values

    def encode(self, record: Mapping[str, Any]) -> dict[str, str]:
        """A record as texts. Raises RowError for a text that can't be stored."""
        for key in self.texts:
            try:
                record[key].encode()
            except UnicodeEncodeError as error:
                raise RowError(f"has half a character (a lone surrogate) in {key!r}") from error
        return {key: record[key] for key in self.texts} | {key: json.dumps(record[key]) for key in self.nested}

    def decode(self, stored: Mapping[str, bytes]) -> dict[str, Any]:
        """The record that was stored as these texts, in UTF-8."""
        texts = {key: stored[key].decode() for key in self.texts}
        return texts | {key: json.loads(stored[key]) for key in self.nested}


MATH = Fields(texts=("id", "problem", "group", "kind"), nested=("answer",))
QUESTION = Fields(texts=("id", "question", "group"), nested=("answers", "paragraphs"))
CONVERSATION = Fields(
    texts=("id", "category", "group"),
    nested=(
        "turns",
        "initial_config",
        "involved_classes",
        "excluded_functions",
        "missed_functions",
        "functions",
        "ground_truth",
    ),
)
