"""A small policy learns a task's format from scripted demonstrations, before any reinforcement.

The result is cached as a model folder beside a record of the settings that made it; a run with the same settings finds
it there and starts at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trace_jax.models.config import DecoderConfig
from trace_jax.objectives.supervised import supervised_loss
from trace_jax.tasks.base import Task
from trace_jax.tasks.demonstrations import Demonstration, demonstrate
from trace_jax.train import optimizer as optimizers
from trace_jax.train.policy_step import Plan, PolicyTrainer
from trace_jax.tree import grow, pack
from trace_jax.tree.credit import Credit
from trace_jax.types import Finish, PackedBatch, Prompt, RolloutTree, Stage, Turn

_RECORD = "warm_start.json"
_LOGIT_CHUNK = 512  # positions of a row whose logits exist at once; those of a large vocabulary are large
Encode = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Settings of the supervised training."""

    steps: int
    demonstrations: int  # per optimiser step
    distinct: int  # demonstrations generated; each is seen steps * demonstrations / distinct times on average
    slip_rate: float
    learning_rate: float  # peak of a warm-up and cosine schedule of AdamW
    row_length: int  # tokens
    micro_rows: int
    seed: int


def cached(folder: Path, record: dict[str, Any]) -> bool:
    """Whether the folder holds a warm start that was made with exactly these settings."""
    try:
        return json.loads((folder / _RECORD).read_text()) == json.loads(json.dumps(record))
    except (OSError, ValueError):
        return False


def begin(folder: Path) -> None:
    """Makes the folder, and drops the record of what it holds before that changes: no record outlives its model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RECORD).unlink(missing_ok=True)


def mark(folder: Path, record: dict[str, Any]) -> None:
    """Says that the folder's model was made with these settings; written last, so a killed warm start is made again."""
    (folder / _RECORD).write_text(json.dumps(record, indent=2))


def train(
    model: DecoderConfig,
    mesh: Mesh,
    task: Task,
    encode: Encode,
    settings: WarmStart,
    on_step: Callable[[int, float], None] = lambda step, nll: None,
    *,
    observe: Encode | None = None,
    start: Any = None,
) -> Any:
    """Parameters after `settings.steps` optimiser steps of maximum likelihood on demonstrated actions.

    From the parameters `start`, or from random ones. `observe` tokenises observations, cut as those of a rollout; None:
    `encode`, which cuts nothing. What all prompts begin with stands once in a row, not once a demonstration. Calls
    `on_step(step, nats per action token)` after each step. Raises ValueError for a demonstration longer than a row.
    """
    schedule = optimizers.warmup_cosine(
        settings.learning_rate,
        warmup_steps=min(20, settings.steps // 2),
        total_steps=max(settings.steps, 1),
        final_fraction=0.05,
    )
    adamw = optimizers.adamw(schedule, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.0)
    trainer = PolicyTrainer(
        model,
        optimizers.build(adamw, clip_norm=1.0, max_update_norm=None),
        supervised_loss,
        mesh,
        temperature=1.0,
        chunk=min(settings.row_length, _LOGIT_CHUNK),
        micro_rows=settings.micro_rows,
        rescore=False,
    )
    rng = np.random.default_rng(settings.seed)
    played = (demonstrate(task, task.instance("demo", i), rng, settings.slip_rate) for i in range(settings.distinct))
    trees = [demonstration_tree(encode, each, f"demo/{i}", task.preamble, observe) for i, each in enumerate(played)]
    trunk = encode(task.preamble)
    longest = max(trees, key=lambda tree: tree.token.size)
    if longest.token.size > settings.row_length:
        raise ValueError(
            f"demonstration {longest.prompt_uid} has {longest.token.size} tokens, but row_length is "
            f"{settings.row_length}; lengthen the rows or lower demo_difficulty"
        )
    state = trainer.init(jax.random.key(settings.seed)) if start is None else trainer.adopt(start)
    for step in range(settings.steps):
        chosen = rng.choice(len(trees), min(settings.demonstrations, len(trees)), replace=False)
        batch = demonstration_batch([trees[i] for i in chosen], settings.row_length, settings.micro_rows, trunk)
        state, metrics = trainer.update(state, batch, Plan(), rng)
        on_step(step, metrics["train/nll"])
    return state.params


def demonstration_tree(
    encode: Encode, demonstration: Demonstration, uid: str, preamble: str = "", observe: Encode | None = None
) -> RolloutTree:
    """A demonstration as a tree of one path; its actions count as sampled with log-prob 0.

    `preamble`, the beginning of its prompt, is tokenised by itself, observations by `observe`, if it is given.
    """
    observe = observe or encode
    tokens = [encode(preamble), encode(demonstration.prompt.removeprefix(preamble))]
    prompt = Prompt(uid=uid, tokens=np.concatenate(tokens), state=None)
    last = len(demonstration.turns) - 1
    turns = []
    for i, (action, observation) in enumerate(demonstration.turns):
        tokens = encode(action)
        ends = i == last
        turns.append(
            Turn(
                action=tokens,
                logprobs=np.zeros(tokens.shape[0], np.float32),
                observation=np.zeros(0, np.int32) if ends else observe(observation),
                finish=Finish.ANSWER if ends else Finish.TURN,
                weight_version=0,
                reward=demonstration.outcome.reward if ends else None,
                success=demonstration.outcome.success if ends else None,
            )
        )
    return grow.add_rollouts(grow.new_tree(prompt), [(0, Stage.ROOT_ROLLOUT, turns)])


def demonstration_batch(
    trees: Sequence[RolloutTree], row_length: int, rows_multiple: int, trunk: np.ndarray = pack.NO_TRUNK
) -> PackedBatch:
    """Rows in which every action token of every demonstration weighs the same; the weights sum to one.

    `trunk`, which every prompt begins with, stands once in a row.
    """
    actions = sum(int(tree.is_action.sum()) for tree in trees)
    credits = [_imitate(tree) for tree in trees]
    weights = [np.full(credit.node.shape, 1 / actions, np.float32) for credit in credits]
    return pack.pack_paths(
        trees,
        credits,
        weights,
        row_length=row_length,
        rows_multiple=rows_multiple,
        skip_untrained=False,
        trunk=trunk,
    )


def _imitate(tree: RolloutTree) -> Credit:
    nodes = np.arange(1, tree.num_nodes, dtype=np.int32)
    return Credit(
        leaf=np.full(nodes.shape, tree.num_nodes - 1, np.int32),
        node=nodes,
        sequence=np.zeros(nodes.shape, np.int32),
        advantage=np.ones(nodes.shape, np.float32),
    )

