"""The math family on a code-execution service: used from then on if it runs code, refused at the start if not."""

from __future__ import annotations

import socket

import pytest

from tests.sandbox_stand_in import fusion, stand_in
from tests.tiny_run import settings
from trace_jax import setup_data_tasks
from trace_jax.setup_data_tasks import Sets
from trace_jax.tasks.chat.family import Reply, ToolCall

RECORD = {"id": "m", "problem": "What is 6 * 7?", "answer": "42", "kind": "math", "group": ""}


def math(url, monkeypatch):
    """The family; nothing is graded here."""
    monkeypatch.setattr(setup_data_tasks, "Grader", lambda **_: None)
    lengths = {"chat.max_prompt_tokens": 100, "model.context_length": 200, "loss.row_length": 200}
    config = settings({"task": "math", "model.path": "elsewhere", "math.python_url": url} | lengths)
    return setup_data_tasks._math(config, Sets(None, ()))


def test_calls_go_to_the_service(monkeypatch):
    with stand_in((200, fusion(stdout="42\n"))) as (url, requests):
        family = math(url, monkeypatch)
        call = ToolCall("python", {"code": "x = 3"})
        (message,) = family.react(family.ask(RECORD).state, Reply("", (call,))).messages
    assert message.content == "42" and [sent["code"] for _, sent in requests] == ["print(6 * 7)", "x = 3"]


def test_a_service_that_is_down_or_runs_nothing_is_refused_at_the_start(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"python_url: the sandbox service {url} failed: .*refused"):
            math(url, monkeypatch)
    with stand_in((200, fusion(stdout=""))) as (url, _):
        with pytest.raises(ValueError, match="python_url: the service does not run Python code"):
            math(url, monkeypatch)
