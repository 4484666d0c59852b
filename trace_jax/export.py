"""Writes a run's policy as a model folder: `python -m trace_jax.export --workdir=runs/x --folder=models/x`.

The newest checkpoint of the workdir, adapters merged, with the tokenizer beside it: what transformers and inference
servers load, and what `--config.model.path` starts from.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
from pathlib import Path

from trace_jax import config_arguments
from trace_jax.config import ConfigError, MeshConfig


def export(workdir: Path, folder: Path, dtype: str) -> int:
    """Writes the policy of the newest checkpoint and returns its step.

    One device is enough, whatever the run's mesh; the task's data and tools are not needed.

    Raises ConfigError for a workdir without a run, a base model that is gone, or a folder that holds a model;
    CheckpointError for a damaged checkpoint.
    """
    from trace_jax import assemble, saving  # these import jax: after the arguments, so that mistakes are fast
    from trace_jax.models import folder as model_folder
    from trace_jax.tasks.tokenizer import save_tokenizer

    if (folder / "config.json").exists():
        raise ConfigError(f"--folder: {folder} holds a model already; choose another folder")
    config = config_arguments.of_run(workdir)
    with contextlib.closing(saving.open_checkpoints(config, workdir / "checkpoints")) as checkpoints:
        if checkpoints.latest_step() is None:
            raise ConfigError(f"--workdir: {workdir} holds no checkpoint yet; train first")
        parts = assemble.prepare_policy(dataclasses.replace(config, mesh=MeshConfig()))
        params, step = assemble.restored_policy(parts, workdir, checkpoints)
    start = parts.config.model.path
    token_ids = model_folder.load_token_ids(start) if start else None
    save_tokenizer(parts.tokenizer, folder)
    model_folder.save(folder, parts.trainer.model, params, dtype=dtype, token_ids=token_ids)
    return step


def main() -> None:
    """Parses the command line, exports, and says where to."""
    parser = argparse.ArgumentParser(prog="python -m trace_jax.export", description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--folder", type=Path, required=True, help="model folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the files")
    arguments = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax reports every file at INFO
    from trace_jax.train.checkpoint import CheckpointError

    try:
        step = export(arguments.workdir.absolute(), arguments.folder.absolute(), arguments.dtype)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"policy of step {step} written to {arguments.folder}")


if __name__ == "__main__":
    main()
