"""Tasks of public data sets from settings: what is left out is counted, and training takes records in epochs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.tasks.chat_tokenizer import chat_tokenizer
from tests.tiny_run import settings
from trace_jax.config import ConfigError
from trace_jax.data.prepare import prepare
from trace_jax.loop import Run
from trace_jax.rollout.environment import make_environment
from trace_jax.setup_data_tasks import make_chat
from trace_jax.setup_run import make_limits

LONG = "Which river " + "of the old land " * 40 + "is longest?"


def hotpotqa(name, question):
    """A record in the official format."""
    fields = {"_id": name, "question": question, "answer": "yes", "type": "bridge", "level": "hard"}
    return fields | {"context": [["T", [f"{name}."]]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three training records and one that is too long; of evaluation records one of two sets has such a one too."""
    place = tmp_path_factory.mktemp("sets")
    train = [hotpotqa(f"t{i}", f"Is it {i}?") for i in range(3)] + [hotpotqa("long", LONG)]
    (place / "hotpot_train_v1.1.json").write_text(json.dumps(train))
    (place / "hotpot_dev_distractor_v1.json").write_text(json.dumps([hotpotqa("e0", "Who?"), hotpotqa("e1", LONG)]))
    (place / "bamboogle.json").write_text(json.dumps([{"Question": "Who?", "answer": ["x"], "id": "b0"}]))
    for name in ("hotpotqa", "bamboogle"):
        prepare(name, place, data_dir=place, show_progress=False)
    return place


def config(folder, **changes):
    """Questions whose prompts may have as many tokens as a short one needs; no search is ever made."""
    names = {"eval_sets": ("hotpotqa", "bamboogle"), "search_url": "http://127.0.0.1:9"}
    lengths = {"chat.max_prompt_tokens": 1200, "model.context_length": 1400, "loss.row_length": 1400}
    chosen = {"task": "multihop_qa", "data.folder": str(folder), "model.path": "elsewhere"}
    return settings(chosen | {f"multihop_qa.{name}": value for name, value in names.items()} | lengths | changes)


def run(config):
    """A run in which nothing but prompts can be asked for."""
    task = make_chat(config, chat_tokenizer())
    parts = dict.fromkeys(("engine", "trainer", "reference", "policy", "learned"))
    return Run(config, make_environment(task, chat_tokenizer()), make_limits(config, task), **parts)


def seen(prompts):
    """(uid, tokens) of each prompt."""
    return [(prompt.uid, prompt.tokens.tobytes()) for prompt in prompts]


def test_records_with_long_prompts_are_counted(folder, capsys):
    task = make_chat(config(folder), chat_tokenizer(), training=False)
    assert task.benchmarks() == {"hotpotqa": (0,), "bamboogle": (1,)}
    assert task.too_long() == {"hotpotqa": 1, "bamboogle": 0}
    told = "hotpotqa: 1 of 2 records are left out, their prompts are longer than chat.max_prompt_tokens 1200\n"
    assert capsys.readouterr().out == told
    with pytest.raises(ConfigError, match="no record of data set hotpotqa can be used; raise chat.max_prompt_tokens"):
        make_chat(config(folder, **{"chat.max_prompt_tokens": 50}), chat_tokenizer(), training=False)


def test_a_pool_may_be_larger_than_what_an_epoch_has_left(folder):
    """Seven prompts a step from three records: unique in the step, each record once an epoch."""
    prompts = run(config(folder)).training_prompts(63, 0)
    uids = [prompt.uid for prompt in prompts]
    assert all(len(set(uids[start : start + 7])) == 7 for start in range(0, 63, 7))
    orders = set()
    for epoch in range(21):
        own = uids[3 * epoch : 3 * epoch + 3]
        assert sorted(own) == [f"multihop_qa/hotpotqa/t{i}/{epoch}" for i in range(3)]
        orders.add(tuple(uid.split("/")[2] for uid in own))
    assert len(orders) > 3


@pytest.mark.parametrize("cursor", [1, 3, 7, 9])
def test_training_goes_on_bit_by_bit_within_an_epoch_and_at_its_edge(folder, cursor):
    straight = seen(run(config(folder)).training_prompts(16, 0))
    assert seen(run(config(folder)).training_prompts(16 - cursor, cursor)) == straight[cursor:]


def test_seeds_have_orders_of_their_own(folder):
    def order(**changes):
        return [prompt.uid.split("/")[2] for prompt in run(config(folder, **changes)).training_prompts(12, 0)]

    assert order() == order() and order(seed=1) != order() != order(**{"data.seed": 1})
    assert np.unique(order(seed=5)).tolist() == ["t0", "t1", "t2"]
