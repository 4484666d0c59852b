"""An evaluation's figures in the layout of the paper's Tables 4 and 5: percent, with a 95 % interval below.

A benchmark that was not run shows "-"; an average stands behind a complete block only. It is the mean of the columns,
as in the paper; its interval (ours) takes their errors as independent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

Figures = Mapping[str, Any]  # of one benchmark, as `eval.outcomes.summary` gives them
NONE = "-"
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
    """The paper's tables of which a benchmark was run, then one of the benchmarks that the paper does not have.

    `label` names the row. `markdown`: as Markdown; else for a terminal.
    """
    known = {name for table in TABLES for block in table.blocks for _, name in block.columns}
    shown = [t for t in TABLES if any(name in results for b in t.blocks for _, name in b.columns)]
    parts = [_table(table, results, label, markdown) for table in shown]
    others = [name for name in results if name not in known]
    if others:
        header = ["", *others]
        cells = [_cell(*_figure(results[name], graded=False), markdown) for name in others]
        parts.append(_render("Success", header, [label, *cells], markdown))
    return "\n\n".join(parts)


def _table(table: Table, results: Mapping[str, Figures], label: str, markdown: bool) -> str:
    header, row = [""], [label]
    for block in table.blocks:
        figures = [_figure(results[name], block.graded) if name in results else None for _, name in block.columns]
        header += [*(title for title, _ in block.columns), "Avg"]
        row += [NONE if figure is None else _cell(*figure, markdown) for figure in figures]
        row.append(NONE if None in figures else _cell(*_average(figures), markdown))
    return _render(table.title, header, row, markdown)


def _render(title: str, header: Sequence[str], row: Sequence[str], markdown: bool) -> str:
    form = "pipe" if markdown else "simple"
    body = tabulate([row], headers=header, tablefmt=form, disable_numparse=True, stralign="left")
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


def _cell(value: float, error: float | None, interval: tuple[float, float] | None, markdown: bool) -> str:
    del error  # the interval says it
    text = f"{100 * value:.1f}"
    if interval is None:
        return text
    between = f"{100 * interval[0]:.1f}-{100 * interval[1]:.1f}"
    return f"{text}<br>{between}" if markdown else f"{text}\n{between}"
