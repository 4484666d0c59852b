"""The command line and the environment of one SGLang server, as pure functions of what it should be.

The server runs in an environment of its own: its torch and transformers are not ours.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

SHIM = Path(__file__).parent / "cpu" / "shim"
# Of 0.5.23: a request fits if its prompt has fewer than context - 6 tokens, and prompt and answer together at most
# context - 2. Eight more than an episode's tokens leave room for a last turn on a full history.
SPARE_CONTEXT = 8
# Clients keep idle connections to use them again. A server that closes them first, as SGLang does after 5 seconds,
# fails the request that has just been sent on one.
_KEEP_ALIVE = 3600  # seconds
_CPU_CACHE_TOKENS = 32768  # 50 MB for the quickstart policy, 1.5 GB for SmolLM2; by default it would take 12 GB
_CPU_REQUESTS = 64


class SpecError(ValueError):
    """A server that cannot be started as it is described: one line with the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """One server. A field that is None is left to SGLang's own default."""

    model: Path  # model folder with config.json, safetensors and a tokenizer
    port: int
    python: Path  # of the environment that SGLang is installed in
    host: str = "127.0.0.1"
    tensor_parallel: int = 1  # devices of this server
    devices: tuple[int, ...] = ()  # ids of its GPUs; empty: whatever CUDA_VISIBLE_DEVICES says already
    memory_fraction: float | None = None  # of a GPU's memory, for weights and cache
    context_length: int | None = None  # tokens of an episode, prompt included
    dtype: str | None = None
    seed: int | None = None  # of the sampler; servers of one run need different ones
    release_memory: bool = False  # whether /release_memory_occupation can be called
    cpu: bool = False
    extra: tuple[str, ...] = ()  # more arguments of SGLang's, after all others


def validate(spec: ServerSpec) -> ServerSpec:
    """Returns `spec`; raises SpecError for a server that could not start, whatever its model."""
    if not os.access(spec.python, os.X_OK) or spec.python.is_dir():
        raise SpecError(f"server Python {spec.python} is no program; give the bin/python of SGLang's environment")
    if not 1 <= spec.port <= 65535:
        raise SpecError(f"port {spec.port} is not in 1 to 65535")
    if spec.tensor_parallel < 1 or (spec.cpu and spec.tensor_parallel > 1):
        limit = "1 on a CPU" if spec.cpu else "at least 1"
        raise SpecError(f"tensor parallel size {spec.tensor_parallel} must be {limit}")
    if spec.devices and len(set(spec.devices)) != spec.tensor_parallel:
        raise SpecError(
            f"server on port {spec.port}: devices {','.join(map(str, spec.devices))} are not "
            f"{spec.tensor_parallel} different ones, which its tensor parallel size asks for"
        )
    if spec.memory_fraction is not None and not 0 < spec.memory_fraction < 1:
        raise SpecError(f"memory fraction {spec.memory_fraction} must be between 0 and 1")
    if spec.context_length is not None and spec.context_length < 2:
        raise SpecError(f"context length {spec.context_length} must be at least 2 tokens")
    return spec


def check_model(folder: Path) -> Path:
    """Returns `folder`; raises SpecError where it holds no model."""
    if not (folder / "config.json").is_file():
        raise SpecError(f"model folder {folder} holds no config.json; give a folder that holds a model")
    return folder


def share_devices(devices: tuple[int, ...], servers: int, tensor_parallel: int) -> list[tuple[int, ...]]:
    """The devices of each server: the listed ones in order, or 0, 1, 2, ... if none are listed.

    A device may be listed for several servers, which then share it. Raises SpecError for a list of another length.
    """
    wanted = servers * tensor_parallel
    devices = devices or tuple(range(wanted))
    if len(devices) != wanted:
        raise SpecError(
            f"{len(devices)} devices are listed, but {servers} servers of tensor parallel size {tensor_parallel} take "
            f"{wanted}; list a device twice for two servers that share it"
        )
    return [devices[i : i + tensor_parallel] for i in range(0, wanted, tensor_parallel)]


def url(spec: ServerSpec) -> str:
    """Where clients on this machine reach the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(spec.host, spec.host)
    return f"http://[{host}]:{spec.port}" if ":" in host else f"http://{host}:{spec.port}"


def arguments(spec: ServerSpec) -> list[str]:
    """The command line, program first."""
    command = [str(spec.python), "-m", "sglang.launch_server", "--model-path", str(spec.model)]
    options: dict[str, object] = {"--host": spec.host, "--port": spec.port, "--tp-size": spec.tensor_parallel}
    options["--log-level-http"] = "warning"  # a line of log for every request would fill disks
    if spec.context_length is not None:
        options["--context-length"] = spec.context_length + SPARE_CONTEXT
    if spec.memory_fraction is not None:
        options["--mem-fraction-static"] = spec.memory_fraction
    if spec.dtype is not None or spec.cpu:
        options["--dtype"] = spec.dtype or "float32"
    if spec.seed is not None:
        options["--random-seed"] = spec.seed
    switches = ["--enable-memory-saver"] if spec.release_memory and not spec.cpu else []
    if spec.cpu:
        options |= {"--device": "cpu", "--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
        options |= {"--max-total-tokens": _CPU_CACHE_TOKENS, "--max-running-requests": _CPU_REQUESTS}
        # An idle scheduler would keep one core busy with asking for work.
        switches += ["--disable-overlap-schedule", "--sleep-on-idle"]
    flat = [str(part) for option in options.items() for part in option]
    return [*command, *flat, *switches, *spec.extra]


def environment(spec: ServerSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment variables, from those of the launcher."""
    result = {name: value for name, value in inherited.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    result["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "false"  # the trainer scores logits / T, so the server must too
    result["SGLANG_TIMEOUT_KEEP_ALIVE"] = str(_KEEP_ALIVE)
    if spec.context_length is not None:
        # A model folder may name exactly the context; the spare tokens of it are never computed.
        result["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if spec.devices and not spec.cpu:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.devices))
    if spec.cpu:
        result |= {"PYTHONPATH": str(SHIM), "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        result |= {"OMP_NUM_THREADS": "1"}  # threads that wait for each other make two cores 20 times slower
        result |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # a folder is all that is asked for
    return result
