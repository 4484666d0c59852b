"""Starts SGLang servers for a run: `python -m trace_jax.launch_sglang --config=configs/quickstart.py --workdir=runs/x`.

It waits until they are healthy, prints the flags that connect a run to them, restarts one that dies, and stops them all
on Ctrl-C, SIGTERM or SIGHUP (status 0). They end with this process, however it ends; no other process is touched.
The model is a folder (`--model`), or what the config says, warm-started if need be. Arguments after `--` are SGLang's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trace_jax import config_arguments, config_checks
from trace_jax.config import ConfigError, MeshConfig, RunConfig
from trace_jax.serving import command, machine
from trace_jax.serving.process import Program, ServerError, check_port
from trace_jax.serving.servers import Servers

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PYTHON, _BUILT = "TRACE_SGLANG_PYTHON", ".sglang/bin/python"
_PROGRESS = 10.0  # seconds between two lines of progress
_NO_TPU = (
    "SGLang-JAX 0.1.0rc0, the SGLang for TPUs, has no HTTP call that loads new weights (GPU servers have "
    "/update_weights_from_disk), so a policy that trains cannot be served by it; on TPUs take --config.engine=local"
)


@dataclasses.dataclass(frozen=True)
class _Served:
    """What command line and config say about the model: fields of ServerSpec."""

    model: Path
    context_length: int | None
    dtype: str | None
    release_memory: bool


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, serves until a signal comes, and says how it ended."""
    argv = list(sys.argv[1:] if argv is None else argv)
    border = argv.index("--") if "--" in argv else len(argv)
    parser = _parser()
    arguments, settings = parser.parse_known_args(argv[:border])
    try:
        with _signals_interrupt():
            _serve(arguments, settings, argv[border + 1 :])
    except (ConfigError, ServerError, command.SpecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nservers are stopped", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trace_jax.launch_sglang", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--config", help="config file of the run; --config.NAME=VALUE as in trace_jax.main")
    add("--workdir", type=Path, help="folder of the run, which keeps the warm-started model and the logs")
    add("--model", type=Path, help="model folder, instead of --config")
    add("--servers", type=int, default=1, help="how many")
    add("--host", default="127.0.0.1", help="address that they listen on")
    add("--port", type=int, default=30000, help="of the first; the others follow")
    add("--tensor_parallel", type=int, default=1, help="devices of each server")
    add("--devices", default="", help="GPUs of all servers in order, as 0,1,2; twice the same to share it")
    add("--memory_fraction", type=float, help="of a GPU's memory that its server takes")
    add("--context_length", type=int, help="tokens of an episode, prompt included; the config's if not given")
    add("--dtype", help="of the served weights; the config's if not given")
    add("--release_memory", action="store_true", help="servers can give their memory back while the policy trains")
    add("--seed", type=int, default=0, help="of the first server's sampler; the others count on")
    add("--cpu", action="store_true", help="serve on the CPU, for tests and small models")
    add("--tpu", action="store_true", help="say what serves runs on TPUs")
    add("--python", type=Path, help=f"of SGLang's environment; ${_PYTHON} or {_BUILT} if not given")
    add("--log_folder", type=Path, help="WORKDIR/sglang, or runs/sglang, if not given")
    add("--start_timeout", type=float, default=900.0, help="seconds in which each server must be healthy")
    return parser


def _serve(arguments: argparse.Namespace, settings: list[str], extra: list[str]) -> None:
    if arguments.tpu or (not arguments.cpu and machine.has_tpu()):
        raise ConfigError(_NO_TPU)
    if arguments.servers < 1:
        raise ConfigError(f"--servers is {arguments.servers}, must be at least 1")
    planned = _specs(arguments, extra)
    for spec in planned:
        check_port(spec.host, spec.port)  # before a warm start that may take minutes
    served = _served(arguments, settings, ",".join(map(command.url, planned)))
    changes = dataclasses.asdict(served) | {"model": command.check_model(served.model)}
    specs = [dataclasses.replace(spec, **changes) for spec in planned]
    logs = arguments.log_folder or (arguments.workdir or Path("runs")) / "sglang"
    programs = [_program(spec, logs) for spec in specs]
    with Servers(programs, start_timeout=arguments.start_timeout, report=_report) as servers:
        servers.start(_Progress(len(specs)))
        print(_connection(specs), flush=True)
        servers.watch()


def _specs(arguments: argparse.Namespace, extra: list[str]) -> list[command.ServerSpec]:
    """The servers that are asked for, before their model is there."""
    python, width = _server_python(arguments.python), arguments.tensor_parallel
    devices = command.share_devices(_devices(arguments.devices), arguments.servers, width)
    chosen = arguments.devices or arguments.servers > 1  # one server alone takes the devices that it sees
    return [
        command.validate(
            command.ServerSpec(
                model=Path(),
                port=arguments.port + i,
                python=python,
                host=arguments.host,
                tensor_parallel=width,
                devices=devices[i] if chosen else (),
                memory_fraction=arguments.memory_fraction,
                context_length=arguments.context_length,
                dtype=arguments.dtype,
                seed=arguments.seed + i,
                release_memory=arguments.release_memory,
                cpu=arguments.cpu,
                extra=tuple(extra),
            )
        )
        for i in range(arguments.servers)
    ]


def _served(arguments: argparse.Namespace, settings: list[str], urls: str) -> _Served:
    """The model folder, made if need be, and how it is served."""
    if (arguments.model is None) == (arguments.config is None):
        raise ConfigError("give --config=configs/quickstart.py and --workdir=FOLDER, or --model=FOLDER")
    if arguments.model is not None:
        if settings:
            raise ConfigError(f"{settings[0]!r} is not a flag; --model has no config, SGLang's own flags follow --")
        return _Served(arguments.model.absolute(), arguments.context_length, arguments.dtype, arguments.release_memory)
    config = _config(arguments.config, settings, urls)
    return _Served(
        model=_model_folder(config, arguments.workdir).absolute(),
        context_length=arguments.context_length or config.model.context_length,
        dtype=arguments.dtype or config.model.dtype,
        release_memory=arguments.release_memory or config.sglang.release_memory,
    )


def _config(path: str, settings: list[str], urls: str) -> RunConfig:
    """The config of a run on servers at `urls`, with the given settings, checked."""
    config = config_arguments.from_file(path, settings)
    sglang = dataclasses.replace(config.sglang, urls=urls)
    return config_checks.check(dataclasses.replace(config, engine="sglang", sglang=sglang))


def _model_folder(config: RunConfig, workdir: Path | None) -> Path:
    """The pretrained model's folder, or that of the warm start, which is trained here where it is not cached.

    On the CPU: the accelerators belong to the servers, and this process takes none of their memory.
    """
    if config.model.path is None and workdir is None:
        raise ConfigError("give --workdir=FOLDER, the same as to trace_jax.main: it keeps the warm-started model")
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.getLogger("absl").setLevel(logging.WARNING)
    from trace_jax import assemble, setup_run  # these import jax: after the settings, so that mistakes are fast

    if config.model.path is not None:
        return Path(setup_run.with_model_folders(config).model.path)
    one_device = dataclasses.replace(config, mesh=MeshConfig(), engine="local")
    assemble.assemble(one_device, workdir.absolute())
    return setup_run.warm_start_folder(config, workdir.absolute())


def _server_python(given: Path | None) -> Path:
    """The interpreter of SGLang's environment. Not resolved: a link there is what makes it that environment's."""
    named = given or os.environ.get(_PYTHON)
    if named is None and not Path(_BUILT).exists():
        raise ConfigError(
            f"there is no {_BUILT}; build a CPU test server with `python -m trace_jax.serving.install`, or name the "
            f"Python of an environment that holds SGLang with --python or ${_PYTHON}"
        )
    return Path(named or _BUILT).absolute()


def _devices(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if text)
    except ValueError as error:
        raise ConfigError(f"--devices is {text!r}, must be numbers with commas between, as 0,1") from error


def _program(spec: command.ServerSpec, logs: Path) -> Program:
    return Program(
        command=tuple(command.arguments(spec)),
        environment=command.environment(spec, os.environ),
        host=spec.host,
        port=spec.port,
        url=command.url(spec),
        log=logs / f"server_{spec.port}.log",
    )


def _connection(specs: Sequence[command.ServerSpec]) -> str:
    """The flags that connect a run, on one line."""
    line = f"--config.engine=sglang --config.sglang.urls={','.join(map(command.url, specs))}"
    return f"{line} --config.sglang.release_memory=True" if specs[0].release_memory else line


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Progress:
    """How many servers are ready: one line that changes in a terminal, else a line now and then."""

    def __init__(self, total: int):
        self._total, self._next, self._live = total, 0.0, sys.stderr.isatty()

    def __call__(self, seconds: float, ready: int) -> None:
        if self._live or seconds >= self._next:
            self._next = seconds + _PROGRESS
            text = f"waiting for SGLang: {ready} of {self._total} ready after {seconds:.0f} s"
            print(text, end="\r" if self._live else "\n", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
