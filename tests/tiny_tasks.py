"""The task families of public data sets at a size that takes seconds: records by hand, a policy of a few thousand
parameters that has seen the expert's turns often enough to make calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from tests import tiny_config
from tests.tasks.chat_tokenizer import train_tokenizer
from trace_jax import config_checks
from trace_jax import config as config_lib
from trace_jax.config import RunConfig
from trace_jax.data import prepare
from trace_jax.models import decoder
from trace_jax.models import folder as model_folder
from trace_jax.models.config import DecoderConfig
from trace_jax.tasks.chat.formats import load_format
from trace_jax.tasks.math import family as math
from trace_jax.tasks.math import tool
from trace_jax.tasks.multihop_qa import prompts
from trace_jax.tasks.multihop_qa import tool as search_tool
from trace_jax.tasks.tokenizer import save_tokenizer, vocabulary_size

MATH = [{"problem": f"What is ${a} + {a}$?", "answer": str(2 * a), "difficulty": a % 2} for a in range(1, 13)]
COLOURS = ["red", "blue", "green", "black"]


# The entries with the fewest functions; their prompts are long all the same.
BFCL = {
    "bfcl.categories": ("base",), "chat.max_prompt_tokens": 2600, "model.context_length": 3072, "loss.row_length": 3584,
    "bfcl.max_turns": 6, "warm_start.distinct": 2, "warm_start.demonstrations": 1, "warm_start.steps": 30,
    "local.cache_rows": 40,
}  # fmt: skip


def _question(i: int) -> dict[str, Any]:
    colour = COLOURS[i % 4]
    context = [[f"House {i}", [f"House {i} stands in town {i}."]], [f"Town {i}", [f"Town {i} has {colour} roofs."]]]
    return {
        "_id": f"q{i}", "question": f"Which colour has the roof of house {i}?", "answer": colour, "type": "bridge",
        "level": "easy", "supporting_facts": [[f"House {i}", 0]], "context": context,
    }  # fmt: skip


def prepare_data(folder: Path) -> Path:
    """Prepares deepscaler, math500 and hotpotqa from files that are written by hand; returns where."""
    raw, out = folder / "raw", folder / "data"
    raw.mkdir(parents=True)
    files = {
        "deepscaler.json": ("deepscaler", MATH),
        "math500.json": ("math500", MATH[:4]),
        "hotpot_train_v1.1.json": ("hotpotqa", [_question(i) for i in range(12)]),
        "hotpot_dev_distractor_v1.json": ("hotpotqa", [_question(i) for i in range(12, 16)]),
    }
    for name, (_, rows) in files.items():
        (raw / name).write_text(json.dumps(rows))
    for name, path in (("deepscaler", raw / "deepscaler.json"), ("math500", raw / "math500.json"), ("hotpotqa", raw)):
        prepare.prepare(name, out, data_dir=path)
    return out


def make_policy(folder: Path, *, documents: str = "") -> Path:
    """A random policy of Qwen3's architecture, and a tokenizer that knows the prompts' words, as a model folder.

    `documents`: of functions that prompts will show.
    """
    form = load_format("qwen3").template.replace("\\n", "\n")
    schemas = (tool.schema(12.0), search_tool.SCHEMA)
    texts = [form, math.SYSTEM, prompts.SYSTEM, *map(json.dumps, schemas), "".join(map(str, range(100)))]
    texts.append(documents)
    tokenizer = train_tokenizer([*texts, *texts], 1600)
    cfg = DecoderConfig(
        vocab_size=vocabulary_size(tokenizer), hidden_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=24,
        mlp_size=64, max_positions=4096,
    )  # fmt: skip
    model_folder.save(folder, cfg, jax.device_get(decoder.init_params(cfg, jax.random.key(0))))
    save_tokenizer(tokenizer, folder)
    return folder


def settings(task: str, model: Path, data: Path, **changes: Any) -> RunConfig:
    """Two steps of the task."""
    config = tiny_config.get_config()
    config.task, config.steps = task, 2
    config.model.path, config.data.folder = str(model), str(data)
    config.chat.update(thinking=True, max_prompt_tokens=512)
    config.model.context_length, config.loss.row_length = 768, 1024
    config.math.update(eval_sets=("math500",), python_workers=2, check_workers=1)
    config.multihop_qa.eval_sets = ("hotpotqa",)
    config.sampling.update(max_turn_tokens=96, max_observation_tokens=128, concurrency=16)
    config.local.update(slots=16, cache_rows=48, prefill_rows=4, prefill_chunk=32, decode_steps=8)
    config.budget.update(pool=4, roots=8, rollouts_per_prompt=2)
    config.loss.update(micro_rows=1, logit_chunk=128)
    config.warm_start.update(pretrained=True, steps=60, demonstrations=4, distinct=12, micro_rows=1, learning_rate=1e-2)
    config.predictor.batch_rows = 1
    config.eval.update(prompts=4, samples=1, every=0)
    config.update_from_flattened_dict(changes)
    return config_checks.check(config_lib.parse(config))
