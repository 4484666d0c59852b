"""Writes a run's policy as a model folder: `python -m trace_jax.export --workdir=runs/x --folder=models/x`.

The newest checkpoint of the workdir, adapters merged, with the tokenizer beside it: what transformers and inference
servers load, and what `--config.model.path` starts from.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
_FOLDER = flags.DEFINE_string("folder", None, "Model folder to write.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the files.")


def export(workdir: Path, folder: Path, dtype: str) -> int:
    """Writes the policy of the newest checkpoint and returns its step.

    Raises ConfigError for a workdir without a run or a folder that holds a model, CheckpointError for a damaged one.
    """
    from trace_jax import config as config_lib
    from trace_jax import saving, setup_run
    from trace_jax.assemble import assemble
    from trace_jax.models import folder as model_folder
    from trace_jax.tasks.tokenizer import save_tokenizer

    if (folder / "config.json").exists():
        raise config_lib.ConfigError(f"--folder: {folder} holds a model already; choose another folder")
    try:
        config = config_lib.from_json((workdir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise config_lib.ConfigError(f"--workdir: {workdir} holds no run that can be read ({error})") from error
    checkpoints = saving.open_checkpoints(config, workdir / "checkpoints")
    try:
        if checkpoints.latest_step() is None:
            raise config_lib.ConfigError(f"--workdir: {workdir} holds no checkpoint yet; train first")
        run = assemble(config, workdir)
        saving.restore(run, checkpoints)
    finally:
        checkpoints.close()
    params = run.trainer.full_params(run.policy.params)
    start = run.config.model.path
    token_ids = model_folder.load_token_ids(start) if start else None
    model_folder.save(folder, run.trainer.model, params, dtype=dtype, token_ids=token_ids)
    save_tokenizer(setup_run.make_tokenizer(run.config, run.environment.task), folder)
    return run.step


def main(argv: list[str]) -> None:
    """Exports, and says where to."""
    if len(argv) > 1:
        _fail(f"{argv[1]!r} is not a flag; give --workdir=RUN and --folder=MODEL")
    logging.set_verbosity(logging.WARNING)
    from trace_jax.config import ConfigError
    from trace_jax.train.checkpoint import CheckpointError

    try:
        step = export(Path(_WORKDIR.value).absolute(), Path(_FOLDER.value).absolute(), _DTYPE.value)
    except (ConfigError, CheckpointError, OSError) as error:
        _fail(str(error))
    print(f"policy of step {step} written to {_FOLDER.value}")


def _fail(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    app.run(main)
