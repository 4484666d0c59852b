"""A chat family as a task: prompts, turns and splits by hand, and an expert that is played to the end."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.tasks.chat_tokenizer import SPECIAL, chat_tokenizer
from tests.tasks.toy_family import Sum, Sums
from trace_jax.rollout.environment import make_environment
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.tasks.base import Outcome
from trace_jax.tasks.chat.formats import load_format
from trace_jax.tasks.chat.records import Records, data_set
from trace_jax.tasks.chat.render import Renderer
from trace_jax.tasks.chat.task import Chat, opening
from trace_jax.tasks.demonstrations import demonstrate
from trace_jax.tasks.few_shot import check_borders

TRAIN = [{"id": f"t{i}", "x": i, "y": 1} for i in range(4)]
EASY = [{"id": f"e{i}", "x": i, "y": 10} for i in range(3)]
HARD = [{"id": "h0", "x": 100, "y": 10}]
ORDER = [2, 0, 3, 1, 1, 2, 3, 0]  # of two epochs
SYSTEM = "<|im_start|>system\nAdd.\n\n# Tools"


def records(train=TRAIN):
    return Records(data_set("train_sums", train), (data_set("easy", EASY), data_set("hard", HARD)), ORDER)


@functools.cache
def renderer(name="qwen3"):
    return Renderer(load_format(name), thinking=True, markers=SPECIAL)


def chat(shots=0, preamble="", name="qwen3"):
    return Chat(Sums(), renderer(name), records(), shots=shots, preamble=preamble)


def test_prompts_are_the_system_message_the_examples_and_the_question():
    task = chat()
    instance = task.instance("train", 0)
    assert instance.text.startswith(SYSTEM) and instance.text.endswith("user\n2 + 1?<|im_end|>\n<|im_start|>assistant\n")
    assert instance.state == Sum(2, 1)
    examples = """<|im_start|>user
2 + 3?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "add", "arguments": {"x": 2, "y": 3}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
5
</tool_response><|im_end|>
<|im_start|>assistant
5<|im_end|>
"""
    question, begin, end = opening(Sums(), renderer(), TRAIN[2], 1)
    assert begin == instance.text.partition("<|im_start|>user")[0] + examples + "<|im_start|>user\n"
    assert begin + end == chat(1).instance("train", 0).text and question.group == "even"
    with pytest.raises(ValueError, match="sums has 2 solved conversations, not 3"):
        opening(Sums(), renderer(), TRAIN[2], 3)


def test_what_all_prompts_begin_with_is_tokenised_once():
    begins = {opening(Sums(), renderer(), record, 2)[1] for record in (*TRAIN, *EASY, *HARD)}
    (begin,) = begins
    environment = make_environment(chat(2, begin), chat_tokenizer())
    prompt = environment.prompt(environment.task.instance("eval", 3))
    assert environment.trunk.size > 100 and np.array_equal(prompt.tokens[: environment.trunk.size], environment.trunk)
    assert environment.decode(prompt.tokens) == chat(2).instance("eval", 3).text


def test_the_splits():
    task = chat()
    instances = [task.instance("train", i) for i in range(8)]
    assert [i.uid for i in instances] == [f"sums/train_sums/t{n}/{e // 4}" for e, n in enumerate(ORDER)]
    assert [i.group for i in instances[:4]] == ["even", "even", "odd", "odd"]
    # the evaluation sets by turns
    held_out = [task.instance("eval", i) for i in range(4)]
    assert [i.uid for i in held_out] == ["sums/easy/e0", "sums/hard/h0", "sums/easy/e1", "sums/easy/e2"]
    assert [i.group for i in held_out] == ["easy", "hard", "easy", "easy"]
    assert task.benchmarks() == {"easy": (0, 2, 3), "hard": (1,)} and task.too_long() == {"easy": 0, "hard": 0}
    assert (task.size("train"), task.size("eval")) == (None, 4)
    assert task.instance("demo", 5).uid == "sums/demo/t1"
    for split, index, message in [
        ("eval", 4, "index of the eval split is 4, but it has 4 records"),
        ("train", -1, "index of the train split is -1, must be at least 0"),
        ("test", 0, "split is 'test', must be train, eval or demo"),
    ]:
        with pytest.raises(ValueError, match=message):
            task.instance(split, index)


def test_records_that_do_not_fit_are_left_out():
    small = data_set("train_sums", TRAIN).where(lambda record: record["x"] % 2)
    assert len(small) == 2 and [record["id"] for record in small] == ["t1", "t3"]
    assert [record["id"] for record in small.where(lambda record: record["x"] > 1)] == ["t3"]
    with pytest.raises(ValueError, match="no record of data set train_sums can be used; raise chat.max_prompt_tokens"):
        Records(small.where(lambda record: False), (), ORDER)


def test_a_turn_with_calls_and_the_answer():
    task, state = chat(), Sum(1, 2)
    action = (
        '<tool_call>{"name": "add", "arguments": {"x": 1, "y": 2}}</tool_call><tool_call>{"name": "sub", "arguments": '
        "{}}</tool_call><tool_call>oops</tool_call><|im_end|>"
    )
    result = task.step(state, action)
    assert result.state == Sum(1, 2, (3,)) and state == Sum(1, 2)
    assert (result.done, result.tool_calls, result.failed_calls) == (False, 1, 2)
    assert result.observation.startswith("\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nthere")
    assert result.observation.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
    final = task.step(result.state, "3<|im_end|>")
    assert (final.observation, final.done, final.state.answer) == ("", True, "3")
    assert task.score(final.state) == Outcome(1.0, 1.0)
    assert task.score(task.step(state, "7").state) == Outcome(0.5, 0.0)  # without the stop: cut off by another end


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_an_expert_plays_to_the_end_within_token_borders(name):
    task = chat(1, name=name)
    for index in range(4):
        instance = task.instance("demo", index)
        played = demonstrate(task, instance, np.random.default_rng(0), slip_rate=0.5)
        assert played.outcome == Outcome(1.0, 1.0) and len(played.turns) == 2
        assert all(action.endswith(task.stop) for action, _ in played.turns)
        blocks = [played.prompt, *(block for turn in played.turns for block in turn if block)]
        check_borders(functools.partial(tokenizers.encode, chat_tokenizer()), blocks)


def test_a_long_observation_is_cut_but_ends_as_the_format_does():
    environment = make_environment(chat(), chat_tokenizer())
    text = chat().step(Sum(1, 2), '<tool_call>{"name": "%s", "arguments": {}}</tool_call>' % ("x" * 400)).observation
    ids = environment.observation(text, 64)
    whole = environment.decode(ids)
    assert ids.size == 64 and whole.startswith("\n<|im_start|>user\n<tool_response>\nthere is no xxx")
    assert whole.endswith("x\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
