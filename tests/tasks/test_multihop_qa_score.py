import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.tasks.base import Outcome
from trace_jax.tasks.multihop_qa import score

TEXT = st.text(alphabet="ab the,.!é\n", max_size=12) | st.text(max_size=8) | st.sampled_from(["yes", "No.", "noanswer"])


# --- normalisation


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("an  apple\t a day", "apple day"),
        ("U.S.", "us"),
        ("rock'n'roll", "rocknroll"),
        ("co-operate", "cooperate"),
        ("theatre another", "theatre another"),  # articles are whole words
        ("$1,000.50", "100050"),
        ("Pál Gábor", "pál gábor"),  # accents stay
        ("“Rush”", "“rush”"),  # so does punctuation outside ASCII
        ("ΑΘΗΝΑ 東京", "αθηνα 東京"),
        ("The The", "the the"),  # a step that leaves nothing is left out
        ("!!!", "!!!"),
        ("A", "a"),
        ("  \n ", ""),
        ("", ""),
    ],
)
def test_normalisation(text, expected):
    assert score.normalise(text) == expected


@given(TEXT)
def test_normalising_twice_changes_nothing_but_articles_that_punctuation_hid(text):
    once = score.normalise(text)
    assert once == " ".join(once.split())
    assert (once == "") == (not text.split())


# --- F1: common tokens, precision and recall counted by hand


@pytest.mark.parametrize(
    "answer, reference, expected",
    [
        ("Paris", "paris", 1.0),
        ("the city of Paris", "Paris", 2 * (1 / 3) * 1 / (1 / 3 + 1)),  # 1 of 3 tokens, 1 of 1: 0.5
        ("Barack Obama", "Barack Hussein Obama", 2 * 1 * (2 / 3) / (1 + 2 / 3)),  # 0.8
        ("a a b b", "b b b", 2 * (2 / 2) * (2 / 3) / (1 + 2 / 3)),  # "a" is an article: b b of b b b
        ("red red red", "red blue", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),  # one red is common: 0.4
        ("1, 2, 3, 4", "4 5", 2 * (1 / 4) * (1 / 2) / (1 / 4 + 1 / 2)),  # 1/3
        ("London", "Paris", 0.0),
        ("yes", "Yes.", 1.0),
        ("yes", "no", 0.0),
        ("yes it is", "yes", 0.0),  # closed answers are right as a whole or not at all
        ("no", "no man's land", 0.0),
        ("noanswer", "noanswer given", 0.0),
        ("", "Paris", 0.0),
        ("the", "The The", 2 * 1 * (1 / 2) / (1 + 1 / 2)),
        ("!!!", "!!!", 1.0),
        ("", "!!!", 0.0),
    ],
)
def test_f1_by_hand(answer, reference, expected):
    assert score.f1(answer, reference) == pytest.approx(expected, abs=1e-12)


@given(TEXT, TEXT)
def test_f1_is_symmetric_bounded_and_one_on_an_exact_match(one, two):
    value = score.f1(one, two)
    assert value == score.f1(two, one) and 0 <= value <= 1
    if score.normalise(one) == score.normalise(two) != "":
        assert value == 1


TOKENS = st.lists(st.sampled_from(["red", "blue", "green", "1"]), min_size=1, max_size=6)


@given(TOKENS, st.randoms(use_true_random=False))
def test_f1_knows_no_order(tokens, random):
    mixed = random.sample(tokens, len(tokens))
    assert score.f1(" ".join(mixed), " ".join(tokens)) == 1
    assert score.f1(" ".join(mixed), "red blue") == score.f1(" ".join(tokens), "blue red")


# --- what counts as the answer


@pytest.mark.parametrize(
    "response, expected",
    [
        (r"So it is \boxed{Paris}.", "Paris"),
        (r"First \boxed{Rome}, no: \boxed{ Paris }", "Paris"),
        (r"\boxed{a {b} c}", "a {b} c"),
        (r"\boxed{\boxed{x}}", "x"),
        (r"\boxed{\text{Paris}}", r"\text{Paris}"),
        (r"\boxed {Paris}", "Paris"),
        (r"\boxed{open \boxed{Paris}", "Paris"),
        (r"\boxed{Paris", r"\boxed{Paris"),
        (r"\boxed{}", ""),
        (r"{ \boxed{Paris}", "Paris"),
        (r"}} \boxed{Paris} }", "Paris"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"<answer>Rome</answer> \boxed{Paris}", "Paris"),
        ("<answer>Rome</answer> or <answer>\nParis </answer> then", "Paris"),
        ("</answer> <answer>Paris", "</answer> <answer>Paris"),
        ("</answer>", "</answer>"),
        ("  Paris\n", "Paris"),
        ("", ""),
    ],
)
def test_the_answer_of_a_response(response, expected):
    assert score.extract(response) == expected


@given(st.text(alphabet="ab{}\\ ", max_size=20))
def test_a_box_of_balanced_text_is_read_back(text):
    """The oracle counts braces from the left, where the implementation pairs them."""
    depth, balanced = 0, "\\" not in text
    for character in text:
        depth += (character == "{") - (character == "}")
        balanced &= depth >= 0
    if balanced and depth == 0:
        assert score.extract("} so { \\boxed{" + text + "}") == text.strip()


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "}", "<answer>", "</answer>", "boxed ", "\\", "a "])
def test_enormous_responses_take_time_in_proportion(piece):
    start = time.perf_counter()
    score.score(piece * 100_000, ["Paris"])
    assert time.perf_counter() - start < 2


# --- reward and success


@pytest.mark.parametrize(
    "response, references, reward",
    [
        (r"\boxed{Paris}", ["Paris"], 1.0),
        (r"\boxed{Paris}", ["Lyon", "The Paris"], 1.0),
        (r"\boxed{the city of Paris}", ["Paris"], 0.5),
        (r"\boxed{the city of Paris}", ["Paris", "city Paris"], 0.8),  # the best reference
        (r"\boxed{1 2 3 4 5 6}", ["1"], 0.0),  # F1 = 2/7 = 0.286 is below the threshold
        (r"\boxed{1 2 3 4 5 6 7}", ["1 2 3"], 0.6),
        (r"\boxed{1 2 3 4 5 6 7 8 9}", ["1 2 30 40 50 60 70 80 90 100 110"], 0.0),  # 2 * 2 / 20 = 0.2
        (r"\boxed{1 2 3 4 5 6 7 8 9}", ["1 2 3 40 50 60 70 80 90 100 110"], 0.3),  # 2 * 3 / 20: at the threshold
        ("Paris", ["Paris"], 1.0),
        ("I believe it is Paris", ["Paris"], 1 / 3),
        (r"It is Paris. \boxed{Rome}", ["Paris"], 0.0),  # the box alone counts
        (r"\boxed{yes}", ["yes"], 1.0),
        (r"\boxed{yes}", ["no"], 0.0),
        (r"\boxed{}", ["The The"], 0.0),
        ("", ["Paris"], 0.0),
    ],
)
def test_reward_and_success(response, references, reward):
    outcome = score.score(response, references)
    assert outcome.reward == pytest.approx(reward) and outcome.success == float(reward > 0)


@given(TEXT, st.lists(TEXT.filter(str.strip), min_size=1, max_size=3))
def test_a_score_is_a_reward_with_its_success(response, references):
    outcome = score.score(response, references)
    assert outcome == score.score(response, references[::-1])
    assert outcome == Outcome(0.0, 0.0) or (0.3 <= outcome.reward <= 1 and outcome.success == 1)
    assert not math.isnan(outcome.reward)
