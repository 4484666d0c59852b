"""Builds the environment of the CPU test server: `python -m trace_jax.serving.install --folder=.sglang`.

An unmodified SGLang with a torch for CPUs, at the versions that the tests ran with: 3.3 GB, two minutes. Nothing is
done where the folder holds these versions already. A server for GPUs is `pip install sglang` in an environment of its
own.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

_PINS = Path(__file__).parent / "cpu"
_REQUIREMENTS, _CONSTRAINTS = _PINS / "requirements.txt", _PINS / "constraints.txt"
# Their own requirements are left out: the CUDA half of them is what a CPU does without. requirements.txt has the rest.
_ALONE = ("torchvision==0.28.0", "triton==3.9.0", "xgrammar==0.2.7", "soundfile==0.13.1", "sglang==0.5.23")
_TORCH = "torch==2.13.0"
_MARK = "trace_jax_server.txt"


def pip_steps() -> list[list[str]]:
    """The arguments of pip, one list for each call, in order."""
    pinned = [_TORCH, "-r", str(_REQUIREMENTS), "-c", str(_CONSTRAINTS)]
    return [["install", "-q", "--no-deps", *_ALONE], ["install", "-q", *pinned]]


def fingerprint() -> str:
    """Tells one set of versions, Python's included, from others."""
    parts = [*_ALONE, _TORCH, _REQUIREMENTS.read_text(), _CONSTRAINTS.read_text(), sys.version]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def server_python(folder: Path) -> Path:
    """The interpreter of an environment in `folder`."""
    return folder / "bin" / "python"


def install(folder: Path, call: Callable[[list[str]], object] | None = None) -> bool:
    """Builds the environment unless it is there; whether it was built. A half-built one is built anew.

    Args:
      call: runs a command and raises if it fails; `subprocess.check_call` by default.
    Raises FileExistsError for a folder that holds something else.
    """
    mark = folder / _MARK
    if server_python(folder).exists() and mark.exists() and mark.read_text() == fingerprint():
        return False
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise FileExistsError(f"{folder} holds something else than an environment; choose another folder")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    for step in pip_steps():
        (call or subprocess.check_call)([str(server_python(folder)), "-m", "pip", *step])
    mark.write_text(fingerprint())
    return True


def main() -> None:
    """Parses the command line, builds, and says what was done."""
    parser = argparse.ArgumentParser(prog="python -m trace_jax.serving.install", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(".sglang"), help="of the environment")
    folder = parser.parse_args().folder
    try:
        built = install(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(
        f"{folder} was built; what pip says sglang requires beside it is for GPUs"
        if built
        else f"{folder} is up to date"
    )


if __name__ == "__main__":
    main()
