"""Processes that measure on command: the parent's handle and the child's loop. One JSON object a line, both ways."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.smollm2_cpu.speed_cases import CASES, Case

_MARK = "speed-result "  # lines without it are chatter of libraries
_ROOT = Path(__file__).resolve().parent.parent.parent


class Worker:
    """A child process that holds one side of one case, loaded and compiled."""

    def __init__(self, module: str, case: str, folder: Path, settings: Mapping[str, int] | None = None):
        command = [sys.executable, "-m", f"experiments.smollm2_cpu.{module}", case, str(folder)]
        command += [json.dumps(dict(settings or {}))]
        environment = os.environ | {"TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=_ROOT, env=environment)
        self._name = f"{module} {case}"

    def ask(self, question: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to one question; an empty one asks for a measurement. Raises RuntimeError if the child died."""
        self._process.stdin.write(json.dumps(dict(question or {})) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise RuntimeError(f"speed: {self._name} ended with code {self._process.wait()}; its message stands above")

    def close(self) -> None:
        """Ends the child."""
        self._process.stdin.close()
        self._process.wait()


def serve(kinds: Mapping[str, Callable[[Case, Path, dict[str, int]], Callable[[], dict]]]) -> None:
    """The child: prepares the case of its command line, then answers questions until its input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    measure = kinds[case.kind](case, arguments.folder, arguments.settings)
    for line in sys.stdin:
        question = json.loads(line)
        answer = measure.score(question) if question else measure()
        print(_MARK + json.dumps(answer), flush=True)
