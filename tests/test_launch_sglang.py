"""The launcher as a process of its own: with a stand-in in SGLang's place, and once with the real server."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.sglang_server import server_python, write_model
from trace_jax import launch_sglang
from trace_jax.models import folder as model_folder
from trace_jax.serving.process import ServerError, answers, check_port, free_port
from trace_jax.serving.servers import Restarts

ROOT = Path(__file__).parents[1]
STAND_IN = Path(__file__).parent / "serving" / "stand_in.py"
TINY = "--config=tests/tiny_config.py"

# ml_collections loads config files with it.
pytestmark = pytest.mark.filterwarnings(r"ignore:the load_module\(\) method is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("launch") / "model")


@pytest.fixture
def python(tmp_path):
    """A program that takes the place of the server's Python and runs the stand-in."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {STAND_IN} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def launcher(python, tmp_path):
    """Starts the command; the end of the test ends it."""
    with contextlib.ExitStack() as ends:

        def start(*arguments: str) -> subprocess.Popen:
            command = [sys.executable, "-m", "trace_jax.launch_sglang", f"--python={python}", *arguments]
            streams = {"stdout": subprocess.PIPE, "stderr": open(tmp_path / "stderr", "w")}
            process = subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **streams)
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        yield start


def two_ports() -> int:
    """The first of two neighbours that are free."""
    while True:
        port = free_port()
        with contextlib.suppress(ServerError):
            check_port("127.0.0.1", port + 1)
            return port


def connection(process: subprocess.Popen) -> list[str]:
    """The line that is printed once all servers are ready, as flags."""
    for line in process.stdout:
        if line.startswith("--config.engine="):
            return line.split()
    raise AssertionError("it ended without a line for the run")


def about(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/about", timeout=10) as reply:
        return json.loads(reply.read())


def exists(pid: int) -> bool:
    """Whether a process lives; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def gone(url: str, child: int) -> bool:
    return not exists(child) and not answers(url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_servers_until_a_signal(launcher, model, tmp_path, number):
    port = two_ports()
    options = ("--servers=2", f"--port={port}", "--context_length=100", "--seed=5", "--devices=0,3", "--dtype=bfloat16")
    process = launcher(f"--model={model}", *options, f"--log_folder={tmp_path / 'logs'}", "--", "--schedule-policy=lpm")
    urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
    assert connection(process) == ["--config.engine=sglang", f"--config.sglang.urls={','.join(urls)}"]
    facts = [about(url) for url in urls]
    for i, fact in enumerate(facts):
        given = " ".join(fact["arguments"])
        assert f"--model-path {model} " in given and f"--random-seed {5 + i} " in given
        assert "--context-length 108 " in given and given.endswith(" --schedule-policy=lpm")
        assert "--dtype bfloat16" in given
        assert fact["environment"]["CUDA_VISIBLE_DEVICES"] == ("0", "3")[i]
        assert (tmp_path / "logs" / f"server_{port + i}.log").read_text() == "stand-in: healthy\n"
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and rest.strip() == "servers are stopped"
    assert all(gone(url, fact["child"]) for url, fact in zip(urls, facts, strict=True))


def test_a_config_that_is_warm_started_and_trained_on_it(launcher, tmp_path):
    """The folder that is served is the one that the run itself would start from."""
    workdir, port = tmp_path / "run", free_port()
    changed = ("--config.task=lookup", "--config.warm_start.steps=2", "--config.sglang.release_memory=True")
    process = launcher(TINY, f"--workdir={workdir}", *changed, f"--port={port}")
    assert connection(process)[2:] == ["--config.sglang.release_memory=True"]
    given = " ".join(about(f"http://127.0.0.1:{port}")["arguments"])
    folder = workdir / "warm_start" / "lookup"
    assert f"--model-path {folder} " in given and model_folder.load_config(folder).hidden_size == 32
    assert "--context-length 40 " in given and "--dtype float32 " in given and "--enable-memory-saver" in given
    assert (workdir / "sglang" / f"server_{port}.log").exists()


def test_one_that_does_not_start(launcher, model, tmp_path):
    """It is not tried again: the first line says what happened, then come the last words of the server."""
    port = free_port()
    process = launcher(f"--model={model}", f"--port={port}", f"--log_folder={tmp_path}", "--", "--mode=dies")
    out, _ = process.communicate(timeout=60)
    said = (tmp_path / "stderr").read_text().splitlines()
    error = next(i for i, line in enumerate(said) if line.startswith("error: "))
    assert process.returncode == 1 and out == ""
    assert said[error].startswith(
        f"error: server http://127.0.0.1:{port} ended with status 1 before it was ready; log:"
    )
    assert said[-1] == "RuntimeError: no such model"


def test_one_that_dies_again_and_again(monkeypatch, python, model, tmp_path, capfd):
    """In this process, with a limit of no restart: both are given up, and the last one is the error, in one line."""
    port = two_ports()
    urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
    children = []

    class Doomed(launch_sglang.Servers):
        def __init__(self, programs, **settings):
            super().__init__(programs, restarts=Restarts(limit=0), **settings)

        def watch(self):
            children.extend(about(url)["child"] for url in urls)
            for url in urls:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/die", timeout=10)
            super().watch()

    monkeypatch.setattr(launch_sglang, "Servers", Doomed)
    with pytest.raises(SystemExit) as end:
        launch_sglang.main(
            [f"--model={model}", f"--python={python}", f"--port={port}", "--servers=2", f"--log_folder={tmp_path}"]
        )
    assert end.value.code == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    (error,) = errors
    assert re.fullmatch(f"error: given up after 0 restarts: server ({'|'.join(urls)}) ended with status 9; log: .*", error)
    assert all(gone(url, child) for url, child in zip(urls, children, strict=True))


@pytest.fixture
def fails(monkeypatch, capsys, python, tmp_path):
    """Runs the command in this process where it must fail; what it says on stderr."""
    monkeypatch.setattr(launch_sglang.Servers, "start", lambda *_: pytest.fail("it went on to start servers"))
    monkeypatch.chdir(ROOT)

    def call(*arguments: str, given: bool = True) -> str:
        with pytest.raises(SystemExit) as end:
            launch_sglang.main([*([f"--python={python}"] if given else []), *arguments])
        assert end.value.code == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
        return said.err[len("error: ") : -1]

    return call


def test_mistakes_are_one_line_and_status_1(fails):
    both = "give --config=configs/quickstart.py and --workdir=FOLDER, or --model=FOLDER"
    assert fails() == both
    assert fails(TINY, "--model=m") == both
    assert fails("--model=m", "--config.task=lookup").startswith("'--config.task=lookup' is not a flag; --model has no")
    assert fails(TINY) == "give --workdir=FOLDER, the same as to trace_jax.main: it keeps the warm-started model"
    assert fails(TINY, "--workdir=w", "more").startswith("'more' is not a flag; settings are given as")
    unknown = fails(TINY, "--workdir=w", "--config.loss.cliplow=1")
    assert unknown == "--config.loss.cliplow is not a setting; did you mean clip_low?"
    assert fails(TINY, "--workdir=w", "--config.task=chess").startswith("config.task is 'chess'; choose one of")
    assert "invalid literal for int()" in fails(TINY, "--workdir=w", "--config.steps=x")
    assert "No such file or directory: 'none.py'" in fails("--config=none.py", "--workdir=w")
    assert fails("--model=m", "--servers=0") == "--servers is 0, must be at least 1"
    assert fails("--model=m", "--devices=a") == "--devices is 'a', must be numbers with commas between, as 0,1"
    assert fails("--model=m", "--devices=0,1").startswith("2 devices are listed, but 1 servers")
    assert fails(TINY, "--workdir=w", "--memory_fraction=1.5").startswith("memory fraction 1.5 must be between")
    assert fails("--model=m").startswith(f"model folder {ROOT / 'm'} holds no config.json")


def test_a_taken_port_is_refused_before_a_warm_start(fails, tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        said = fails(TINY, f"--workdir={tmp_path}", f"--port={port}")
    assert said.startswith(f"port {port} of 127.0.0.1 cannot be used") and not any(tmp_path.glob("warm_start"))


def test_tpus_are_told_what_serves_them(fails, monkeypatch):
    wanted = r"SGLang-JAX .* has no HTTP call that loads new weights .* take --config.engine=local"
    assert re.fullmatch(wanted, fails("--model=m", "--tpu"))
    monkeypatch.setattr(launch_sglang.machine, "has_tpu", lambda: True)
    assert re.fullmatch(wanted, fails("--model=m"))
    assert "must be at least 1" in fails("--model=m", "--servers=0", "--cpu")  # a CPU server runs there as anywhere


def test_without_a_server_environment(fails, monkeypatch, tmp_path):
    monkeypatch.delenv("TRACE_SGLANG_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    assert fails("--model=m", given=False).startswith("there is no .sglang/bin/python; build a CPU test server with")
    monkeypatch.setenv("TRACE_SGLANG_PYTHON", "elsewhere/python")
    assert fails("--model=m", given=False).startswith(f"server Python {tmp_path}/elsewhere/python is no program; give")


def test_a_real_server_serves_the_config_and_ends_with_its_launcher(tmp_path):
    """It samples from the warm-started model; SIGKILL to the launcher leaves nothing of the server's family."""
    port, workdir = free_port(), tmp_path / "run"
    command = [sys.executable, "-m", "trace_jax.launch_sglang", TINY, f"--workdir={workdir}", "--cpu"]
    command += [f"--port={port}", f"--python={server_python()}", "--config.warm_start.steps=2"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = connection(process)[1].removeprefix("--config.sglang.urls=")
        body = {"input_ids": [2] * 20, "sampling_params": {"max_new_tokens": 12}, "return_logprob": True}
        content, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", content, kind), timeout=60) as reply:
            assert json.loads(reply.read())["meta_info"]["completion_tokens"] == 12
        family = descendants(process.pid)
        assert len(family) >= 4  # guard, server, scheduler, detokenizer
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not any(map(exists, family)), 60)
    assert not answers(url)


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on, from /proc."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for ancestor in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]
