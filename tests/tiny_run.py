"""Whole runs of the tiny config in this process, with what they left behind."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests import tiny_config
from trace_jax import assemble, config_checks, saving
from trace_jax import config as config_lib
from trace_jax import run as run_lib
from trace_jax.config import RunConfig
from trace_jax.loop import Run
from trace_jax.train.metrics import read_jsonl


@dataclasses.dataclass(frozen=True)
class Done:
    """A run that came to its end, or was stopped."""

    config: RunConfig
    workdir: Path
    parts: Run  # as the run left them
    rows: list[dict[str, Any]]  # of metrics.jsonl


def settings(changes: dict[str, Any]) -> RunConfig:
    """The tiny config with some fields changed by their dotted names."""
    config = tiny_config.get_config()
    config.update_from_flattened_dict(changes)
    return config_checks.check(config_lib.parse(config))


def go(config: RunConfig, workdir: Path) -> Done:
    """`run.run`, whose parts are caught on their way."""
    caught, real = [], run_lib.assemble
    run_lib.assemble = lambda *arguments: caught.append(real(*arguments)) or caught[0]
    try:
        run_lib.run(config, workdir)
    finally:
        run_lib.assemble = real
    return Done(config, workdir, caught[0], read_jsonl(workdir / "metrics.jsonl"))


def restored(config: RunConfig, workdir: Path) -> Run:
    """What the newest checkpoint of `workdir` holds, in parts of its own."""
    parts = assemble.assemble(config, workdir)
    checkpoints = saving.open_checkpoints(config, workdir / "checkpoints")
    assert saving.restore(parts, checkpoints)
    checkpoints.close()
    return parts


def bits(parts: Run) -> list[Any]:
    """Everything that the next step depends on, to be compared exactly."""
    snapshot = saving.snapshot(parts)
    arrays = [(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(snapshot.arrays)]
    host = {name: (value.dtype, value.shape, value.tobytes()) for name, value in snapshot.host.items()}
    return [snapshot.step, arrays, host, snapshot.document]


def timeless(rows: list[dict[str, Any]], *also: str) -> list[dict[str, Any]]:
    """Rows without clock times, and without the fields named in `also`."""
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k not in also} for row in rows]


def recording(value: Any, read: set[str], name: str = "") -> Any:
    """The same settings; `read` collects the dotted name of each field that is looked at.

    Not counted: what the config's own modules do (checks, config.json, fingerprints), the record of settings that the
    warm start lays beside its model, and the copy in which paths are model folders.
    """
    names = {field.name for field in dataclasses.fields(value)}

    def __getattribute__(self, attribute):
        if attribute in names and _counts(sys._getframe(1)):
            read.add(f"{name}{attribute}")
        return object.__getattribute__(self, attribute)

    watched = type(type(value).__name__, (type(value),), {"__getattribute__": __getattribute__})
    inner = {key: getattr(value, key) for key in names}
    return watched(
        **{k: recording(v, read, f"{name}{k}.") if dataclasses.is_dataclass(v) else v for k, v in inner.items()}
    )


def _counts(frame: Any) -> bool:
    copied = False
    while frame.f_code.co_filename == dataclasses.__file__:
        frame, copied = frame.f_back, True
    if frame.f_code is config_lib.corrects.__code__:  # a decision of the run, though it stands beside the settings
        return True
    if frame.f_code.co_filename in (config_lib.__file__, config_checks.__file__, __file__):
        return False
    return not (copied and frame.f_code.co_name in ("_first_params", "with_model_folders"))
