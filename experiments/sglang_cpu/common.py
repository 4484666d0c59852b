"""What the parts share: real servers of the quickstart's policy, and runs on them."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs import quickstart
from experiments.runs import ROOT
from trace_jax import config as config_lib
from trace_jax import config_checks
from trace_jax.assemble import assemble
from trace_jax.config import RunConfig
from trace_jax.loop import Run
from trace_jax.serving import command, install, process
from trace_jax.serving.servers import Servers

HERE = Path(__file__).resolve().parent
RAW = HERE / "raw"
_START_TIMEOUT = 600.0  # seconds; 15 on two idle cores


def parse(description: str, **more: Any) -> argparse.Namespace:
    """The command line of a part: where it works, where it keeps raw data, and `more` options with their defaults."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    workdir = "runs/experiments/sglang_cpu"
    parser.add_argument("--workdir", default=workdir, type=Path, help="relative to the repository")
    parser.add_argument("--raw", default=RAW, type=Path, help="where measurements are kept")
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, type=type(default))
    return parser.parse_args()


def server_python() -> Path:
    """The interpreter of the server's environment: TRACE_SGLANG_PYTHON, or .sglang in the repository."""
    return Path(os.environ.get("TRACE_SGLANG_PYTHON") or install.server_python(ROOT / ".sglang"))


def config(workdir: Path, urls: Sequence[str] = (), **settings: Any) -> RunConfig:
    """The quickstart's config with `a__b=value` for `config.a.b = value`; on servers where there are URLs.

    `workdir` is relative to the repository, here and below.
    """
    result = quickstart.get_config("paper")
    result.predictor.warmup_prompts = 128
    result.warm_start.cache = str(ROOT / workdir / "warm_start")
    if urls:
        result.engine, result.sglang.urls = "sglang", ",".join(urls)
    for name, value in settings.items():
        section, _, field = name.rpartition("__")
        setattr(result[section] if section else result, field, value)
    return config_checks.check(config_lib.parse(result))


def make_run(workdir: Path, name: str, urls: Sequence[str], **settings: Any) -> Run:
    """The parts of a run at step 0 whose engine is a client of `urls`."""
    return assemble(config(workdir, urls, **settings), ROOT / workdir / name)


def policy_folder(workdir: Path) -> Path:
    """The model folder of the warm-started policy, made where it is missing; all parts share it."""
    settings = config(workdir)
    assemble(settings, ROOT / workdir)
    return ROOT / workdir / "warm_start" / settings.task


@contextlib.contextmanager
def serve(workdir: Path, options: Sequence[Sequence[str]] = ((),), *, seed: int = 0) -> Iterator[list[str]]:
    """One server for each entry of `options`, its further arguments of SGLang's; stopped in the end. Yields URLs."""
    model, python, length = policy_folder(workdir), server_python(), config(workdir).model.context_length
    programs = []
    for index, extra in enumerate(options):
        spec = command.ServerSpec(
            model=model,
            port=process.free_port(),
            python=python,
            context_length=length,
            seed=1000 * seed + index,
            cpu=True,
            extra=tuple(extra),
        )
        programs.append(
            process.Program(
                command=tuple(command.arguments(command.validate(spec))),
                environment=command.environment(spec, os.environ),
                host=spec.host,
                port=spec.port,
                url=command.url(spec),
                log=ROOT / workdir / "servers" / f"{os.getpid()}-{index}.log",
            )
        )
    with Servers(programs, start_timeout=_START_TIMEOUT) as servers:
        servers.start()
        yield [program.url for program in programs]
