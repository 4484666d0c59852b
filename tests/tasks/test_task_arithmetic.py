import ast
import operator

import numpy as np
import pytest

from trace_jax.tasks import base
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.tasks.arithmetic import expression as expressions
from trace_jax.tasks.arithmetic.expression import Operation
from trace_jax.tasks.arithmetic.task import MAX_OPERATIONS, Arithmetic, ArithmeticState

TASK = Arithmetic(seed=0, difficulty={n: 1.0 for n in range(1, 9)})
TREE = Operation("*", Operation("+", 12, 7), Operation("-", 3, 4))  # (12+7)*(3-4)


def python_value(text):
    """The value modulo 100 by Python's own parser: an oracle that shares no code with the tree."""
    apply = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        return apply[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text.strip(), mode="eval").body) % 100


def operations_of(text):
    return sum(text.count(symbol) for symbol in "+-*")


# --- expressions


def test_write_and_evaluate_by_hand():
    # 12 + 7 = 19, 3 - 4 = -1 = 99 mod 100, 19 * 99 = 1881 = 81 mod 100
    assert expressions.write(TREE) == "((12+7)*(3-4))"
    assert expressions.evaluate(TREE) == 81
    assert expressions.leaves(TREE) == [12, 7, 3, 4]
    assert (expressions.write(5), expressions.evaluate(5), expressions.leaves(5)) == ("5", 5, [5])


def test_next_operation_by_hand():
    assert expressions.next_operation(TREE, []) == (12, "+", 7)
    assert expressions.next_operation(TREE, [19]) == (3, "-", 4)
    assert expressions.next_operation(TREE, [19, 99]) == (19, "*", 99)
    assert expressions.next_operation(TREE, [19, 99, 81]) is None
    assert expressions.next_operation(TREE, [50, 60]) == (50, "*", 60)  # wrong results are gone on with
    chain = Operation("-", 9, Operation("+", 1, Operation("*", 2, 3)))
    assert [expressions.next_operation(chain, results) for results in ([], [6], [6, 7])] == [
        (2, "*", 3),
        (1, "+", 6),
        (9, "-", 7),
    ]


@pytest.mark.parametrize("operations", range(9))
def test_drawn_trees_have_the_size_the_range_and_the_value_of_their_text(operations):
    rng = np.random.default_rng(operations)
    for _ in range(50):
        tree = expressions.draw_expression(rng, operations, 29)
        text = expressions.write(tree)
        assert operations_of(text) == operations
        assert len(expressions.leaves(tree)) == operations + 1
        assert all(1 <= leaf <= 29 for leaf in expressions.leaves(tree))
        assert expressions.evaluate(tree) == python_value(text)


# --- instances


def test_an_instance_is_a_function_of_seed_split_and_index():
    same, other = Arithmetic(0, {n: 1.0 for n in range(1, 9)}), Arithmetic(1, {n: 1.0 for n in range(1, 9)})
    backwards = [same.instance("train", i) for i in reversed(range(30))][::-1]
    assert backwards == [TASK.instance("train", i) for i in range(30)]
    assert backwards != [other.instance("train", i) for i in range(30)]
    first = TASK.instance("eval", 4)
    assert first.uid == "arithmetic/eval/4"
    assert first.text.endswith("\n") and first.group == str(operations_of(first.text))


def test_splits_share_no_question_even_where_there_are_few():
    task = Arithmetic(0, {1: 1.0}, max_number=9)  # 243 questions in all
    texts = {split: {task.instance(split, i).text for i in range(400)} for split in base.SPLITS}
    assert not texts["train"] & texts["eval"]
    assert not texts["train"] & texts["demo"]
    assert not texts["eval"] & texts["demo"]
    assert len(set.union(*texts.values())) > 200


def test_difficulty_weights_decide_the_groups():
    task = Arithmetic(0, {2: 1.0, 5: 3.0, 7: 0.0})
    groups = [task.instance("train", i).group for i in range(400)]
    assert set(groups) == {"2", "5"}
    assert groups.count("5") / 400 == pytest.approx(0.75, abs=0.11)  # five standard errors
    assert task.max_turns == 5 + 1 + 2


# --- the environment


def test_an_episode_by_hand():
    state = ArithmeticState(TREE)
    for action, observation in (("12+7\n", "19\n"), ("3-4\n", "99\n"), ("19*99\n", "81\n")):
        assert TASK.expert(state) == action
        assert TASK.score(state) == base.Outcome(0.0, 0.0)
        result = TASK.step(state, action)
        assert (result.observation, result.done, result.tool_calls) == (observation, False, 1)
        state = result.state
    assert TASK.expert(state) == "=81\n"
    right, wrong = TASK.step(state, "=81\n"), TASK.step(state, "=18\n")
    assert (right.observation, right.done, right.tool_calls) == ("", True, 0)
    assert TASK.score(right.state) == base.Outcome(1.0, 1.0)
    assert wrong.done and TASK.score(wrong.state) == base.Outcome(0.0, 0.0)
    assert state.answer is None and state.results == (19, 99, 81)  # two forks of one state do not meet
    with pytest.raises(ValueError, match="the episode is over"):
        TASK.step(right.state, "1+1\n")


def test_actions_with_and_without_the_line_end_are_the_same():
    state = ArithmeticState(TREE)
    assert TASK.step(state, "12+7") == TASK.step(state, "12+7\n")


@pytest.mark.parametrize(
    "action",
    [
        "",
        "\n",
        "12+7\n\n",
        " 12+7",
        "12 + 7",
        "12+7+1",
        "12/7",
        "12**7",
        "-1+2",
        "1+",
        "=",
        "=1+1",
        "123+1",
        "=123",
        "=-1",
        "__import__('os').system('true')",
        "9" * 5_000_000,
        "9" * 2_000_000 + "*" + "9" * 2_000_000,
        "=" + "9" * 5_000_000,
        "\u0661+\u0662",  # Arabic-Indic digits, which int() would take
        "１+２",
        "12＋7",
        "\x0012+7",
        "12+7\r",
        "<pad token>",
        "\ud800",
    ],
)
def test_malformed_and_hostile_actions_get_an_error_and_change_nothing(action):
    state = ArithmeticState(TREE, results=(19,))
    result = TASK.step(state, action)
    assert (result.observation, result.done, result.tool_calls) == ("?\n", False, 0)
    assert result.state == state


def test_every_text_is_within_the_vocabulary():
    tokenizer = tokenizers.build_tokenizer(TASK.symbols(), TASK.word_level)
    rng = np.random.default_rng(0)
    for i in range(200):
        instance = TASK.instance("train", i)
        texts, state = [instance.text, "?\n"], instance.state
        for action in (TASK.slip(state, rng), TASK.expert(state), "nonsense"):
            texts += [action] if action != "nonsense" else []
            result = TASK.step(state, action)
            state = result.state
            texts.append(result.observation)
        for text in texts:
            tokens = tokenizers.encode(tokenizer, text)
            assert len(tokens) == len(text) and tokenizer.unk_token_id not in tokens
            assert tokenizers.decode(tokenizer, tokens) == text


# --- the scripts


def test_the_expert_always_solves():
    for i in range(300):
        instance = TASK.instance("eval", i)
        state, turns = instance.state, 0
        while state.answer is None:
            state = TASK.step(state, TASK.expert(state)).state
            turns += 1
        assert TASK.score(state).success == 1.0
        assert state.answer == python_value(instance.text)
        assert turns == int(instance.group) + 1 <= TASK.max_turns


def test_a_slip_is_a_well_formed_call_with_a_wrong_result_and_the_expert_goes_on_from_it():
    rng = np.random.default_rng(1)
    for i in range(300):
        state = TASK.instance("demo", i).state
        wrong, right = TASK.step(state, TASK.slip(state, rng)), TASK.step(state, TASK.expert(state))
        assert wrong.tool_calls == 1 and not wrong.done
        assert wrong.state.results != right.state.results
        assert len(wrong.state.results) == 1
        following = TASK.expert(wrong.state)
        if int(TASK.instance("demo", i).group) == 1:
            assert following == f"={wrong.state.results[-1]}\n"


def test_a_slip_exists_even_where_no_small_change_gives_a_wrong_result():
    # (50-50)*(50-50) with both differences found to be 0: 0*0, 50*0, 0*50, 0+0 and 0-0 are all 0.
    zero = Operation("-", 50, 50)
    state = ArithmeticState(Operation("*", zero, zero), results=(0, 0))
    actions = {TASK.slip(state, np.random.default_rng(seed)) for seed in range(20)}
    assert actions == {"0+1\n"}


def test_the_answer_has_no_slip():
    state = ArithmeticState(TREE, results=(19, 99, 81))
    assert TASK.slip(state, np.random.default_rng(0)) == TASK.expert(state) == "=81\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1, "difficulty": {1: 1.0}}, "arithmetic: seed is -1"),
        ({"seed": 0, "difficulty": {}}, "arithmetic: difficulty is empty"),
        ({"seed": 0, "difficulty": {MAX_OPERATIONS + 1: 1.0}}, "level 13; operations are integers in 1..12"),
        ({"seed": 0, "difficulty": {1: 1.0}, "max_number": 8}, "max_number is 8, must be in 9..99"),
        ({"seed": 0, "difficulty": {1: 1.0}, "max_number": 100}, "max_number is 100, must be in 9..99"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic(**arguments)
