"""The CPU server's environment: built once, built anew when versions change, never over something else.

That the versions work together is shown by the tests that use the server (test_real_server.py).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from trace_jax.serving import install

PINS = Path(install.__file__).parent / "cpu"


@pytest.fixture
def bare_venv(monkeypatch):
    """Environments without pip, which takes seconds to come."""
    real = install.venv.create
    monkeypatch.setattr(install.venv, "create", lambda folder, with_pip: real(folder, with_pip=False))


def test_a_build_and_then_nothing_to_do(bare_venv, tmp_path, monkeypatch):
    calls, folder = [], tmp_path / "sg"
    assert install.install(folder, calls.append)
    assert [call[:3] for call in calls] == 2 * [[str(folder / "bin" / "python"), "-m", "pip"]]
    assert [call[3:] for call in calls] == install.pip_steps()
    assert not install.install(folder, calls.append) and len(calls) == 2
    monkeypatch.setattr(install, "_TORCH", "torch==9")
    assert install.install(folder, calls.append) and "torch==9" in calls[-1]
    (folder / "bin" / "python").unlink()
    assert install.install(folder, calls.append)


def test_a_build_that_failed_is_begun_again(bare_venv, tmp_path):
    def fail(command):
        raise subprocess.CalledProcessError(1, command)

    with pytest.raises(subprocess.CalledProcessError):
        install.install(tmp_path / "sg", fail)
    (tmp_path / "sg" / "half").touch()
    assert install.install(tmp_path / "sg", lambda _: None) and not (tmp_path / "sg" / "half").exists()


def test_a_folder_with_something_else_is_kept(bare_venv, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="holds something else than an environment; choose another folder"):
        install.install(tmp_path, lambda _: None)
    assert (tmp_path / "thesis.tex").exists()


def test_every_requirement_has_one_exact_version():
    """Names that requirements.txt, the packages without their requirements and torch give, in constraints.txt."""

    def name(line: str) -> str:
        return re.split(r"[=<>]", line, maxsplit=1)[0].lower().replace("_", "-")

    def lines(file: str) -> list[str]:
        return (PINS / file).read_text().split("\n")[:-1]

    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[^=,<>]+", line) for line in lines("constraints.txt"))
    pinned = {name(line): line for line in lines("constraints.txt")}
    assert len(pinned) == len(lines("constraints.txt"))
    alone = install.pip_steps()[0][3:]
    wanted = {name(line) for line in [*lines("requirements.txt"), *alone, "torch"]}
    assert wanted <= set(pinned)
    assert all(pinned[name(requirement)] == requirement for requirement in alone)
