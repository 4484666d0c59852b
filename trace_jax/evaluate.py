"""Measures a policy: `python -m trace_jax.evaluate --config=configs/quickstart.py --folder=evaluations/quickstart`.

That is the model that the config starts from, untrained. `--workdir=runs/x` takes the newest checkpoint of a run, with
the run's own settings, `--model=FOLDER` any model folder with the settings of `--config`. Settings change as in
trace_jax.main. It can be stopped at any time; the same command goes on with the prompts that are missing.

FOLDER gets rollouts-NAME.jsonl (a line for each finished prompt), results.json (figures) and results.md (tables).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trace_jax import config as config_lib
from trace_jax import config_arguments, config_checks
from trace_jax.config import ConfigError, RunConfig
from trace_jax.eval.benchmarks import PAPER_SAMPLES, unknown

# Fields of a run's config that say what its checkpoint holds, beside its model.path.
_OF_CHECKPOINT = ("lora", "model")
_FREE = ("model.path", "model.gguf_cache", "model.context_length", "model.dtype", "model.remat")
# Fields that decide no number of an evaluation.
_IDLE = ("concurrency", "accept_truncation_bias", "demo_difficulty", "train", "eval_sets", "categories")
_SEARCHED = ("train", "eval_sets")  # but where the records are what is searched


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, evaluates, and says how it ended."""
    parser = _parser()
    arguments, settings = parser.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax reports every file at INFO
    try:
        config, own = _configs(arguments, settings)
        config = _with_benchmarks(config, arguments.benchmarks)
        config_checks.check(_untrained(config))
    except ConfigError as error:
        _fail(error)
    from trace_jax import evaluation  # imports jax: after the settings, so that mistakes are fast
    from trace_jax.engines.base import EngineDown
    from trace_jax.train.checkpoint import CheckpointError

    try:
        evaluation.run(
            evaluation.Request(
                config=config,
                decisive=decisive(config),
                training=_searches_records(config),
                folder=arguments.folder.absolute(),
                workdir=arguments.workdir and arguments.workdir.absolute(),
                own=own,
                benchmarks=arguments.benchmarks,
                samples=arguments.samples,
                ks=arguments.k,
                prompts=arguments.prompts,
                seed=config.eval.seed if arguments.seed is None else arguments.seed,
            )
        )
    except (ConfigError, CheckpointError, EngineDown) as error:
        _fail(error)
    except KeyboardInterrupt:
        print("\nstopped before the first prompt; the same command starts again")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trace_jax.evaluate", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.error = _fail  # one line, without the usage
    add = parser.add_argument
    add("--config", help="config file; --config.NAME=VALUE as in trace_jax.main")
    add("--folder", type=Path, required=True, help="of the results")
    add("--workdir", type=Path, help="of a run: its newest checkpoint, with its own config")
    add("--model", help="model folder, a .gguf file or package:NAME, in place of the config's")
    add("--benchmarks", type=_names, help="with commas between; all of the task if not given")
    add("--samples", type=_count, help="of each prompt; the paper's number if not given, else config.eval.samples")
    add("--k", type=_counts, help="of pass@k, with commas between; 1 and the samples if not given")
    add("--prompts", type=_count, help="only the first of each benchmark; of generated questions, how many")
    add("--seed", type=_seed, help="of the sampling noise; config.eval.seed if not given")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names none")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part.strip()) for part in text.split(",")}))


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return int(text)


def _configs(arguments: argparse.Namespace, settings: Sequence[str]) -> tuple[RunConfig, RunConfig | None]:
    """(settings of the evaluation, those of the run in --workdir as they are)."""
    if arguments.workdir is not None:
        for flag in ("config", "model"):
            if getattr(arguments, flag) is not None:
                raise ConfigError(f"--workdir names a run, which has its own config and model; leave --{flag} out")
        own = config_arguments.of_run(arguments.workdir)
        config = config_arguments.with_settings(own, settings)
        _check_same_checkpoint(own, config)
        return config, own
    if arguments.config is None:
        raise ConfigError("give --config=configs/quickstart.py, or --workdir=FOLDER of a run")
    config = config_arguments.from_file(arguments.config, settings)
    if arguments.model is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=arguments.model))
    return config, None


def _check_same_checkpoint(own: RunConfig, config: RunConfig) -> None:
    """What is restored has the run's shape: such settings cannot be changed."""
    if own.model.path is None and config.task != own.task:
        raise ConfigError(f"--config.task is {config.task!r}, but this run's small model reads {own.task!r} only")
    for section in _OF_CHECKPOINT:
        for name, there in dataclasses.asdict(getattr(own, section)).items():
            field, here = f"{section}.{name}", getattr(getattr(config, section), name)
            if here != there and field not in _FREE:
                raise ConfigError(f"--config.{field} is {here!r}, but this run's checkpoint has {there!r}; leave it")


def _with_benchmarks(config: RunConfig, names: Sequence[str] | None) -> RunConfig:
    """The config with these data sets for evaluation and no others: only they have to be prepared.

    Not where the records of all sets are what is searched: what is found may not depend on which are asked.
    """
    known = PAPER_SAMPLES.get(config.task)
    if names is None or known is None or _searches_records(config):
        return config
    for name in names:
        if name not in known:
            raise ConfigError(unknown(name, known))
    family = getattr(config, config.task)
    if config.task == "bfcl":
        changed = {"categories": tuple(name.removeprefix("bfcl_") for name in names)}
    else:
        changed = {"eval_sets": tuple(names)}
    return dataclasses.replace(config, **{config.task: dataclasses.replace(family, **changed)})


def _searches_records(config: RunConfig) -> bool:
    """Whether the search tool looks through the paragraphs of the task's own records, those of training included."""
    return config.task == "multihop_qa" and config.multihop_qa.search_url is None


def _untrained(config: RunConfig) -> RunConfig:
    """The config as one that no loss is computed of: sampling from a part of the distribution biases nothing."""
    return dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, accept_truncation_bias=True))


def decisive(config: RunConfig) -> dict[str, Any]:
    """The settings that decide an evaluation's numbers, beside parameters, seed and samples: {"config.task": ...}."""
    idle = set(_IDLE) - set(_SEARCHED if _searches_records(config) else ())
    all_settings = config_lib.fingerprint(config)
    sections = ["sampling", config.task, *(["chat"] if config.task in config_checks.DATA_TASKS else [])]
    kept = {section: all_settings[section] for section in sections}
    kept["model"] = {name: all_settings["model"][name] for name in ("context_length", "dtype", "param_dtype")}
    flat = {
        f"config.{section}.{name}": value
        for section, values in kept.items()
        for name, value in values.items()
        if name not in idle
    }
    if config.task == "multihop_qa":  # a service may move; what it searches is its own affair
        flat["config.multihop_qa.search_url"] = None if _searches_records(config) else "of a service"
    return {"config.task": config.task, "config.engine": config.engine} | flat


def _fail(error: Exception | str) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
