"""A real SGLang server for tests: one for the whole run, started when a test first asks for it, and private ones.

It computes on the CPU, so it proves protocol, cache and weights, not GPU kernels. `python -m trace_jax.serving.install`
builds its environment in .sglang; TRACE_SGLANG_PYTHON names another one. Without one these tests are skipped, or fail
where TRACE_SGLANG_REQUIRED is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trace_jax.serving import command, install, process

CONTEXT = 128  # tokens of an episode on the model below
START_TIMEOUT = 300.0  # seconds; 15 on two idle cores
_FOLDER = Path(__file__).parents[1] / ".sglang"
_REMEDY = "no environment with an SGLang server; `python -m trace_jax.serving.install` builds it in .sglang (3.3 GB)"


@dataclasses.dataclass(frozen=True)
class TestServer:
    """A server that is healthy when a test gets it."""

    __test__ = False  # no class of tests

    url: str
    model: Path  # the folder it was started with
    log: Path
    context_length: int  # tokens that an episode may have
    process: process.ServerProcess  # `signal_group(SIGSTOP)` hangs the server, `kill()` kills it

    def post(self, path: str, body: dict[str, Any], timeout: float = 60.0) -> Any:
        """The JSON reply to a POST; urllib's HTTPError for a status that is not 200."""
        content = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            text = reply.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text.decode()

    def get(self, path: str) -> Any:
        """The JSON reply to a GET."""
        with urllib.request.urlopen(self.url + path, timeout=60.0) as reply:
            return json.loads(reply.read())

    def restore(self) -> None:
        """Puts the weights back that it was started with, and empties its cache: for tests that change either."""
        reply = self.post("/update_weights_from_disk", {"model_path": str(self.model), "weight_version": "default"})
        assert reply["success"], reply
        self.post("/flush_cache", {})


def server_python() -> Path:
    """The interpreter of the server's environment; the test that asks is skipped, or fails, where there is none."""
    python = Path(os.environ.get("TRACE_SGLANG_PYTHON") or install.server_python(_FOLDER))
    if not python.exists():
        fail = os.environ.get("TRACE_SGLANG_REQUIRED")
        (pytest.fail if fail else pytest.skip)(_REMEDY)
    return python


def write_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 of 2 layers, 64 wide, with the tokenizer of `arithmetic`: a folder that SGLang serves."""
    import jax
    import numpy as np

    from trace_jax.models import decoder
    from trace_jax.models import folder as model_folder
    from trace_jax.models.config import DecoderConfig
    from trace_jax.tasks import tokenizer as tokenizers
    from trace_jax.tasks.arithmetic.task import Arithmetic

    task = Arithmetic(0, {1: 1.0})
    tokenizer = tokenizers.build_tokenizer(task.symbols(), task.word_level)
    cfg = DecoderConfig(
        vocab_size=tokenizers.vocabulary_size(tokenizer),
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_size=128,
        rope_theta=1e4,
        max_positions=CONTEXT,
    )
    shapes = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda leaf: rng.normal(scale=leaf.shape[0] ** -0.5, size=leaf.shape).astype("f4"), shapes)
    model_folder.save(folder, cfg, params)
    tokenizers.save_tokenizer(tokenizer, folder)
    return folder


def launch(model: Path, log: Path, **changes: Any) -> TestServer:
    """Starts a server on a free port and waits until it is healthy. `changes` are fields of ServerSpec."""
    fields = {"python": server_python(), "cpu": True, "context_length": CONTEXT, "seed": 0} | changes
    spec = command.validate(command.ServerSpec(command.check_model(model), process.free_port(), **fields))
    program = process.Program(
        command=tuple(command.arguments(spec)),
        environment=command.environment(spec, os.environ),
        host=spec.host,
        port=spec.port,
        url=command.url(spec),
        log=log,
    )
    server = process.ServerProcess(program)
    process.wait_until_healthy(server, START_TIMEOUT)
    return TestServer(program.url, model, log, spec.context_length, server)


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory) -> Path:
    """The model folder that the servers of tests serve. Not to be written to."""
    return write_model(tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture(scope="session")
def sglang_server(sglang_model, tmp_path_factory) -> Iterator[TestServer]:
    """The one server of the test run. A test that changes its weights or its cache's expectations calls `restore`."""
    server = launch(sglang_model, tmp_path_factory.mktemp("sglang_log") / "server.log")
    yield server
    server.process.stop()
    assert server.process.exit_status == 0, server.process.last_words()


@pytest.fixture
def start_server(tmp_path, sglang_model) -> Iterator[Callable[..., TestServer]]:
    """A function that starts a private server, for a test that kills or hangs it; the end of the test stops it.

    `start_server(model=FOLDER, seed=1, ...)`: the model of the shared one by default, other fields of ServerSpec.
    """
    with contextlib.ExitStack() as started:

        def start(model: Path = sglang_model, **changes: Any) -> TestServer:
            number = len(list(tmp_path.glob("server_*.log")))
            server = launch(model, tmp_path / f"server_{number}.log", **changes)
            started.callback(server.process.kill)
            return server

        yield start
