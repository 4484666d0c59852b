"""Tables of evaluations against rows that the paper prints, and averages' intervals by hand."""

from __future__ import annotations

import pytest

from trace_jax.report.paper_table import tables

MATH = ("aime24", "amc23", "math500", "minerva", "olympiadbench", "mmlu_pro", "arc_challenge", "gpqa_diamond")
QA = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
CALLS = ("bfcl_base", "bfcl_miss_func", "bfcl_miss_param", "bfcl_long_context")


def figures(percent, error=None, interval=None, score=None):
    score = percent if score is None else score
    return {
        "avg": percent / 100,
        "standard_error": error,
        "interval": interval,
        "mean_reward": score / 100,
        "reward_standard_error": error,
        "reward_interval": interval,
        "prompts": 7,
        "records": 7,
        "too_long": 0,
        "samples": 4,
        "pass_at_k": {"1": percent / 100, "4": 0.9},
        "pass_at_k_interval": {"1": interval, "4": [0.8, 1.0]},
    }


def cells(text, markdown=False):
    """The row of each table, cell by cell, from the text that was drawn."""
    rows = [line for line in text.splitlines() if line.lstrip("| ").startswith("8B")]
    split = lambda line: line.strip("|").split("|") if markdown else line.split()
    return [[cell.strip() for cell in split(row)] for row in rows if "success" not in row]


# Rows of Tables 4 and 5 whose averages follow from their columns.
@pytest.mark.parametrize(
    ("names", "columns", "printed"),
    [
        (MATH, (52.3, 87.0, 89.8, 37.8, 58.6, 68.5, 95.3, 52.4), "52.3 87.0 89.8 37.8 58.6 65.1 68.5 95.3 52.4 72.1"),
        (MATH, (63.9, 91.2, 93.4, 41.2, 65.8, 73.4, 95.7, 56.9), "63.9 91.2 93.4 41.2 65.8 71.1 73.4 95.7 56.9 75.3"),
        (QA, (55.7, 50.9, 29.5, 66.3), "55.7 50.9 29.5 66.3 50.6"),
        (CALLS, (61.2, 34.4, 48.8, 40.4), "61.2 34.4 48.8 40.4 46.2"),
    ],
)
def test_rows_of_the_paper(names, columns, printed):
    results = {name: figures(value) for name, value in zip(names, columns, strict=True)}
    for markdown in (False, True):
        assert cells(tables(results, "8B", markdown=markdown), markdown) == [["8B", *printed.split()]]


def test_headers_stand_over_their_columns():
    lines = tables({"aime24": figures(50)}, "8B").splitlines()
    assert lines[1].split() == "AIME24 AMC23 MATH500 Minerva Olymp Avg MMLU-Pro ARC-c GPQA Avg".split()
    assert tables({"musique": figures(50)}, "8B").splitlines()[1].split() == "Hotpot 2Wiki MuSiQue Bamb Avg".split()
    header = tables({"bfcl_base": figures(50)}, "8B").splitlines()[1]
    assert header.split() == "Base Miss-Func Miss-Param Long Avg".split()


def papers(results, **options):
    """The text without its last table, which is of each benchmark."""
    return tables(results, "8B", **options).rpartition("\n\n8B: success" if not options else "\n\n**8B: success")[0]


def test_what_was_not_run_is_a_dash_and_has_no_average():
    results = {"aime24": figures(50), "mmlu_pro": figures(10), "arc_challenge": figures(20), "gpqa_diamond": figures(60)}
    assert cells(tables(results, "8B")) == [["8B", "50.0", "-", "-", "-", "-", "-", "10.0", "20.0", "60.0", "30.0"]]
    assert "Hotpot" not in tables(results, "8B") and tables({}, "8B") == ""


def test_question_answering_shows_the_score():
    """The paper's figure there is the graded reward; 70 % of the answers count as right, their mean score is 55 %."""
    results = {name: figures(70, score=55) for name in QA}
    assert cells(tables(results, "8B")) == [["8B", "55.0", "55.0", "55.0", "55.0", "55.0"]]


def test_intervals():
    """Errors 0.06, 0.08, 0, 0: the average's is sqrt(0.0036 + 0.0064) / 4 = 0.025, times 1.96 = 0.049."""
    spread = {"bfcl_base": (60, 0.06, (0.48, 0.72)), "bfcl_miss_func": (40, 0.08, (0.24, 0.56))}
    spread |= {name: (50, 0.0, (0.5, 0.5)) for name in CALLS[2:]}
    results = {name: figures(*values) for name, values in spread.items()}
    first, below = papers(results).splitlines()[-2:]
    assert first.split() == ["8B", "60.0", "40.0", "50.0", "50.0", "50.0"]
    assert below.split() == ["48.0-72.0", "24.0-56.0", "50.0-50.0", "50.0-50.0", "45.1-54.9"]
    row = cells(tables(results, "8B", markdown=True), markdown=True)[0]
    assert row[1] == "60.0<br>48.0-72.0" and row[-1] == "50.0<br>45.1-54.9"
    results["bfcl_base"] |= {"standard_error": None, "interval": None}  # a single prompt
    assert papers(results).splitlines()[-1].split() == ["24.0-56.0", "50.0-50.0", "50.0-50.0"]


def test_each_benchmark_has_a_row_with_its_extent_and_pass_at_k():
    results = {"aime25": figures(25, 0.1, (0.05, 0.45)), "eval": figures(80)}
    results["eval"] |= {"samples": 1, "pass_at_k": {"1": 0.8}, "pass_at_k_interval": {"1": None}}
    title, header, _, *rows = tables(results, "8B").splitlines()
    assert title == "8B: success and pass@k" and header.split() == ["prompts", "samples", "success", "pass@4"]
    assert [row.split() for row in rows] == [
        ["aime25", "7", "4", "25.0", "90.0"],
        ["5.0-45.0", "80.0-100.0"],
        ["eval", "7", "1", "80.0", "-"],
    ]
    marked = tables(results, "8B", markdown=True).splitlines()
    assert [cell.strip() for cell in marked[4].strip("|").split("|")][3:] == ["25.0<br>5.0-45.0", "90.0<br>80.0-100.0"]


def test_figures_that_are_not_of_all_records_are_marked():
    """Two of three benchmarks of a block are whole, so its average is not; the other block has no mark."""
    results = {name: figures(50) for name in MATH} | {"amc23": figures(50) | {"records": 10, "too_long": 1}}
    text = tables(results, "8B")
    assert cells(text)[0] == ["8B", "50.0", "50.0†", *["50.0"] * 3, "50.0†", *["50.0"] * 4]
    assert text.splitlines()[0].endswith("; † not of all records")
    row = next(line for line in text.splitlines() if line.startswith("amc23"))
    assert "7 of 10, 1 too long" in row
    assert "not of all records" not in tables({"amc23": figures(50)}, "8B")
    first = tables({"amc23": figures(50) | {"prompts": 3}}, "8B")  # the first three alone
    assert "50.0†" in first and "3 of 7 " in first
