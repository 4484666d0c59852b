"""Checkpoints of everything a run needs to go on as if it had never stopped. The only importer of orbax.

A checkpoint of step s holds arrays on devices (policy, optimiser, predictor, jax keys), arrays on the host whose shapes
vary (the replay window), and a JSON document (data cursor, numpy generators, allocator, weight version, config).
Saving is asynchronous and atomic: a step's folder appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

_FORMAT = {"trace_jax_checkpoints": 1}  # raise the number when the layout changes
_MARKER = "format.json"


class CheckpointError(Exception):
    """A checkpoint folder that cannot be used. The message is one line and says what to do."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything of one moment between two steps."""

    step: int  # training steps finished; the next step to run has this index
    arrays: Any  # pytree of jax arrays, typed keys included
    host: Mapping[str, np.ndarray]  # numpy arrays; shapes may differ from checkpoint to checkpoint
    document: Mapping[str, Any]  # JSON values only


class Checkpointer:
    """The checkpoints of one run, newest last."""

    def __init__(self, folder: str | os.PathLike[str], *, fingerprint: Mapping[str, Any], keep: int):
        """Opens `folder`, creating it if need be.

        Args:
          fingerprint: the settings (nested, JSON values) that a checkpoint must share with the run that resumes it.
          keep: how many of the newest checkpoints stay, >= 1.
        Raises CheckpointError if the folder holds something else than this class's checkpoints.
        """
        if keep < 1:
            raise ValueError(f"checkpoint: keep is {keep}, must be at least 1")
        self._folder = Path(folder).absolute()
        self._fingerprint = _flatten(_json(fingerprint, "fingerprint"))
        _claim(self._folder)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, step_format_fixed_length=8)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, snapshot: Snapshot) -> None:
        """Starts writing; returns when all is copied, so that the caller may donate or change the arrays.

        Saving the newest step again does nothing. Raises CheckpointError if this or the previous write failed.
        """
        self.wait()
        if snapshot.step == self.latest_step():
            return
        full = {name: value for name, value in snapshot.host.items() if value.size}
        document = _FORMAT | {
            "step": snapshot.step,
            "fingerprint": self._fingerprint,
            "document": snapshot.document,
            "empty": {name: [v.dtype.str, v.shape] for name, v in snapshot.host.items() if not v.size},
            "has_host": bool(full),
        }
        items = {
            "arrays": ocp.args.StandardSave(snapshot.arrays),
            "document": ocp.args.JsonSave(_json(document, "document")),
        }
        if full:  # orbax stores neither an empty tree nor an array of size 0
            items["host"] = ocp.args.StandardSave(full)
        try:
            saved = self._manager.save(snapshot.step, args=ocp.args.Composite(**items))
        except Exception as error:
            why = f"step {snapshot.step} was not written to {self._folder}: {_brief(error)}"
            raise CheckpointError(f"checkpoint: {why}") from error
        if not saved:
            raise CheckpointError(
                f"checkpoint: step {snapshot.step} comes before step {self.latest_step()} in {self._folder}; "
                "resume from there or use another folder"
            )

    def wait(self) -> None:
        """Blocks until the write in progress is complete. Raises CheckpointError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise CheckpointError(f"checkpoint: the last write to {self._folder} failed: {_brief(error)}") from error

    def close(self) -> None:
        """Finishes the write in progress and lets go of the folder."""
        self.wait()
        self._manager.close()

    def check(self) -> None:
        """Reads the newest checkpoint's document only. Raises CheckpointError as `restore_latest` would for it."""
        step = self.latest_step()
        if step is not None:
            self._document(step)

    def restore_latest(self, template: Any) -> Snapshot | None:
        """The newest checkpoint, None if there is none.

        Args:
          template: a pytree like `Snapshot.arrays`, of arrays or of ShapeDtypeStructs with shardings; what is restored
            has its shapes, dtypes and shardings.
        Raises CheckpointError for a checkpoint that is damaged or was written by another config.
        """
        step = self.latest_step()
        if step is None:
            return None
        document = self._document(step)
        items = {"arrays": ocp.args.StandardRestore(jax.tree.map(_like, template))}
        if document["has_host"]:
            items["host"] = ocp.args.StandardRestore()
        found = self._read(step, **items)
        host = dict(found["host"]) if document["has_host"] else {}
        for name, (dtype, shape) in document["empty"].items():
            host[name] = np.zeros(shape, dtype)
        return Snapshot(step=step, arrays=found["arrays"], host=host, document=document["document"])

    def restore_part(self, template: Any) -> Snapshot | None:
        """The arrays of the newest checkpoint that `template` holds, nothing else of them read; None if there is none.

        Args:
          template: a part of the pytree that `restore_latest` takes, as nested dictionaries with the fields' names.
        Raises CheckpointError as `restore_latest` does. The result has no host arrays.
        """
        step = self.latest_step()
        if step is None:
            return None
        document = self._document(step)
        places = jax.tree.map(
            lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype, global_shape=x.shape), template
        )
        arguments = ocp.args.PyTreeRestore(jax.tree.map(_like, template), restore_args=places, partial_restore=True)
        # Not through the manager, which reads and writes an item in one way as long as it lives.
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        with contextlib.closing(reader):
            arrays = self._guarded(step, lambda: reader.restore(self._folder / f"{step:08d}" / "arrays", arguments))
        return Snapshot(step=step, arrays=arrays, host={}, document=document["document"])

    def _read(self, step: int, **items: Any) -> Any:
        return self._guarded(step, lambda: self._manager.restore(step, args=ocp.args.Composite(**items)))

    def _guarded(self, step: int, read: Callable[[], Any]) -> Any:
        try:
            with _muted():
                return read()
        except Exception as error:  # orbax, tensorstore and json each raise their own
            raise CheckpointError(self._damaged(step, _brief(error))) from error

    def _damaged(self, step: int, why: str) -> str:
        earlier = [s for s in self._manager.all_steps() if s < step]
        go_on = f"resume from step {max(earlier)}" if earlier else "start anew"
        return f"checkpoint: step {step} in {self._folder} cannot be read ({why}); delete {step:08d} there to {go_on}"

    def _document(self, step: int) -> dict[str, Any]:
        """The document of a checkpoint that this run may resume."""
        document = self._read(step, document=ocp.args.JsonRestore())["document"]
        keys = {"step", "fingerprint", "document", "empty", "has_host"}
        if not isinstance(document, dict) or not keys <= set(document) or document["step"] != step:
            raise CheckpointError(self._damaged(step, "its document is incomplete"))
        there, here = document["fingerprint"], self._fingerprint
        differ = [
            f"{key} is {there.get(key, 'absent')!r} there, {here.get(key, 'absent')!r} here"
            for key in sorted(set(there) | set(here))
            if there.get(key, "absent") != here.get(key, "absent")
        ]
        if differ:
            raise CheckpointError(
                f"checkpoint: step {step} in {self._folder} is of another config: {'; '.join(differ)}; "
                "restore these settings or use another folder"
            )
        return document


def rng_state(rng: np.random.Generator) -> dict[str, Any]:
    """The state of a numpy Generator as JSON values. Raises ValueError unless it is a PCG64, numpy's default."""
    state = rng.bit_generator.state
    if state["bit_generator"] != "PCG64":
        name = state["bit_generator"]
        raise ValueError(f"checkpoint: generator is a {name}, must be a PCG64; make it with np.random.default_rng")
    return state


def rng_from_state(state: Mapping[str, Any]) -> np.random.Generator:
    """The Generator that continues where `rng_state` was taken."""
    rng = np.random.default_rng(0)
    rng.bit_generator.state = dict(state)
    return rng


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Keeps a read that fails from being reported many times: its other parts end later, on a loop that is closed by
    then, and each would print a traceback. So after a failure this stays as it is."""
    hook, log = sys.unraisablehook, logging.getLogger("asyncio")
    sys.unraisablehook = lambda unraisable: None if "loop is closed" in str(unraisable.exc_value) else hook(unraisable)
    log.addFilter(_is_no_leftover)
    yield
    sys.unraisablehook = hook
    log.removeFilter(_is_no_leftover)


def _is_no_leftover(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


def _claim(folder: Path) -> None:
    """Marks an empty folder as ours; refuses a folder with other content."""
    marker = folder / _MARKER
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"checkpoint: {folder} is a file; choose another folder")
    if marker.exists():
        try:
            known = json.loads(marker.read_text()) == _FORMAT
        except (ValueError, OSError):
            known = False
        if not known:
            raise CheckpointError(f"checkpoint: {marker} does not say {json.dumps(_FORMAT)}; choose another folder")
        return
    content = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    if content:
        raise CheckpointError(
            f"checkpoint: {folder} holds {', '.join(content[:3])}, which is no checkpoint of this project; "
            "choose another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / (_MARKER + ".tmp")
    fresh.write_text(json.dumps(_FORMAT))
    os.replace(fresh, marker)


def _like(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _json(value: Any, what: str) -> Any:
    """A deep copy as JSON sees it (tuples become lists), so that later changes do not reach an asynchronous write."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"checkpoint: the {what} holds what JSON cannot: {error}") from error


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else key)
    return flat


def _brief(error: Exception) -> str:
    """The first line of an error, cut to 160 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
