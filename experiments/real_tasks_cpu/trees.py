"""The rollout trees of a tiny run's first step, as numbers: sampled anew, with the same noise, from its warm start.

    python -m experiments.real_tasks_cpu.trees --task=math --workdir=runs/experiments/real_tasks_cpu --out=trees.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from experiments.real_tasks_cpu import tiny
from experiments.runs import ROOT
from trace_jax import loop
from trace_jax.assemble import assemble
from trace_jax.loop import Run
from trace_jax.types import Finish, NodeKind, RolloutTree, Stage

CALL = "<tool_call>"  # how a call begins in the format of these runs


def main() -> None:
    """Parses the command line, samples, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=tiny.TASKS, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    run = assemble(tiny.config(arguments.workdir, arguments.task), ROOT / arguments.workdir / f"{arguments.task}-trees")
    trees = asyncio.run(sample(run))
    lines = ",\n ".join(json.dumps(describe(run, tree)) for tree in trees)
    arguments.out.write_text(f"[{lines}]\n")


async def sample(run: Run) -> list[RolloutTree]:
    """The trees of the first step."""
    await loop.publish(run)
    gathered = await loop.gather(run, 0, 0)
    await run.engine.close()
    return gathered.trees


def describe(run: Run, tree: RolloutTree) -> dict[str, Any]:
    """Nodes without a word of their texts: parents, how each came about and ended, whether it holds a call."""
    texts = [
        run.environment.decode(tree.token[begin:end][tree.is_action[begin:end]])
        for begin, end in zip(tree.offset[:-1], tree.offset[1:])
    ]
    leaf = tree.kind == NodeKind.LEAF
    return {
        "prompt": tree.prompt_uid,
        "parent": tree.parent.tolist(),
        "stage": [Stage(s).name for s in tree.stage],
        "finish": [Finish(f).name for f in tree.finish],
        "call": [CALL in text for text in texts],
        "tokens": tree.action_counts().tolist(),
        "success": [float(s) if end else None for s, end in zip(tree.success, leaf)],
    }


if __name__ == "__main__":
    main()
