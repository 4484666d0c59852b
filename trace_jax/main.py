"""Trains a policy: `python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/quickstart`.

Every setting can be changed on the command line, e.g. `--config.task=lookup --config.strategy=grpo`. A run whose
workdir holds a checkpoint goes on from it. SIGTERM or Ctrl-C saves and exits with status 0; a second one exits at once.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from trace_jax import flag_problems

_CONFIG = config_flags.DEFINE_config_file("config", None, "Path of a config file, e.g. configs/quickstart.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: metrics, checkpoints, warm start.")


def main(argv: list[str]) -> None:
    """Parses the settings and runs."""
    if len(argv) > 1:
        _fail(f"{argv[1]!r} is not a flag; settings are given as --config.NAME=VALUE")
    if _CONFIG.value is None or _WORKDIR.value is None:
        _fail("give --config=configs/quickstart.py and --workdir=FOLDER")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
    from trace_jax import config as config_lib
    from trace_jax import config_checks

    try:
        config = config_checks.check(config_lib.parse(_CONFIG.value))
    except (config_lib.ConfigError, OSError) as error:  # OSError: a config file that is not there
        _fail(flag_problems.last_line(error))
    from trace_jax import run  # imports jax: after the settings, so that --help and mistakes are fast
    from trace_jax.engines.base import EngineDown
    from trace_jax.train.checkpoint import CheckpointError

    try:
        run.run(config, _WORKDIR.value)
    except (config_lib.ConfigError, CheckpointError, EngineDown, FloatingPointError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("\nstopped before training; the same command starts again")


def _fail(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(1)


def entry() -> None:
    """Console entry: a mistake in a flag is one line, not a traceback."""
    app.run(main, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flag_problems.FLAG_ERRORS as error:
        _fail(flag_problems.problem(error, argv))


if __name__ == "__main__":
    entry()
