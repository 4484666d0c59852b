"""results.json, table.md and figure.png from what the parts measured; a part that was not run is left out.

    python -m experiments.sglang_cpu.report
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from experiments import results as results_lib
from experiments.results import Summary, summarise
from experiments.sglang_cpu import figure
from experiments.sglang_cpu.raw_files import Rows, read
from trace_jax.train.metrics import read_jsonl

Results = dict[str, Summary]
ENGINES = ("local", "sglang")
_SHOWN = 80  # characters of an outcome
SHAPES, REUSE = ("flat", "tree"), {True: "reuse", False: "no_reuse"}


def write(raw: Path, folder: Path) -> None:
    """Reads what is in `raw` and writes the three files into `folder`."""
    results = {f"{part}/{name}": value for part, measure in PARTS.items() for name, value in measure(raw).items()}
    results_lib.write(folder / "results.json", results)
    (folder / "table.md").write_text(tables(results, read(raw / "faults.json")))
    figure.draw(raw, folder / "figure.png")


def cache(raw: Path) -> Results:
    """Hit rates, one number a seed; of a prefix of n tokens n - 1 can come from the cache, so 1 is out of reach."""
    rows, found = read(raw / "cache.jsonl"), {}
    for routing in ("sticky", "random") if rows else ():
        seeds = _by(rows, "seed", routing=routing)
        end = "" if routing == "sticky" else "_random"
        found[f"prefix_hit_rate{end}"] = summarise([_hit_rate(seed) for seed in seeds])
        found[f"attainable_hit_rate{end}"] = summarise([_attainable(seed) for seed in seeds])
        found[f"missed_tokens_per_fork{end}"] = summarise([_missed(seed) for seed in seeds])
        found[f"prefilled_tokens_per_unit{end}"] = summarise(
            [_total(seed, "prefilled_tokens") / _total(seed, "budget_units") for seed in seeds]
        )
        found[f"busiest_server_share{end}"] = summarise([_busiest(row) for seed in seeds for row in seed])
    if rows:
        served = sum(server["cached_tokens"] for row in rows for server in row["servers"])
        found["servers_over_client_cached_tokens"] = summarise([served / _total(rows, "cached_tokens")])
    return found


def _hit_rate(rows: Rows) -> float:
    return sum(row["prefix_hit_rate"] * row["prefix_tokens"] for row in rows) / _total(rows, "prefix_tokens")


def _attainable(rows: Rows) -> float:
    return 1 - _total(rows, "forks") / _total(rows, "prefix_tokens")


def _missed(rows: Rows) -> float:
    return (_attainable(rows) - _hit_rate(rows)) * _total(rows, "prefix_tokens") / _total(rows, "forks")


def _busiest(row: dict[str, Any]) -> float:
    tokens = [server["prompt_tokens"] for server in row["servers"]]
    return max(tokens) / sum(tokens)


def logprobs(raw: Path) -> Results:
    """Gaps in nats. A maximum is one number, over everything; the two controls name the least that they reached."""
    rows = read(raw / "logprobs.jsonl")
    start = [row for row in rows if row.get("version") == 0]
    updated = [row for row in rows if row.get("version", 0) > 0]
    if not updated:
        return {}
    found = {"max_gap": _greatest(start, "max_gap"), "max_gap_after_updates": _greatest(updated, "max_gap")}
    for temperature in sorted({row["temperature"] for row in rows}):
        own = [row for row in updated if row["temperature"] == temperature]
        found[f"max_gap_after_updates_t{temperature:g}"] = _greatest(own, "max_gap")
        found[f"mean_gap_after_updates_t{temperature:g}"] = summarise([row["mean_gap"] for row in own])
    found["p99_gap_after_updates"] = _greatest(updated, "p99_gap")
    found["tokens"] = summarise([_total(start + updated, "tokens")])
    for state in ("cold", "warm"):
        found[f"{state}_max_gap_after_updates"] = _greatest(updated, f"{state}_max_gap")
        shares = [row[f"{state}_cached_tokens"] / row[f"{state}_prompt_tokens"] for row in updated]
        found[f"{state}_cached_share"] = summarise(shares)
    found["one_update_late_max_gap"] = summarise([row["one_update_late_max_gap"] for row in updated])
    found["stale_cache_max_gap"] = summarise([row["max_gap"] for row in rows if "control" in row])
    return found


def _greatest(rows: Rows, name: str) -> Summary:
    return summarise([max((row[name] for row in rows), default=None)])


def prefill(raw: Path) -> Results:
    """Counts and speeds of the four cases, and ratios within a repetition with their median."""
    rows, found = read(raw / "prefill.jsonl"), {}
    if not rows:
        return found
    pairs = [{(row["shape"], row["reuse"]): row for row in own} for own in _by(rows, "pair")]
    for shape in SHAPES:
        for reuse, label in REUSE.items():
            for name, measure in CASE_MEASURES.items():
                found[f"{shape}_{label}_{name}"] = _with_median([measure(pair[shape, reuse]) for pair in pairs])
        found[f"{shape}_reuse_over_no_reuse_speed"] = _with_median(
            [_speed(pair[shape, True]) / _speed(pair[shape, False]) for pair in pairs]
        )
    for reuse, end in ((True, ""), (False, "_no_reuse")):
        for name, measure in (("tokens", _prefilled), ("per_generated_token", _per_generated)):
            ratios = [measure(pair["tree", reuse]) / measure(pair["flat", reuse]) for pair in pairs]
            found[f"tree_over_flat_{name}{end}"] = _with_median(ratios)
    return found


def _prefilled(row: dict[str, Any]) -> float:
    return row["prefilled_tokens"]


def _per_generated(row: dict[str, Any]) -> float:
    return row["prefilled_tokens"] / row["generated_tokens"]


def _speed(row: dict[str, Any]) -> float:
    return row["generated_tokens"] / row["seconds"]


CASE_MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "units": lambda row: row["units"],
    "generated_tokens": lambda row: row["generated_tokens"],
    "history_tokens": lambda row: row["prefilled_tokens"] + row["cached_tokens"],
    "prefilled_tokens": _prefilled,
    "prefilled_per_generated_token": _per_generated,
    "generated_per_second": _speed,
}


def quickstart(raw: Path) -> Results:
    """Success before and after training; names without an end are those of the run on servers."""
    runs, found = training_runs(raw), {}
    for engine, seeds in runs.items():
        end = "" if engine == "sglang" else f"_{engine}"
        for name, measure in RUN_MEASURES.items():
            found[name + end] = summarise([measure(rows) for rows in seeds.values()])
    if set(runs) == set(ENGINES):
        last = RUN_MEASURES["success_last"]
        shared = sorted(set(runs["local"]) & set(runs["sglang"]))
        found["success_last_minus_local"] = summarise(
            [last(runs["sglang"][seed]) - last(runs["local"][seed]) for seed in shared]
        )
    return found


def training_runs(raw: Path) -> dict[str, dict[int, Rows]]:
    """Metrics by engine and seed."""
    runs: dict[str, dict[int, Rows]] = {}
    for path in sorted(raw.glob("quickstart-*.jsonl")):
        _, engine, seed = path.stem.split("-")
        runs.setdefault(engine, {})[int(seed)] = read_jsonl(path)
    return runs


def _evaluations(rows: Rows) -> list[float]:
    return [row["eval/success"] for row in rows if "eval/success" in row]


def _step_values(name: str, reduce: Callable[[Sequence[float]], float]) -> Callable[[Rows], float | None]:
    def measure(rows: Rows) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return reduce(values) if values else None

    return measure


RUN_MEASURES: dict[str, Callable[[Rows], float | None]] = {
    "success_warm_start": lambda rows: _evaluations(rows)[0],
    "success_last": lambda rows: _evaluations(rows)[-1],
    "success_rise": lambda rows: _evaluations(rows)[-1] - _evaluations(rows)[0],
    "steps": lambda rows: rows[-1]["step"],
    "prefix_hit_rate": _step_values("rollout/prefix_hit_rate", statistics.fmean),
    "effective_ratio": _step_values("rollout/effective_ratio", statistics.fmean),
    "budget_units": _step_values("rollout/budget_units", sum),
    "generated_tokens": _step_values("rollout/generated_tokens", sum),
    "prefilled_tokens": _step_values("rollout/prefilled_tokens", sum),
    "errors": _step_values("rollout/errors", sum),
    "retries": _step_values("rollout/retries", sum),
    "server_losses": _step_values("rollout/server_losses", sum),
    "logprob_gap_max": _step_values("train/logprob_gap_max", max),
    "seconds_per_step": _step_values("time/step", statistics.median),
}


def faults(raw: Path) -> Results:
    """Sums over all faults of what was lost; of the seconds, the spread over faults."""
    rows = read(raw / "faults.json")
    if not rows:
        return {}
    found = {name: summarise([_total(rows, name)]) for name in ("leaves_lost", "units_lost")}
    found["leaves_expected"] = summarise([_total(rows, "leaves_expected")])
    found["unexpected_outcomes"] = summarise([sum(row["outcome"] != row["expected"] for row in rows)])
    found["seconds"] = summarise([row["seconds"] for row in rows])
    return found


def client(raw: Path) -> Results:
    """Of the repetitions, and their median."""
    document = read(raw / "client.json")
    if not document:
        return {}
    rates = _client(document, "in_flight", "requests_per_second")
    ideal = statistics.median(rates) / document["ideal_throughput_share"]
    return {
        "ideal_throughput_share": _with_median([rate / ideal for rate in rates]),
        "cpu_ms_per_request": _with_median(_client(document, "in_flight", "cpu_ms")),
        "saturation_requests_per_second": _with_median(_client(document, "saturation", "requests_per_second")),
        "saturation_cpu_ms_per_request": _with_median(_client(document, "saturation", "cpu_ms")),
        "server_alone_requests_per_second": _with_median(_client(document, "server_alone", "requests_per_second")),
    }


def _client(document: dict[str, Any], kind: str, name: str) -> list[float]:
    return [row[name] for row in document["rows"] if row["kind"] == kind]


PARTS: dict[str, Callable[[Path], Results]] = {
    "cache": cache,
    "logprob": logprobs,
    "prefill": prefill,
    "quickstart": quickstart,
    "faults": faults,
    "client": client,
}


def tables(results: Results, fault_rows: Rows) -> str:
    """Markdown: a table for each part that was measured."""
    parts = [
        ("Forks and the cache", _routing_table(results)),
        ("Prefill at 256 units", _prefill_table(results)),
        ("Log-probs", _plain_table(results, "logprob", "{:.3g}")),
        ("Training", _training_table(results)),
        ("Faults", _fault_table(fault_rows)),
        ("The client alone", _plain_table(results, "client", "{:.4g}")),
    ]
    return "\n".join(f"## {title}\n\n{table}\n" for title, table in parts if table)


def _grid(
    results: Results, part: str, columns: dict[str, Callable[[str], str]], rows: Iterable[tuple[str, int]]
) -> str:
    """One line a measure, one column a variant; `columns` makes a name of a measure."""
    lines = []
    for name, digits in rows:
        summaries = [results.get(f"{part}/{full(name)}") for full in columns.values()]
        if any(summaries):
            lines.append([name.replace("_", " "), *(_cell(summary, digits) for summary in summaries)])
    return tabulate(lines, headers=["", *columns], tablefmt="github", disable_numparse=True) if lines else ""


def _cell(summary: Summary | None, digits: int) -> str:
    """`median (low-high)` where there is a median, else `mean (low-high)`."""
    if summary is None:
        return "-"
    return results_lib.cell(summary | {"mean": summary.get("median", summary["mean"])}, digits)


def _routing_table(results: Results) -> str:
    columns = {"sticky": lambda name: name, "a random server for each turn": lambda name: f"{name}_random"}
    rows = (("prefix_hit_rate", 4), ("attainable_hit_rate", 4), ("missed_tokens_per_fork", 2),
            ("prefilled_tokens_per_unit", 1), ("busiest_server_share", 3))  # fmt: skip
    return _grid(results, "cache", columns, rows)


def _prefill_table(results: Results) -> str:
    columns = {
        f"{shape}, {'reuse' if reuse else 'no reuse'}": (lambda name, case=f"{shape}_{label}": f"{case}_{name}")
        for shape in SHAPES
        for reuse, label in REUSE.items()
    }
    digits = {"prefilled_per_generated_token": 2}
    cases = _grid(results, "prefill", columns, [(name, digits.get(name, 0)) for name in CASE_MEASURES])
    if not cases:
        return ""
    ends = {"reuse": lambda name: name, "no reuse": lambda name: f"{name}_no_reuse"}
    ratios = _grid(results, "prefill", ends, (("tree_over_flat_tokens", 3), ("tree_over_flat_per_generated_token", 3)))
    speeds = _grid(results, "prefill", {shape: (lambda name, s=shape: f"{s}_{name}") for shape in SHAPES},
                   (("reuse_over_no_reuse_speed", 2),))  # fmt: skip
    return f"{cases}\n\n{ratios}\n\n{speeds}"


def _training_table(results: Results) -> str:
    columns = {"server": lambda name: name, "in process": lambda name: f"{name}_local"}
    digits = {"steps": 0, "budget_units": 0, "generated_tokens": 0, "prefilled_tokens": 0, "errors": 0, "retries": 0,
              "server_losses": 0, "logprob_gap_max": 7, "seconds_per_step": 1}  # fmt: skip
    return _grid(results, "quickstart", columns, [(name, digits.get(name, 3)) for name in RUN_MEASURES])


def _fault_table(rows: Rows) -> str:
    lines = [
        [
            row["fault"],
            row["outcome"].splitlines()[0][:_SHOWN],  # one that was not expected can be a whole log
            f"{row['seconds']:.1f}",
            f"{row['leaves_lost']:g}",
            f"{row['units_lost']:g}",
        ]
        for row in rows
    ]
    headers = ["fault", "outcome", "seconds", "leaves lost", "units lost"]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True) if lines else ""


def _plain_table(results: Results, part: str, number: str) -> str:
    """One line a measure; the mean, and the spread where there is one."""
    lines = []
    for name, summary in results.items():
        if not name.startswith(f"{part}/") or not summary["n"]:
            continue
        middle = summary.get("median", summary["mean"])
        spread = f" ({number.format(summary['low'])}-{number.format(summary['high'])})" if summary["n"] > 1 else ""
        lines.append([name.removeprefix(f"{part}/").replace("_", " "), number.format(middle) + spread])
    return tabulate(lines, headers=["", part], tablefmt="github", disable_numparse=True) if lines else ""


def _by(rows: Rows, name: str, **fixed: Any) -> list[Rows]:
    """The rows in groups of equal `name`, those with the fixed values only."""
    groups: dict[Any, Rows] = {}
    for row in rows:
        if all(row[key] == value for key, value in fixed.items()):
            groups.setdefault(row[name], []).append(row)
    return list(groups.values())


def _total(rows: Iterable[dict[str, Any]], name: str) -> float:
    return sum(row.get(name) or 0 for row in rows)


def _with_median(values: Sequence[float]) -> Summary:
    return summarise(values) | {"median": statistics.median(values)}


if __name__ == "__main__":
    write(Path(__file__).resolve().parent / "raw", Path(__file__).resolve().parent)
