"""`python -m trace_jax.retrieval` as a user runs it."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from trace_jax.retrieval import bm25, indexes
from trace_jax.retrieval.base import IndexFolderError, Passage
from trace_jax.retrieval.client import SearchService

PROGRAM = [sys.executable, "-m", "trace_jax.retrieval"]


def run(*arguments):
    done = subprocess.run([*PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_build_then_serve_then_search(tmp_path):
    path, index = tmp_path / "wiki.jsonl", tmp_path / "index"
    path.write_text(json.dumps({"id": "0", "contents": '"Loire"\nThe longest river of France.'}) + "\n")
    code, out, err = run("build", f"--corpus={path}", f"--index={index}", "--kind=bm25")
    assert (code, out) == (0, f"bm25 index of 1 passages written to {index}\n")
    assert "passages: 100%" in err  # the progress bar
    process = subprocess.Popen([*PROGRAM, "serve", f"--index={index}", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline().split()
        assert said[:-1] == "serving the bm25 index of 1 passages on".split()
        assert said[-1].startswith("http://127.0.0.1:")
        client = SearchService(said[-1])
        assert [p.title for p in client.search("longest river", 3)] == ["Loire"]
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    from trace_jax.retrieval.__main__ import main

    bad, index = tmp_path / "bad.jsonl", tmp_path / "index"
    bad.write_text('{"body": 1}\n')
    bm25.build([Passage("T", "x")], index)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in [
            (["build", f"--corpus={tmp_path}/no", f"--index={tmp_path}/i"], "no: cannot be read"),
            (["build", f"--corpus={bad}", f"--index={tmp_path}/i"], "bad.jsonl:1: has the keys body;"),
            (["build", f"--corpus={bad}", f"--index={index}"], "exists already"),
            (["build", f"--corpus={bad}", f"--index={tmp_path}/i", "--kind=e5", f"--model={tmp_path}"], "encoder"),
            (["build", f"--corpus={bad}", f"--index={tmp_path}/i", "--kind=e5", "--batch_size=0"], "batch_size is 0"),
            (["serve", f"--index={tmp_path}"], "holds no index"),
            (["serve", f"--index={index}", f"--port={port}"], "in use"),
            (["serve", f"--index={index}", "--port=99999"], "port must be 0-65535"),
        ]:
            monkeypatch.setattr(sys, "argv", ["retrieval", *arguments])
            with pytest.raises(SystemExit) as stop:
                main()
            lines = [line for line in capsys.readouterr().err.splitlines() if "passages:" not in line and line]
            assert stop.value.code == 1 and len(lines) == 1, lines
            assert lines[0].startswith("error: ") and message in lines[0]


def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch, capsys):
    from trace_jax.retrieval import __main__ as command

    def interrupted(path, **_):
        yield Passage("T", "x")
        raise KeyboardInterrupt

    monkeypatch.setattr(command.corpus, "read", interrupted)
    monkeypatch.setattr(sys, "argv", ["retrieval", "build", "--corpus=wiki.jsonl", f"--index={tmp_path / 'index'}"])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert (stop.value.code, list(tmp_path.iterdir())) == (130, [])
    assert capsys.readouterr().err == "interrupted: nothing of the unfinished index was kept\n"


def test_an_index_is_opened_by_its_kind(tmp_path):
    bm25.build([Passage("T", "x")], tmp_path / "index")
    assert indexes.load(tmp_path / "index").kind == "bm25"
    manifest = tmp_path / "index" / "index.json"
    manifest.write_text(manifest.read_text().replace('"bm25"', '"other"'))
    with pytest.raises(IndexFolderError, match="holds an index of kind 'other'; known are bm25 and e5"):
        indexes.load(tmp_path / "index")


def test_listening_to_other_machines_is_warned_of():
    from trace_jax.retrieval.__main__ import _is_local

    local = ["127.0.0.1", "::1", "localhost"]
    assert all(map(_is_local, local)) and not any(map(_is_local, ["0.0.0.0", "::", "10.0.0.1", "example.org"]))
