r"""Boxes against a second reader of braces, plain forms and numbers by hand, letters by table."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.tasks.math import answers


@pytest.mark.parametrize(
    "text, content",
    [
        (r"\boxed{5}", "5"),
        (r"so \boxed{ \frac{1}{\sqrt{2}} }.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} no, \boxed{2}", "2"),  # the last
        (r"\boxed{1} and \boxed{2", "1"),  # the last that is closed
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{x = \boxed{7}}", r"x = \boxed{7}"),  # two boxes, the outer one closes last
        (r"\boxed{\boxed{1}+\boxed{2}}", r"\boxed{1}+\boxed{2}"),
        (r"{ \boxed{3} } }", "3"),  # stray braces outside
        (r"} \boxed{3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),  # escaped braces are no groups
        (r"\boxed{\{1}", r"\{1"),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"a \\ \boxed {4}", "4"),
        (r"\\boxed{4}", "4"),  # a backslash too many
        (r"\\\boxed{4}", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{東京 ½}", "東京 ½"),
        ("\\boxed{a\nb}", "a\nb"),
        (r"\boxed{5", None),
        (r"\boxed{{5}", None),
        (r"\boxed 5", None),
        ("no box", None),
        ("", None),
    ],
)
def test_boxes(text, content):
    assert answers.boxed(text) == content


def by_counting(text: str) -> str | None:
    """The oracle: from the rightmost closing brace leftwards, the box whose depth is zero there."""
    ends = [i for i, sign in enumerate(text) if sign == "}"]
    for end in reversed(ends):
        depth = 0
        for i in range(end, -1, -1):
            depth += (text[i] == "}") - (text[i] == "{")
            if depth == 0:
                if text[:i].endswith(r"\boxed"):
                    return text[i + 1 : end]
                break
    return None


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", "1", "x"]), max_size=12).map("".join))
def test_boxes_are_those_found_by_counting(text):
    expected = by_counting(text)
    while expected is not None and expected == r"\boxed{%s}" % by_counting(expected):
        expected = by_counting(expected)
    assert answers.boxed(text) == expected


@pytest.mark.parametrize("piece", ["{", r"\boxed{", "}", r"\boxed{1}", "\\", "$", "1,", "é", "answer is "])
def test_a_million_characters_are_read_in_no_time(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    box = answers.boxed(text + r"\boxed{6}")
    answers.stated_letter(text)
    assert box == "6"
    assert time.process_time() - start < 3.0  # measured 0.1


@pytest.mark.parametrize("piece", [".", " ", "(", "~", r"\,", r"\text{", "**", "B "])
def test_a_million_characters_name_an_option_in_no_time(piece):
    """Patterns that take the square of a long answer would hold up all episodes: they run beside the event loop."""
    start = time.process_time()
    assert answers.letter(piece * (1_000_000 // len(piece)) + "x") is None
    assert answers.letter("B. " + piece * (1_000_000 // len(piece)) + "x") == "B"
    assert time.process_time() - start < 2.0  # measured 0.1


def test_boxes_nested_a_thousand_times_take_linear_time():
    start = time.process_time()
    assert len(answers.boxed(r"\boxed{" * 70_000 + "}" * 70_000)) > 500_000  # not unwrapped to the end
    assert time.process_time() - start < 5.0  # measured 0.5


@pytest.mark.parametrize(
    "text, plain",
    [
        (" $5$ ", "5"),
        (r"\$32,\!348", r"32,\!348"),
        (r"$221,$8$", "221,8"),
        (r"$(-\infty, 0) \cup\{1\}$.", r"(-\infty, 0) \cup\{1\}"),
        (r"\approx 8.24 \text{ mph}", r"8.24 \text{ mph}"),
        ("−5", "-5"),
        ("５", "5"),
        ("3π/2", r"3\pi /2"),
        ("x²", "x^{2}"),
        ("90°", r"90^{\circ}"),
        ("4.5e33", r"4.5 \times 10^{33}"),
        ("1e-5", r"1 \times 10^{-5}"),
        ("2e", "2e"),
        (r"1950^\circ C", r"1950^{\circ}"),
        (r"0.003^{\prime \prime}", "0.003"),
        ("y^{\\prime}+ry=0\n", r"y^{\prime}+ry=0"),
        ("...", ""),
    ],
)
def test_plain_forms(text, plain):
    assert answers.plain(text) == plain


@pytest.mark.parametrize(
    "text, value",
    [
        ("204", "204"),
        ("-0.50", "-0.5"),
        (".5", "0.5"),
        ("+3", "3"),
        ("58,500", "58500"),
        (r"11,\! 111,\! 111,\! 100", "11111111100"),
        ("1{,}000.5", "1000.5"),
        (r"4.5 \times 10^{33}", "4.5e33"),
        (r"3 \cdot 10^8", "3e8"),
        (r"1 \times 10^{-5}", "0.00001"),
        ("1,2", None),
        ("12,34", None),
        ("1 2", None),
        ("x", None),
        ("1/2", None),
        (r"1 \times 10^{9999}", None),
        ("9" * 500, None),
        ("", None),
    ],
)
def test_numbers(text, value):
    assert answers.number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    "answer, truth, equal",
    [
        (r"\dfrac12", r"\frac12", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        (r"90^{\circ}", r"90^\circ", True),
        ("204.0", "204", True),
        ("0204", "204", True),
        ("1000000", "1000001", False),
        ("0.333333", "0.3333334", True),
        ("0.3333", "0.33333", False),
        ("0.0000671", ".0000672", False),  # six places alone would call them equal
        (r"3.61 \times 10^{-10}", r"3.3 \times 10^{-10}", False),
        ("1 2", "12", None),
        ("1/2", "0.5", None),
        ("", "", False),
        ("x", "y", None),
    ],
)
def test_what_shows_without_algebra(answer, truth, equal):
    assert answers.quick(answer, truth) is equal


@pytest.mark.parametrize(
    "text, letter",
    [
        ("B", "B"),
        ("b", "B"),
        ("(C)", "C"),
        ("( d )", "D"),
        (r"\text{B}", "B"),
        (r"\textbf{(E)}", "E"),
        (r"\mathrm{\text{A}}", "A"),
        ("$J$", "J"),
        ("**B**", "B"),
        ("B. Mitosis", "B"),
        ("(B) 12 m", "B"),
        ("B) 12 m", "B"),
        ("C: because", "C"),
        ("A cat", None),
        ("AB", None),
        ("42", None),
        (r"B \text{ or } C", None),
        ("B, C", None),
        ("", None),
    ],
)
def test_letters(text, letter):
    assert answers.letter(text) == letter


@pytest.mark.parametrize(
    "text, letter",
    [
        ("The answer is (B).", "B"),
        ("The correct answer is **C**", "C"),
        ("Answer: D", "D"),
        ("The answer is A. Wait, the answer is B, as shown.", "B"),
        ("So we pick\n(C)", "C"),
        ("So we pick\n**D.**\n", "D"),
        ("The answer is Africa", None),
        ("Answer it yourself", None),
        ("I think A is better than B", None),
        ("", None),
    ],
)
def test_letters_that_a_text_states(text, letter):
    assert answers.stated_letter(text) == letter
