"""Settings of commands with flags of their own: a config file or a run's config.json, and --config.NAME=VALUE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from trace_jax import config as config_lib
from trace_jax import flag_problems
from trace_jax.config import ConfigError, RunConfig


def from_file(path: str, settings: Sequence[str]) -> RunConfig:
    """The config of a file, e.g. configs/quickstart.py, with the given settings. Values are not checked yet.

    Raises ConfigError, one line, for a file or a setting that cannot be used.
    """
    return _parse(config_flags.DEFINE_config_file, [f"--config={path}", *settings])


def of_run(workdir: Path) -> RunConfig:
    """The config of the run in `workdir`. Raises ConfigError where there is none that can be read."""
    try:
        return config_lib.from_json((workdir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--workdir: {workdir} holds no run that can be read ({error})") from error


def with_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """`config` with the given settings. Raises ConfigError as `from_file`."""
    values = config_lib.default_config()
    values.update(json.loads(config_lib.to_json(config)))

    def define(name: str, **options):
        return config_flags.DEFINE_config_dict(name, values, **options)

    return _parse(define, list(settings))


def _parse(define, arguments: Sequence[str]) -> RunConfig:
    values, argv = flags.FlagValues(), ["command", *arguments]
    try:
        holder = define("config", flag_values=values, sys_argv=argv)  # a dictionary's fields are looked up here
        rest = values(argv)[1:]
        config = config_lib.parse(holder.value)
    except flag_problems.FLAG_ERRORS as error:  # a ConfigError too, which is a ValueError
        raise ConfigError(flag_problems.problem(error, argv)) from error
    if rest:
        raise ConfigError(f"{rest[0]!r} is not a flag; settings are given as --config.NAME=VALUE")
    return config
