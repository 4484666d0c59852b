"""The predictor experiment: measures and intervals by hand, every variant's settings, reports on made-up runs."""

import argparse
import ast
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments import results as results_lib
from experiments.predictor import config as variants
from experiments.predictor import cost, cost_figure, figure, report, run, tuning
from trace_jax import config as config_lib
from trace_jax import config_checks
from trace_jax.tree import grow
from trace_jax.types import Prompt


def run_rows(first, last, active, *, ratio=0.5, useful=0.2, tokens=100_000, warmup=None):
    """A step for each success of active prompts, between two evaluations; the tokens are those of the whole run."""
    start = {"step": 0, "eval/success": first} | ({} if warmup is None else {"predictor/warmup_tokens": warmup})
    steps = [
        {
            "step": i + 1,
            "rollout/success": success,
            "rollout/effective_ratio": ratio,
            "rollout/useful_groups_per_unit": useful,
            "rollout/generated_tokens": tokens // len(active),
            "rollout/active_prompts": 16,
            "rollout/skipped_prompts": 48,
        }
        for i, success in enumerate(active)
    ]
    return [start, *steps[:-1], steps[-1] | {"eval/success": last}]


def test_measures_by_hand():
    rows = run_rows(0.25, 0.35, [0.2, 0.4, 0.4, 0.6, 0.8, 0.6], tokens=120_000, warmup=30_000)
    found = {name: measure(rows) for name, measure in report.METRICS.items()}
    assert found["success_gain"] == pytest.approx(0.1)
    assert found["gain_per_100k_tokens"] == pytest.approx(0.1 / 1.2)
    assert found["gain_per_100k_tokens_with_warmup"] == pytest.approx(0.1 / 1.5)
    assert found["active_success_first_half"] == pytest.approx(1 / 3)
    assert found["active_success_second_half"] == pytest.approx(2 / 3)
    # four steps at a time: 1.6 / 4, 2.2 / 4, 2.4 / 4
    assert (found["active_success_lowest"], found["active_success_highest"]) == pytest.approx((0.4, 0.6))
    assert found["skipped_share"] == 0.75
    short = run_rows(0.0, 0.1, [0.25, 0.75])
    assert report.METRICS["active_success_lowest"](short) == report.METRICS["active_success_highest"](short) == 0.5


def test_intervals_by_hand():
    # mean 2, s 1, n 3: half a width is t(0.975, 2) / sqrt(3), t from the closed form for two degrees of freedom
    quantile = 0.95 * np.sqrt(2 / (1 - 0.95**2))
    found = results_lib.with_interval([1.0, None, 2.0, 3.0])
    assert (found["mean"], found["low"], found["high"], found["n"]) == (2, 1, 3, 3)
    assert found["ci_low"] == pytest.approx(2 - quantile / np.sqrt(3))
    assert found["ci_high"] == pytest.approx(2 + quantile / np.sqrt(3))
    assert results_lib.with_interval([0.5]) == results_lib.summarise([0.5])
    assert results_lib.interval_cell(results_lib.with_interval([0.5])) == "0.500"
    assert results_lib.interval_cell(results_lib.with_interval([1.0, 1.0]), 1) == "1.0 [1.0, 1.0]"
    assert results_lib.interval_cell(results_lib.summarise([])) == "-"


def test_a_ratio_of_means_holds_what_a_t_test_cannot_tell_from_it():
    rng = np.random.default_rng(3)
    below = rng.normal(1.0, 0.4, 8)
    above = 0.8 * below + rng.normal(0.0, 0.1, 8)
    found = results_lib.ratio_of_means(above, below)
    assert found["mean"] == pytest.approx(above.sum() / below.sum()) and found["n"] == 8
    assert found["low"] < found["mean"] < found["high"] and found["ci_low"] < found["mean"] < found["ci_high"]
    for end, outwards in (("ci_low", -1), ("ci_high", 1)):
        p = lambda r: stats.ttest_1samp(above - r * below, 0.0).pvalue
        assert p(found[end]) == pytest.approx(0.05)
        assert p(found[end] + 0.01 * outwards) < 0.05 < p(found[end] - 0.01 * outwards)


def test_a_ratio_to_what_may_be_nothing_has_no_bounds():
    found = results_lib.ratio_of_means([0.1, 0.2], [0.1, -0.05])
    assert found["mean"] == pytest.approx(6.0) and found["ci_low"] is None
    assert (found["low"], found["high"]) == pytest.approx((-4.0, 1.0))  # one pair left out
    assert results_lib.interval_cell(found, 1) == "6.0 [unbounded]"
    for nothing in ([0.1, -0.1], [0.0, 0.0]):
        assert results_lib.ratio_of_means([0.1, 0.2], nothing) == results_lib.summarise([])
    assert results_lib.ratio_of_means([0.3], [0.6]) == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 1}


@pytest.fixture
def raw(tmp_path):
    """Two seeds of all strategies of one task; PCL has one more that TRACE lacks."""
    folder = tmp_path / "raw"
    folder.mkdir()
    found = {
        "grpo": [run_rows(0.2, 0.22, [0.4] * 4, ratio=0.2), run_rows(0.2, 0.24, [0.4] * 4, ratio=0.4)],
        "treepo": [run_rows(0.2, 0.25, [0.4] * 4), run_rows(0.2, 0.25, [0.4] * 4)],
        "pcl": [run_rows(0.2, 0.25, [0.4] * 4, useful=0.1, warmup=25_000)] * 2
        + [run_rows(0.2, 0.9, [0.4] * 4, warmup=25_000)],
        "trace": [
            run_rows(0.2, 0.26, [0.4] * 4, ratio=0.6, useful=0.2, warmup=25_000),
            run_rows(0.2, 0.28, [0.4] * 4, ratio=0.4, useful=0.4, warmup=25_000),
        ],
        "trace_oracle": [run_rows(0.2, 0.29, [0.5] * 4, ratio=0.8), run_rows(0.2, 0.31, [0.5] * 4, ratio=0.8)],
        "trace_shuffled": [run_rows(0.2, 0.2, [0.4] * 4, ratio=0.2)] * 2,
        "trace_paper": [run_rows(0.2, 0.24, [0.7] * 4)] * 2,
    }
    assert set(found) == set(variants.STRATEGIES) == set(figure.LABELS)
    for strategy, seeds in found.items():
        for seed, rows in enumerate(seeds):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"arithmetic-{strategy}-{seed}.jsonl").write_text(text)
    return folder


def test_a_report_from_raw_files(raw, tmp_path):
    (tmp_path / "cost.json").write_text(json.dumps({"cost/critic/share_of_step": results_lib.summarise([0.02])}))
    (tmp_path / "bias.json").write_text(json.dumps({"bias/bare/trace": results_lib.summarise([0.0])}))
    report.write(raw, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    mean = lambda name: found[f"arithmetic/{name}"]["mean"]
    assert mean("oracle_share/effective_ratio") == pytest.approx((0.75 + 0.5) / 2)
    assert mean("oracle_share/useful_groups_per_unit") == pytest.approx((1 + 2) / 2)
    assert mean("oracle_share/success_gain") == pytest.approx(0.14 / 0.2)
    assert mean("shuffled_share/effective_ratio") == pytest.approx((3 + 2) / 2)
    over = found["arithmetic/over_pcl/useful_groups_per_unit"]  # on the two seeds that both have
    assert (over["mean"], over["low"], over["high"], over["n"]) == pytest.approx((0.2, 0.1, 0.3, 2))
    assert over["ci_high"] == pytest.approx(0.2 + np.tan(0.475 * np.pi) * 0.1)  # t with one degree of freedom: Cauchy
    assert mean("over_pcl/success_last") == pytest.approx(0.02)
    assert mean("over_grpo/gain_per_100k_tokens") == pytest.approx(0.07 - 0.03)
    assert mean("over_grpo/gain_per_100k_tokens_with_warmup") == pytest.approx(0.07 / 1.25 - 0.03)
    assert mean("over_treepo/success_gain") == pytest.approx(0.02)
    assert found["cost/critic/share_of_step"]["mean"] == 0.02 and "bias/bare/trace" in found
    one, other = (tmp_path / "table.md").read_text().split("\n\n")
    assert all(label in one for label in figure.LABELS.values())
    assert "TRACE minus PCL" in other and "TRACE as a share of TRACE, oracle" in other and "over" not in one
    assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_predictors_on_fresh_prompts(tmp_path):
    for seed, brier in ((0, 0.06), (1, 0.08)):
        document = {key: 0.5 for key in report.FRESH.values()} | {"root/brier": brier}
        (tmp_path / f"lookup-trace-{seed}.predictor.json").write_text(json.dumps(document))
    found = report.fresh(tmp_path)
    assert set(found) == {f"lookup/trace/fresh_{name}" for name in report.FRESH}
    brier = found["lookup/trace/fresh_brier"]
    assert (brier["mean"], brier["low"], brier["high"], brier["n"]) == (pytest.approx(0.07), 0.06, 0.08, 2)
    whole = {f"lookup/trace/{column}": brier for column in report.COLUMNS}
    assert "| brier of class rates" in report.tables(found | whole)


def test_a_predictor_is_measured_once_and_only_where_a_run_is(tmp_path, monkeypatch):
    calls = []

    def command(arguments, **_):
        calls.append(arguments)
        (tmp_path / "work" / "lookup-trace-0" / "predictor").mkdir()
        (tmp_path / "work" / "lookup-trace-0" / "predictor" / "report.json").write_text("{}")

    monkeypatch.setattr(run.subprocess, "run", command)
    monkeypatch.setattr(run.runs, "ROOT", tmp_path)
    arguments = argparse.Namespace(workdir=Path("work"), raw=tmp_path / "raw")
    (tmp_path / "raw").mkdir()
    (tmp_path / "work" / "lookup-trace-0" / "checkpoints").mkdir(parents=True)
    for name in ("lookup-trace-0", "lookup-trace-0", "lookup-trace-1"):
        run.measure(arguments, name)
    assert [one[-1] for one in calls] == ["--workdir=work/lookup-trace-0"]
    assert (tmp_path / "raw" / "lookup-trace-0.predictor.json").read_text() == "{}"


def test_success_by_tokens_starts_behind_the_warm_up():
    rows = run_rows(0.25, 0.35, [0.5, 0.5], tokens=100_000, warmup=30_000)
    assert figure.success_by_tokens(rows) == ([30.0, 130.0], [0.25, 0.35])


@pytest.mark.parametrize("strategy", variants.STRATEGIES)
@pytest.mark.parametrize("task", sorted(variants.REGIME))
def test_every_variant_is_a_config_that_can_run(task, strategy):
    config = config_checks.check(config_lib.parse(variants.get_config(f"{task},{strategy}")))
    assert (config.task, config.strategy, config.steps) == (task, strategy.split("_")[0], variants.STEPS)
    assert getattr(config, task).difficulty == variants.REGIME[task]
    assert config.predictor.shuffle == (strategy == "trace_shuffled")
    assert (config.predictor.kind == "oracle") == (strategy == "trace_oracle")
    assert units(config) == units(config_lib.parse(variants.get_config(f"{task},trace")))


def units(config):
    return config.budget.roots * (1 + config.budget.continuations_per_root / 2)


def test_the_papers_variant_is_what_section_4_3_says():
    config = config_lib.parse(variants.get_config("lookup,trace_paper"))
    chosen, fitted = config.predictor, (config.predictor.loss, config.predictor.weighting, config.predictor.targets)
    assert chosen.kind == "critic" and fitted == ("mse", "equal", "backed_up")
    assert (chosen.prefix_share, chosen.replay_steps, chosen.epochs, chosen.warmup_prompts) == (0.06, 1, 2, 0)
    assert chosen.calibration == "none" and not chosen.expected
    assert (config.budget.objective, config.budget.min_per_prompt, config.budget.max_per_prompt) == ("any_contrast", 2, None)
    assert config.budget.explore_share == 0


def test_the_published_numbers_follow_from_the_raw_metrics(tmp_path, monkeypatch):
    published = Path(report.__file__).parent
    monkeypatch.setattr(figure, "draw", lambda *_: None)
    for part in published.glob("*.json"):
        (tmp_path / part.name).write_text(part.read_text())
    report.write(published / "raw", tmp_path)
    for name in ("results.json", "table.md"):
        assert (tmp_path / name).read_text() == (published / name).read_text()


def test_the_published_results_are_complete():
    found = json.loads((Path(report.__file__).parent / "results.json").read_text())
    of_runs = {f"{task}/{strategy}" for task in variants.REGIME for strategy in variants.STRATEGIES}
    names = {f"{run}/{metric}" for run in of_runs for metric in report.METRICS}
    shares = {f"{task}/oracle_share/{name}" for task in variants.REGIME for name in ("effective_ratio", "success_gain")}
    costs = {f"cost/{form}/share_of_step" for form in cost.FORMS}
    assert names | shares | costs <= set(found) and any(name.startswith("bias/") for name in found)
    assert {found[f"{run}/{metric}"]["n"] for run in of_runs for metric in ("effective_ratio", "success_gain")} == {8}
    assert {found[name]["n"] for name in shares} == {8}


@pytest.mark.parametrize("task", variants.REGIME)
def test_the_readme_shows_what_was_published(task):
    root = Path(report.__file__).parents[2]
    found = json.loads((root / "experiments/predictor/results.json").read_text())
    text = (root / "README.md").read_text().replace("**", "")
    table = text[text.index(f"| `{task}` | GRPO | TreePO | PCL | TRACE | TRACE, oracle |") :].split("\n\n")[0]
    rows = {cells[1].strip(): cells[2:-1] for cells in (line.split("|") for line in table.splitlines()[2:])}
    shown = {
        "effective ratio": ("effective_ratio", 1, 2),
        "gain in held-out success, points": ("success_gain", 100, 1),
        "of it per 100,000 tokens": ("gain_per_100k_tokens", 100, 1),
    }
    assert set(rows) == set(shown)
    for name, (metric, unit, digits) in shown.items():
        for strategy, cell in zip(("grpo", "treepo", "pcl", "trace", "trace_oracle"), rows[name], strict=True):
            s = found[f"{task}/{strategy}/{metric}"]
            mean, low, high = (f"{unit * s[key]:.{digits}f}" for key in ("mean", "ci_low", "ci_high"))
            assert cell.strip() == f"{mean} [{low}, {high}]", (name, strategy)


def test_the_table_of_the_earlier_default_follows_from_its_raw_metrics(tmp_path, monkeypatch):
    before = Path(report.__file__).parent / "before"
    monkeypatch.setattr(figure, "draw", lambda *_: None)
    report.write(before / "raw", tmp_path)
    assert (tmp_path / "table.md").read_text() == (before / "table.md").read_text()


def test_the_table_of_tuning_runs_is_made_of_the_stored_ones():
    assert (tuning.FOLDER / "table.md").read_text() == tuning.table(tuning.FOLDER)
    stored = {path.stem.split("-")[1] for path in tuning.FOLDER.glob("*.jsonl")}
    assert stored == set(tuning.VARIANTS)
    # one run's numbers from the file itself
    rows = [json.loads(line) for line in (tuning.FOLDER / "lookup-oracle-100.jsonl").read_text().splitlines()]
    ratio = np.mean([row["rollout/effective_ratio"] for row in rows[1:]])
    line = next(line for line in tuning.table(tuning.FOLDER).splitlines() if "| lookup     | oracle " in line)
    assert f"{ratio:.3f}" in line and f"{rows[-1]['eval/success'] - rows[0]['eval/success']:.3f}" in line


@pytest.mark.parametrize("variant", tuning.VARIANTS)
def test_a_tuning_run_can_be_made_again(variant):
    config = variants.get_config("lookup,trace")
    for flag in tuning.flags("lookup", variant, 100)[1:]:
        name, _, value = flag.removeprefix("--config.").partition("=")
        section, _, field = name.rpartition(".")
        place = config[section] if section else config
        place[field] = value if isinstance(place[field], str) else ast.literal_eval(value)
    checked = config_checks.check(config_lib.parse(config))
    units = checked.budget.roots * (1 + checked.budget.continuations_per_root / 2)
    assert checked.seed == 100 and units in (255, 256)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="strategy 'best' is none of grpo"):
        variants.get_config("lookup,best")


def test_costs_by_hand_and_their_figure(tmp_path):
    seconds = {"step": [2.0, 4.0, 2.0]}
    for name in cost.FORMS:
        seconds |= {f"{name}/score_seconds": [0.02, 0.02, 0.03], f"{name}/update_seconds": [0.02, 0.02, 0.05]}
    seconds["bayes/not_reused_seconds"] = [0.01, 0.02, 0.01]
    for name in cost.MODELS:
        for n in cost.LENGTHS:
            where = f"growth/{name}/tokens={n}"
            seconds |= {f"{where}/score_seconds": [n / 1000] * 3, f"{where}/update_seconds": [0.1] * 3}
    found = cost.summaries(seconds)
    share = found["cost/bare_0.5/share_of_step"]
    assert (share["median"], share["low"], share["high"], share["n"]) == pytest.approx((0.02, 0.01, 0.04, 3))
    own = found["cost/bayes/share_not_reused"]  # (0.01 + 0.02) / 2, (0.02 + 0.02) / 4, (0.01 + 0.05) / 2
    assert (own["median"], own["low"], own["high"]) == pytest.approx((0.015, 0.01, 0.03))
    grown = found["cost/growth/both/tokens=32/score_ms_per_1000_tokens"]
    assert grown["median"] == pytest.approx(32 / 2.048)  # 32 ms for 64 histories of 32 tokens
    assert found["cost/step_seconds"]["median"] == 2.0
    cost_figure.draw(found, tmp_path / "cost.png", tuple(cost.FORMS), tuple(cost.MODELS), cost.LENGTHS, default="bayes")
    assert (tmp_path / "cost.png").stat().st_size > 20_000


def test_prompts_that_were_opened_are_no_cost_of_their_own():
    prompts = [Prompt(uid, np.arange(3, dtype=np.int32), None) for uid in "abc"]
    step = cost.Recorded(prompts, [grow.new_tree(prompts[1])], None, None)
    assert [prompt.uid for prompt in step.skipped.prompts] == ["a", "c"]
    assert len(step.skipped.trees) == 1


def test_every_form_is_a_config_that_can_run(tmp_path):
    assert {"bayes", "bayes_forward", "critic", "critic_small", "policy_head", "both", "members_8", "bare_0.06", "direct_0.9"} <= set(cost.FORMS)
    for overrides in cost.FORMS.values():
        config = cost.run_config(overrides, tmp_path)
        assert all(getattr(config.predictor, name) == value for name, value in overrides.items())
    assert {n: len(some) for n, some in cost.histories(30).items()} == dict.fromkeys(cost.LENGTHS, cost.HISTORIES)
    assert all(h.size == n and h.max() < 30 for n, some in cost.histories(30).items() for h in some)
