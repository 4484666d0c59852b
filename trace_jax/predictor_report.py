"""Draws how good a run's predictor is where it counts: `python -m trace_jax.predictor_report --workdir=runs/x`.

For a finished run, or one under way: its newest checkpoint. WORKDIR/predictor/ gets report.json (figures), report.md
(tables) and predictor.png. Nothing of it counts as budget. `--config.engine`, `--config.sglang.NAME`,
`--config.local.NAME` and `--config.sampling.concurrency` say where rollouts are sampled if not where the run does; a
run under way on servers needs that, since servers hold one set of weights.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from trace_jax import config_arguments, config_checks
from trace_jax.config import ConfigError

_ELSEWHERE = ("engine", "sampling.concurrency", "sglang.", "local.")  # settings that change no question and no answer


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, and says where the report is."""
    parser = _parser()
    arguments, settings = parser.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax reports every file at INFO
    try:
        _check_settings(settings)
        own = config_arguments.of_run(arguments.workdir)
        config = config_checks.check(config_arguments.with_settings(own, settings))
    except ConfigError as error:
        _fail(error)
    from trace_jax import predictor_quality  # imports jax: after the settings, so that mistakes are fast
    from trace_jax.engines.base import EngineDown
    from trace_jax.train.checkpoint import CheckpointError

    try:
        predictor_quality.run(
            predictor_quality.Request(
                workdir=arguments.workdir.absolute(),
                own=own,
                config=config,
                prompts=arguments.prompts,
                rollouts=arguments.rollouts,
                anchors=arguments.anchors,
                continuations=arguments.continuations,
                seed=arguments.seed,
            )
        )
    except (ConfigError, CheckpointError, EngineDown) as error:
        _fail(error)
    except KeyboardInterrupt:
        print("\nstopped; nothing was written")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trace_jax.predictor_report", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.error = _fail  # one line, without the usage
    add, some = parser.add_argument, _at_least(2)
    add("--workdir", type=Path, required=True, help="of the run")
    add("--prompts", type=some, help="fresh training prompts, at least a pool; 256, or a pool if that is more")
    add("--rollouts", type=some, default=16, help="of each prompt; half of them choose, half judge")
    add("--anchors", type=some, default=256, help="at most; all anchors of two rollouts of random prompts")
    add("--continuations", type=some, default=8, help="of each anchor")
    add("--seed", type=_at_least(0), default=0, help="of the sampling noise, halves and permutations")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of at least {least}")
        return int(text)

    return number


def _check_settings(settings: Sequence[str]) -> None:
    for setting in settings:
        name = setting.split("=")[0].removeprefix("--config.")
        known = any(name == s or (s.endswith(".") and name.startswith(s)) for s in _ELSEWHERE)
        if setting.startswith("--config.") and not known:
            raise ConfigError(
                f"--config.{name} belongs to the run; only where rollouts are sampled can change: engine, sglang.*, "
                "local.*, sampling.concurrency"
            )


def _fail(error: Exception | str) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
