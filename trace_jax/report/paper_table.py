"""An evaluation's figures in the layout of the paper's Tables 4 and 5: percent, with a 95 % interval below.

A benchmark that was not run shows "-"; an average stands behind a complete block only. It is the mean of the columns,
as in the paper; its interval (ours) takes their errors as independent. A dagger marks what is not of all records. A
table of all benchmarks, those too that the paper does not have, follows: prompts, samples, success and pass@k of each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

Figures = Mapping[str, Any]  # of one benchmark, as `eval.outcomes.summary` gives them
NONE, PARTIAL = "-", "†"
_NORMAL_95 = 1.959964  # two-sided 95 % of a normal distribution


@dataclasses.dataclass(frozen=True)
class Block:
    """Columns with an average behind them."""

    columns: tuple[tuple[str, str], ...]  # (title, benchmark)
    graded: bool = False  # the paper's figure is the mean score, which can lie between 0 and 1; else the success


@dataclasses.dataclass(frozen=True)
class Table:
    """Blocks side by side."""

    title: str
    blocks: tuple[Block, ...]


_MATH = Block(
    (
        ("AIME24", "aime24"),
        ("AMC23", "amc23"),
        ("MATH500", "math500"),
        ("Minerva", "minerva"),
        ("Olymp", "olympiadbench"),
    )
)
_OTHER_DOMAINS = Block((("MMLU-Pro", "mmlu_pro"), ("ARC-c", "arc_challenge"), ("GPQA", "gpqa_diamond")))
_QA = Block(
    (("Hotpot", "hotpotqa"), ("2Wiki", "2wikimultihopqa"), ("MuSiQue", "musique"), ("Bamb", "bamboogle")), graded=True
)
_CALLS = Block(
    (
        ("Base", "bfcl_base"),
        ("Miss-Func", "bfcl_miss_func"),
        ("Miss-Param", "bfcl_miss_param"),
        ("Long", "bfcl_long_context"),
    )
)
TABLES = (
    Table("Mathematics, and other domains behind it (the paper's Table 4)", (_MATH, _OTHER_DOMAINS)),
    Table("Multi-hop question answering (the paper's Table 5): mean score", (_QA,)),
    Table("Function calling (the paper's Table 5)", (_CALLS,)),
)


def tables(results: Mapping[str, Figures], label: str, *, markdown: bool = False) -> str:
    """The paper's tables of which a benchmark was run, then one of all benchmarks that were run; "" for none.

    `label` names the policy. `markdown`: as Markdown; else for a terminal.
    """
    shown = [t for t in TABLES if any(name in results for b in t.blocks for _, name in b.columns)]
    parts = [_table(table, results, label, markdown) for table in shown]
    if results:
        parts.append(_each(results, label, markdown))
    return "\n\n".join(parts)


def _each(results: Mapping[str, Figures], label: str, markdown: bool) -> str:
    """A row for each benchmark. Success is avg@samples, which is pass@1."""
    ks = sorted({int(k) for figures in results.values() for k in figures["pass_at_k"]} - {1})
    rows = []
    for name, figures in results.items():
        cells = [_cell(_figure(figures, graded=False), markdown)]
        for k in map(str, ks):
            known = k in figures["pass_at_k"]
            figure = (figures["pass_at_k"][k], None, figures["pass_at_k_interval"][k]) if known else None
            cells.append(_cell(figure, markdown))
        rows.append([name, _extent(figures), str(figures["samples"]), *cells])
    header = ["", "prompts", "samples", "success", *(f"pass@{k}" for k in ks)]
    return _render(f"{label}: success and pass@k", header, rows, markdown)


def _extent(figures: Figures) -> str:
    """How many of a benchmark's records the figures are of, and why not of all."""
    prompts, records, too_long = figures["prompts"], figures["records"], figures["too_long"]
    if prompts == records:
        return str(prompts)
    return f"{prompts} of {records}" + (f", {too_long} too long" if too_long else "")


def _table(table: Table, results: Mapping[str, Figures], label: str, markdown: bool) -> str:
    header, row, marked = [""], [label], False
    for block in table.blocks:
        found = [results.get(name) for _, name in block.columns]
        figures = [None if each is None else _figure(each, block.graded) for each in found]
        partial = [each is not None and each["prompts"] < each["records"] for each in found]
        average = None if None in figures else _average(figures)
        header += [*(title for title, _ in block.columns), "Avg"]
        row += [_cell(figure, markdown, part) for figure, part in zip(figures, partial)]
        row.append(_cell(average, markdown, any(partial)))
        marked |= any(partial)
    title = f"{table.title}; {PARTIAL} not of all records" if marked else table.title
    return _render(title, header, [row], markdown)


def _render(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    form = "pipe" if markdown else "simple"
    body = tabulate(rows, headers=header, tablefmt=form, disable_numparse=True, stralign="left")
    return f"**{title}**\n\n{body}" if markdown else f"{title}\n{body}"


Figure = tuple[float, float | None, tuple[float, float] | None]  # value, standard error, 95 % interval


def _figure(figures: Figures, graded: bool) -> Figure:
    if graded:
        return figures["mean_reward"], figures["reward_standard_error"], figures["reward_interval"]
    return figures["avg"], figures["standard_error"], figures["interval"]


def _average(figures: Sequence[Figure]) -> Figure:
    count = len(figures)
    value, errors = sum(value for value, _, _ in figures) / count, [error for _, error, _ in figures]
    if None in errors:
        return value, None, None
    error = math.sqrt(sum(e * e for e in errors)) / count
    half = _NORMAL_95 * error
    return value, error, (max(value - half, 0.0), min(value + half, 1.0))


def _cell(figure: Figure | None, markdown: bool, partial: bool = False) -> str:
    if figure is None:
        return NONE
    value, _, interval = figure  # the interval says how large the error is
    text = f"{100 * value:.1f}" + (PARTIAL if partial else "")
    if interval is None:
        return text
    between = f"{100 * interval[0]:.1f}-{100 * interval[1]:.1f}"
    return f"{text}<br>{between}" if markdown else f"{text}\n{between}"
