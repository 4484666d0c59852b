"""Where there is no server to test with: a reason that says how to get one, and no silence where it is required."""

from __future__ import annotations

import pytest

from tests import sglang_server


@pytest.fixture(autouse=True)
def nothing_built(monkeypatch, tmp_path):
    monkeypatch.setattr(sglang_server, "_FOLDER", tmp_path)
    for name in ("TRACE_SGLANG_PYTHON", "TRACE_SGLANG_REQUIRED"):
        monkeypatch.delenv(name, raising=False)


def test_without_one_a_test_is_skipped_with_the_command():
    with pytest.raises(pytest.skip.Exception, match="`python -m trace_jax.serving.install` builds it"):
        sglang_server.server_python()


def test_where_it_is_required_a_test_fails(monkeypatch):
    monkeypatch.setenv("TRACE_SGLANG_REQUIRED", "1")
    with pytest.raises(pytest.fail.Exception, match="`python -m trace_jax.serving.install` builds it"):
        sglang_server.server_python()


def test_one_that_is_named_is_taken(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    for path in (tmp_path / "bin" / "python", tmp_path / "other"):
        path.touch()
    assert sglang_server.server_python() == tmp_path / "bin" / "python"
    monkeypatch.setenv("TRACE_SGLANG_PYTHON", str(tmp_path / "other"))
    assert sglang_server.server_python() == tmp_path / "other"
