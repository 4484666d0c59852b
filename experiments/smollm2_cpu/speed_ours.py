"""Our side of the speed comparison, in a process of its own: the run's engine and the run's update of the policy."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from experiments.smollm2_cpu.speed_cases import CLIP, CLIP_NORM, LEARNING_RATE, Case, advantages, tokens
from experiments.smollm2_cpu.speed_worker import serve
from trace_jax.engines.local import LocalEngine, LocalEngineConfig
from trace_jax.models import folder as model_folder
from trace_jax.objectives.policy import policy_loss
from trace_jax.train import optimizer as optimizers
from trace_jax.train import sharding
from trace_jax.train.policy_step import Plan, PolicyTrainer
from trace_jax.types import GenerateRequest, PackedBatch


def decoder(case: Case, folder: Path, settings: dict[str, int]) -> Callable[[], dict[str, float]]:
    """A function that decodes the case once with empty caches: seconds, and log-probs for the check of equality."""
    model = model_folder.load_config(folder)
    params = model_folder.load_params(folder, model)
    shapes = dict(case.engine) | settings
    config = LocalEngineConfig(slots=case.rows, cache_rows=case.rows, context_length=case.prompt + case.new, **shapes)
    engine, prompts = LocalEngine(model, config), tokens(case, model.vocab_size)

    async def decode(run: int) -> dict:
        await engine.set_weights(params, run)
        requests = [GenerateRequest(row, case.new, 1.0, (), (run, i)) for i, row in enumerate(prompts)]
        started = time.perf_counter()
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "tokens": np.stack([result.tokens for result in results]).tolist(),
            "logprobs": np.stack([result.logprobs for result in results]).tolist(),
        }

    runs = iter(range(1_000_000))
    return lambda: asyncio.run(decode(next(runs)))


def trainer(case: Case, folder: Path, settings: dict[str, int]) -> Callable[[], dict[str, float]]:
    """A function that takes one optimiser step on the case's rows: seconds, and the loss."""
    model = model_folder.load_config(folder, fuse_projections=True)
    adamw = optimizers.adamw(optimizers.constant(LEARNING_RATE), b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0)
    loss = functools.partial(policy_loss, clip_low=CLIP[0], clip_high=CLIP[1])
    update = PolicyTrainer(
        model,
        optimizers.build(adamw, clip_norm=CLIP_NORM, max_update_norm=None),
        loss,
        sharding.make_mesh(data=1, fsdp=1, tensor=1),
        temperature=1.0,
        rescore=False,
        # Whole rows at once: their logits are kept for the backward pass, as torch keeps them.
        **{"chunk": case.prompt + case.new, "micro_rows": min(case.rows, 16)} | settings,
    )
    batch = _batch(case, tokens(case, model.vocab_size))
    state = update.adopt(model_folder.load_params(folder, model))
    # The ratio is taken against the policy's own log-probs from before the first step.
    batch = _with_logprobs(batch, update.logprobs(state.params, batch))
    states, rng = [state], np.random.default_rng(0)

    def step() -> dict[str, float]:
        started = time.perf_counter()
        state, metrics = update.update(states.pop(), batch, Plan(), rng)
        jax.block_until_ready(state.params)
        seconds = time.perf_counter() - started
        states.append(state)
        return {"seconds": seconds, "loss": metrics["train/loss"], "grad_norm": metrics["train/grad_norm"]}

    return step


def _batch(case: Case, token_BT: np.ndarray) -> PackedBatch:
    rows, length = token_BT.shape
    pos_BT = np.broadcast_to(np.arange(length, dtype=np.int32), token_BT.shape)
    weight_BT = np.zeros(token_BT.shape, np.float32)
    weight_BT[:, case.prompt :] = 1.0 / (rows * case.new)
    adv_BT = weight_BT * advantages(case)[:, None]
    zeros = np.zeros_like(weight_BT)
    return PackedBatch(
        token=token_BT,
        pos=pos_BT,
        prev=pos_BT - 1,
        end=np.full_like(token_BT, length),
        is_action=weight_BT != 0,
        weight=weight_BT,
        adv_pos=np.maximum(adv_BT, 0),
        adv_neg=np.minimum(adv_BT, 0),
        old_logprob=zeros,
        behaviour_logprob=zeros,
        value_target=zeros,
        value_weight=zeros,
    )


def _with_logprobs(batch: PackedBatch, logprob_BT: np.ndarray) -> PackedBatch:
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return PackedBatch(**fields | {"old_logprob": logprob_BT, "behaviour_logprob": logprob_BT})


if __name__ == "__main__":
    serve({"decode": decoder, "train": trainer})
