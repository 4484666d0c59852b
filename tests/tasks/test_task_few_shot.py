"""Few-shot wrapping against a transcript written by hand; borders of blocks against tokenizers that break them."""

import ast
import operator

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from trace_jax.tasks import base, few_shot
from trace_jax.tasks.arithmetic.task import Arithmetic
from trace_jax.tasks.demonstrations import demonstrate
from trace_jax.tasks.few_shot import FewShot, check_borders
from trace_jax.tasks.lookup.task import Lookup

ARITHMETIC = Arithmetic(0, {1: 1.0, 2: 1.0})
SHOTS = {"1": 1, "2": 2}


def test_an_episode_is_the_tasks_own_with_labels():
    task = FewShot(ARITHMETIC, ARITHMETIC, SHOTS)
    bare, wrapped = ARITHMETIC.instance("train", 3), task.instance("train", 3)
    assert (wrapped.uid, wrapped.state, wrapped.group) == (bare.uid, bare.state, bare.group)
    assert wrapped.text == f"{task.preamble}Question: {bare.text}"
    state, own = wrapped.state, bare.state
    for _ in range(4):
        action, plain = task.expert(state), ARITHMETIC.expert(own)
        label = "Answer: " if plain.startswith("=") else "Step: "
        assert action == label + plain.removeprefix("=")
        result, expected = task.step(state, action), ARITHMETIC.step(own, plain)
        assert result.state == expected.state
        assert result.observation == (f"Result: {expected.observation}" if expected.observation else "")
        state, own = result.state, expected.state
        if result.done:
            break
    assert task.score(state) == base.Outcome(1.0, 1.0)


def value(node):
    """A parsed expression by recursion, without modulus on the way."""
    if isinstance(node, ast.Constant):
        return node.value
    apply = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}[type(node.op)]
    return apply(value(node.left), value(node.right))


def test_the_preamble_is_solved_examples_of_the_asked_classes():
    task = FewShot(ARITHMETIC, ARITHMETIC, SHOTS)
    blocks = task.preamble.split("Question: ")[1:]
    operations = [sum(question.splitlines()[0].count(sign) for sign in "+-*") for question in blocks]
    assert operations == [1, 2, 2]
    for block in blocks:
        question, *lines = block.splitlines()
        assert lines[-1].startswith("Answer: ")
        assert value(ast.parse(question, mode="eval").body) % 100 == int(lines[-1].removeprefix("Answer: "))
        assert len(lines) == 2 * sum(question.count(sign) for sign in "+-*") + 1
    assert not any(
        base.owner(block.splitlines()[0] + "\n") != "demo" for block in blocks
    )  # no example is a question of training or evaluation


def test_lines_without_labels_reach_the_task_as_they_are():
    task = FewShot(ARITHMETIC, ARITHMETIC, {"1": 1})
    state = task.instance("train", 0).state
    assert task.step(state, "1+2\n").observation == "Result: 3\n"
    assert task.step(state, "nonsense\n").observation == "Result: ?\n"
    assert task.step(state, "Step: 1+2").observation == "Result: 3\n"


@pytest.mark.parametrize("inner", [ARITHMETIC, Lookup(0, {1: 1.0, 2: 1.0})], ids=lambda task: task.name)
def test_symbols_cover_all_that_is_ever_written(inner):
    """Preamble, questions, right and wrong actions, observations; sorted, single characters, each once."""
    task = FewShot(inner, inner, SHOTS)
    symbols = task.symbols()
    assert list(symbols) == sorted(set(symbols)) and {len(symbol) for symbol in symbols} == {1}
    seen = set(task.preamble)
    for index in range(60):
        for slip_rate in (0.0, 0.5):
            instance = task.instance("train", index)
            played = demonstrate(task, instance, np.random.default_rng(index), slip_rate=slip_rate)
            seen |= set(instance.text).union(*(set(text) for turn in played.turns for text in turn))
    seen |= set(task.step(task.instance("train", 0).state, "nonsense\n").observation)
    assert seen <= set(symbols)
    unlabelled = set("".join(inner.symbols()))
    assert set(symbols) >= unlabelled and set(symbols) - unlabelled  # the labels' letters are what comes on top


def test_slips_are_labelled_too():
    task = FewShot(ARITHMETIC, ARITHMETIC, {"1": 1})
    played = demonstrate(task, task.instance("demo", 5), np.random.default_rng(0), slip_rate=1.0)
    assert played.turns[0][0].startswith("Step: ") and played.outcome.success == 0.0


def test_lookup_keeps_its_verbs():
    lookup = Lookup(0, {1: 1.0})
    task = FewShot(lookup, lookup, {"1": 2})
    state = task.instance("train", 0).state
    action = task.expert(state)
    result = task.step(state, action)
    assert result.tool_calls == 1 and result.observation.startswith("Result: ")
    end = task.step(result.state, task.expert(result.state))
    assert end.done and task.score(end.state).success == 1.0


@pytest.mark.parametrize(
    ("shots", "message"),
    [({"1": -1}, "-1 examples of difficulty 1"), ({"3": 1}, "no 1 examples of difficulty 3")],
)
def test_bad_counts_are_named(shots, message, monkeypatch):
    monkeypatch.setattr(few_shot, "_MOST_TRIES", 20)
    with pytest.raises(ValueError, match=message):
        FewShot(ARITHMETIC, ARITHMETIC, shots)


def pair_merging_tokenizer():
    """Bytes, and the pair "><" as one token: the border of `</tool>` and `<result>` disappears in it."""
    vocabulary = {character: i for i, character in enumerate("</>abc\n")}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "><": len(vocabulary)}, [(">", "<")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    return lambda text: np.array(tokenizer.encode(text).ids, np.int32)


def test_borders_that_a_tokenizer_merges_are_named():
    encode = pair_merging_tokenizer()
    check_borders(encode, ["<a>\n", "<b>\n", "c"])
    with pytest.raises(ValueError, match="border between '<a>' and '<b>"):
        check_borders(encode, ["<a>", "<b>\n"])
