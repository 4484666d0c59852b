"""Trains a policy: `python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/quickstart`.

Every setting can be changed on the command line, e.g. `--config.task=lookup --config.strategy=grpo`. A run whose workdir
holds a checkpoint goes on from it. SIGTERM or Ctrl-C saves and exits with status 0; a second one exits at once.
"""

from __future__ import annotations

import sys

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Path of a config file, e.g. configs/quickstart.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: metrics, checkpoints, warm start.")


def main(argv: list[str]) -> None:
    """Parses the settings and runs."""
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is not a flag; settings are given as --config.NAME=VALUE")
    if _CONFIG.value is None or _WORKDIR.value is None:
        raise app.UsageError("give --config=configs/quickstart.py and --workdir=FOLDER")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
    from trace_jax import config as config_lib
    from trace_jax import config_checks

    try:
        config = config_checks.check(config_lib.parse(_CONFIG.value))
        from trace_jax import run

        run.run(config, _WORKDIR.value)
    except (config_lib.ConfigError, *_expected_errors()) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _expected_errors() -> tuple[type[Exception], ...]:
    from trace_jax.train.checkpoint import CheckpointError

    return (CheckpointError,)


def entry() -> None:
    """Console entry: a mistake in a flag is one line, not a traceback."""
    app.run(main, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except AttributeError as error:  # ml_collections' word for a field that is not there
        name = str(error).strip("\"'")
        given = next((arg for arg in argv if name in arg.split("=")[0].split(".")), name)
        problem = f"{given.split('=')[0]} is not a setting; trace_jax/config.py lists them all"
    except (flags.Error, KeyError, TypeError, ValueError, OSError) as error:
        problem = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    entry()
