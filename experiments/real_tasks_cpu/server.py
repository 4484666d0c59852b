"""A real SGLang server on the CPU for one run, started and stopped by the project's own launcher."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.runs import ROOT
from experiments.sglang_cpu.common import server_python
from trace_jax.serving.process import free_port

_READY = re.compile(r"--config\.sglang\.urls=(\S+)")
_STOP_SECONDS = 60.0


@contextlib.contextmanager
def serve(workdir: Path, flags: Sequence[str]) -> Iterator[str]:
    """The URL of a server for the run that `flags` and `workdir` (relative to the repository) describe.

    Raises RuntimeError if the launcher ends before its server is ready; the launcher's words are in WORKDIR.log.
    """
    command = [sys.executable, "-m", "trace_jax.launch_sglang", "--cpu", f"--workdir={workdir}", *flags]
    command += [f"--port={free_port()}", f"--python={server_python()}"]
    log = ROOT / f"{workdir}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            url = next((found[1] for line in launcher.stdout if (found := _READY.search(line))), None)
            if url is None:
                raise RuntimeError(f"the SGLang server did not start, see {log}")
            threading.Thread(target=launcher.stdout.read, daemon=True).start()  # a full pipe would stop the launcher
            yield url
        finally:
            launcher.send_signal(signal.SIGTERM)
            try:
                launcher.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                launcher.kill()  # its servers end with it
                launcher.wait()
