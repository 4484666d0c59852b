"""The data sets of the tiny runs, prepared from samples of public data sets in their official formats."""

from __future__ import annotations

import json
import os
from pathlib import Path

from experiments.runs import ROOT
from trace_jax.data.prepare import prepare

HELD_OUT = 50  # the last questions of the HotpotQA sample, which comes in one piece


def samples() -> Path:
    """The folder of samples: the environment variable TRACE_DATA, or shared/data beside the repository."""
    return Path(os.environ.get("TRACE_DATA") or ROOT.parent / "shared" / "data")


def prepare_all(given: Path, out: Path) -> Path:
    """Prepares MATH's training problems in the place of DeepScaleR, MATH-500, HotpotQA in two parts, and BFCL.

    Data sets that are there already stay. Raises DataError for a sample that is missing or damaged.
    """
    prepare("deepscaler", out, data_dir=given / "math_train.json")
    prepare("math500", out, data_dir=given / "math500.json")
    prepare("hotpotqa", out, data_dir=split_hotpotqa(given / "hotpotqa_distractor_sample.json", out / "hotpotqa_parts"))
    prepare("bfcl_base", out)
    return out


def split_hotpotqa(sample: Path, folder: Path) -> Path:
    """Writes the sample as two files with the official names; what is held out is not trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = json.loads(sample.read_text())
    parts = {"hotpot_train_v1.1.json": rows[:-HELD_OUT], "hotpot_dev_distractor_v1.json": rows[-HELD_OUT:]}
    for name, part in parts.items():
        (folder / name).write_text(json.dumps(part))
    return folder
