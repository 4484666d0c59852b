"""Which drafts go: by process, machine and age, with processes that really ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.models import tiny_gguf
from trace_jax.models import drafts, gguf_import


def ended_process():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def make(path, age=0.0):
    path.mkdir(parents=True)
    (path / "model.safetensors.part").touch()
    for each in (path / "model.safetensors.part", path):
        os.utime(each, (time.time() - age,) * 2)
    return path


def test_drafts_of_killed_processes_go(tmp_path, monkeypatch):
    mine = drafts.draft_of(tmp_path / "a-0123")
    assert mine.parent == tmp_path and mine.name.startswith(".a-0123.")
    host = mine.name.split(".")[2]
    monkeypatch.setattr(os, "getpid", ended_process)
    gone = make(drafts.draft_of(tmp_path / "b.v2-4567"))
    day = 24 * 3600
    alive, elsewhere = make(mine), make(tmp_path / f".c-89ab.{host}x.{gone.name.split('.')[-2]}.part")
    old = [make(tmp_path / f".d-89ab.{host}.{os.getppid()}.part", day + 60), make(tmp_path / ".old.part", day + 60)]
    kept = [alive, elsewhere, make(tmp_path / "e-cdef", 9 * day), make(tmp_path / ".f-cdef", 9 * day)]
    kept += [make(tmp_path / f".g.{host}.{10**30}.part"), make(tmp_path / ".h.part", day - 60)]
    young = make(tmp_path / f".i.{host}x.1.part", 9 * day)
    (young / "model.safetensors.part").write_bytes(b"still written")
    drafts.sweep(tmp_path)
    assert not gone.exists() and not any(path.exists() for path in old)
    assert all(path.is_dir() for path in (*kept, young))
    drafts.sweep(tmp_path / "nowhere")


def test_a_conversion_sweeps_first(tmp_path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.weights("llama", tied=True))
    host = drafts.draft_of(tmp_path / "x").name.split(".")[-3]
    left = make(tmp_path / "cache" / f".tiny-0123.{host}.{ended_process()}.part")
    made = gguf_import.cached(path, tmp_path / "cache")
    assert not left.exists() and list((tmp_path / "cache").iterdir()) == [made]
