"""The tiny runs: which there are, and their settings beside those of configs/TASK.py:tiny."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from trace_jax import config as config_lib
from trace_jax import config_checks
from trace_jax.config import RunConfig

TASKS = ("math", "multihop_qa", "bfcl")
STEPS = {"local": 3, "sglang": 2}  # by engine


def settings(workdir: Path, engine: str) -> dict[str, Any]:
    """Changes to the config of a run in `workdir`, relative to the repository; evaluation stands before and after."""
    return {
        "steps": STEPS[engine],
        "data.folder": str(workdir / "data"),
        "warm_start.cache": str(workdir / "warm_start"),  # which both engines share
        "eval.every": 0,
        "logging.tensorboard": False,
    }


def flags(workdir: Path, task: str, engine: str) -> list[str]:
    """The same as flags of `trace_jax.main`, with the config."""
    changes = settings(workdir, engine)
    return [f"--config=configs/{task}.py:tiny", *(f"--config.{name}={value}" for name, value in changes.items())]


def config(workdir: Path, task: str) -> RunConfig:
    """The checked config of the run on the engine in this process."""
    result = importlib.import_module(f"configs.{task}").get_config("tiny")
    result.update_from_flattened_dict(settings(workdir, "local"))
    return config_checks.check(config_lib.parse(result))
