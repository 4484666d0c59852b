"""The SGLang experiment: summaries by hand from made-up raw files, and every published number made again."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.sglang_cpu import cache, logprobs, prefill, quickstart, report
from experiments.sglang_cpu.raw_files import Kept, read
from trace_jax.tree import grow
from trace_jax.types import Finish, Prompt, Stage, Turn

FOLDER = Path(report.__file__).parent
REQUIRED = {
    "cache/prefix_hit_rate",
    "logprob/max_gap",
    "logprob/max_gap_after_updates",
    "faults/leaves_lost",
    "faults/units_lost",
    "client/ideal_throughput_share",
    "client/cpu_ms_per_request",
    "prefill/tree_over_flat_tokens",
    "quickstart/success_last",
}


def save(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def routed(seed, step, routing, rate, *, forks=2, tokens=40, prefilled=100, busy=30.0):
    """A row of cache.jsonl; the second server answers 10 tokens of prompts."""
    servers = [{"prompt_tokens": busy, "cached_tokens": 5.0}, {"prompt_tokens": 10.0, "cached_tokens": 7.0}]
    row = {"seed": seed, "step": step, "routing": routing, "prefix_hit_rate": rate, "forks": forks}
    row |= {"prefix_tokens": tokens, "prefilled_tokens": prefilled, "cached_tokens": 12, "budget_units": 4}
    return row | {"servers": servers}


def scored(temperature, version, gap, **more):
    """A row of logprobs.jsonl."""
    row = {"temperature": temperature, "version": version, "tokens": 10, "mean_gap": gap / 4, "p99_gap": gap / 2}
    row |= {"max_gap": gap, "cold_max_gap": gap, "cold_cached_tokens": 0, "cold_prompt_tokens": 20}
    return row | {"warm_max_gap": 3 * gap, "warm_cached_tokens": 19, "warm_prompt_tokens": 20} | more


def batch(pair, shape, reuse, prefilled, cached, *, generated=50, seconds=2.0):
    """A row of prefill.jsonl."""
    row = {"pair": pair, "shape": shape, "reuse": reuse, "seconds": seconds, "units": 256.0}
    return row | {"generated_tokens": generated, "prefilled_tokens": prefilled, "cached_tokens": cached}


def trained(first, last, hit_rate):
    """Two steps between two evaluations."""
    steps = [{"step": i, "rollout/prefix_hit_rate": hit_rate, "time/step": 2.0, "rollout/errors": 0} for i in (1, 2)]
    return [{"step": 0, "eval/success": first}, steps[0], steps[1] | {"eval/success": last}]


@pytest.fixture
def raw(tmp_path):
    """A folder with a little of everything."""
    folder = tmp_path / "raw"
    folder.mkdir()
    cached = [routed(0, 0, "sticky", 0.95), routed(0, 1, "sticky", 0.85, tokens=120, forks=4, prefilled=60)]
    cached += [routed(0, 0, "random", 0.5, busy=10.0), routed(0, 1, "random", 0.5)]
    save(folder / "cache.jsonl", cached)
    late = {"one_update_late_max_gap": 0.5}
    gaps = [scored(1.0, 0, 1e-5), scored(1.0, 1, 2e-5, **late), scored(0.7, 0, 3e-5), scored(0.7, 1, 1e-6, **late)]
    save(folder / "logprobs.jsonl", [*gaps, {"temperature": 1.0, "control": "stale", "max_gap": 0.25}])
    repeated = []
    for pair, tree in enumerate((30, 50, 80)):
        repeated += [batch(pair, "flat", True, 50, 150), batch(pair, "flat", False, 200, 0)]
        repeated += [batch(pair, "tree", True, tree, 270, generated=100, seconds=1.0)]
        repeated += [batch(pair, "tree", False, 300, 0, generated=100, seconds=4.0)]
    save(folder / "prefill.jsonl", repeated)
    for engine, lasts in (("local", (0.5, 0.6)), ("sglang", (0.45, 0.75))):
        for seed, last in enumerate(lasts):
            save(folder / f"quickstart-{engine}-{seed}.jsonl", trained(0.4, last, 0.96))
    fault = {"outcome": "completed", "expected": "completed", "leaves_expected": 96, "leaves_lost": 0, "units_lost": 0}
    drills = [fault | {"fault": "killed", "seconds": 3.0}, fault | {"fault": "hanging", "seconds": 40.0}]
    worse = {"outcome": "down", "expected": "one line", "leaves_expected": 0, "leaves_lost": 2, "units_lost": 1.5}
    drills.append(worse | {"fault": "full", "seconds": 1.0})
    (folder / "faults.json").write_text(json.dumps(drills))
    measured = ((0.9, 1.0), (0.95, 2.0), (1.0, 4.0))
    flying = [{"kind": "in_flight", "requests_per_second": 512 * s, "cpu_ms": c} for s, c in measured]
    other = [{"kind": kind, "requests_per_second": 2000.0, "cpu_ms": 0.5} for kind in ("saturation", "server_alone")]
    (folder / "client.json").write_text(json.dumps({"ideal_throughput_share": 0.95, "rows": flying + other}))
    return folder


def test_a_report_from_raw_files(raw, tmp_path):
    report.write(raw, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert REQUIRED <= set(found)
    assert all({"mean", "low", "high", "n"} <= set(summary) for summary in found.values())
    text = (tmp_path / "table.md").read_text()
    for title in ("Forks and the cache", "Prefill", "Log-probs", "Training", "Faults", "The client alone"):
        assert f"## {title}" in text
    assert "| hanging | completed | 40.0" in " ".join(text.split())
    assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_parts_that_were_not_run_are_left_out(tmp_path):
    (tmp_path / "raw").mkdir()
    report.write(tmp_path / "raw", tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == {}
    assert (tmp_path / "table.md").read_text() == ""
    assert (tmp_path / "figure.png").exists()


def test_hit_rates_by_hand(raw):
    found = report.cache(raw)
    # 0.95 of 40 and 0.85 of 120 tokens: 38 + 102 of 160. Six forks, each with one token that is never cached.
    assert found["prefix_hit_rate"] == pytest.approx({"mean": 140 / 160, "low": 0.875, "high": 0.875, "n": 1})
    assert found["attainable_hit_rate"]["mean"] == pytest.approx(154 / 160)
    assert found["missed_tokens_per_fork"]["mean"] == pytest.approx(14 / 6)
    assert found["prefilled_tokens_per_unit"]["mean"] == pytest.approx(160 / 8)
    assert found["busiest_server_share"]["mean"] == pytest.approx(0.75)
    assert found["busiest_server_share_random"] == {"mean": pytest.approx(0.625), "low": 0.5, "high": 0.75, "n": 2}
    assert found["servers_over_client_cached_tokens"]["mean"] == 1.0


def test_gaps_by_hand(raw):
    found = report.logprobs(raw)
    assert found["max_gap"] == {"mean": 3e-5, "low": 3e-5, "high": 3e-5, "n": 1}
    assert found["max_gap_after_updates"]["mean"] == 2e-5
    assert found["max_gap_after_updates_t0.7"]["mean"] == 1e-6
    assert found["warm_max_gap_after_updates"]["mean"] == pytest.approx(6e-5)
    assert (found["cold_cached_share"]["mean"], found["warm_cached_share"]["mean"]) == (0, 0.95)
    assert (found["one_update_late_max_gap"]["low"], found["stale_cache_max_gap"]["mean"]) == (0.5, 0.25)
    assert found["tokens"]["mean"] == 40


def test_prefill_by_hand(raw):
    found = report.prefill(raw)
    ratio = found["tree_over_flat_tokens"]
    assert (ratio["low"], ratio["median"], ratio["high"], ratio["n"]) == (0.6, 1.0, 1.6, 3)
    assert ratio["mean"] == pytest.approx((0.6 + 1.0 + 1.6) / 3)
    assert found["tree_over_flat_tokens_no_reuse"]["median"] == 1.5
    assert found["tree_over_flat_per_generated_token"]["median"] == 0.5  # twice the generated tokens
    assert found["tree_reuse_over_no_reuse_speed"]["median"] == 4.0
    assert found["flat_reuse_history_tokens"]["mean"] == 200 == found["flat_no_reuse_history_tokens"]["mean"]
    assert found["tree_reuse_generated_per_second"]["mean"] == 100


def test_training_by_hand(raw):
    found = report.quickstart(raw)
    assert found["success_last"] == {"mean": pytest.approx(0.6), "low": 0.45, "high": 0.75, "n": 2}
    assert found["success_last_local"]["mean"] == pytest.approx(0.55)
    assert found["success_rise_local"]["mean"] == pytest.approx(0.15)
    difference = found["success_last_minus_local"]
    assert (difference["low"], difference["high"]) == (pytest.approx(-0.05), pytest.approx(0.15))
    assert found["prefix_hit_rate"]["mean"] == pytest.approx(0.96)
    assert found["server_losses"]["n"] == 0


def test_faults_and_client_by_hand(raw):
    lost = report.faults(raw)
    assert (lost["leaves_lost"]["mean"], lost["units_lost"]["mean"]) == (2, 1.5)
    assert lost["unexpected_outcomes"]["mean"] == 1
    assert (lost["seconds"]["low"], lost["seconds"]["high"]) == (1, 40)
    cost = report.client(raw)
    share = cost["ideal_throughput_share"]
    assert (share["low"], share["median"], share["high"]) == tuple(pytest.approx(x) for x in (0.9, 0.95, 1.0))
    assert cost["cpu_ms_per_request"]["median"] == 2.0
    assert cost["saturation_requests_per_second"]["mean"] == 2000


def test_raw_files_grow_and_are_read_again(tmp_path):
    kept = Kept(tmp_path / "deep" / "x.jsonl")
    assert not kept.has(seed=0)
    kept.add([{"seed": 0, "step": 1}, {"seed": 1, "step": 1.5}])
    again = Kept(tmp_path / "deep" / "x.jsonl")
    assert again.rows == [{"seed": 0, "step": 1}, {"seed": 1, "step": 1.5}]
    assert again.has(seed=1) and again.has(seed=0, step=1) and not again.has(seed=1, step=1)
    assert read(tmp_path / "nothing.json") == []


def test_counters_of_a_server_are_summed_over_labels():
    page = "# HELP sglang:cached_tokens_total x\n# TYPE sglang:cached_tokens_total counter\n"
    page += 'sglang:cached_tokens_total{cache_source="device",model="a b"} 7.0\n'
    page += 'sglang:cached_tokens_total{model="c"} 1.5\nsglang:prompt_tokens_total{model="a"} 1e+3\n'
    page += "sglang:num_requests_total 4.0\nsglang:prompt_tokens_total_x{} 9\n"
    found = cache.read_counters(page)
    assert found == {"requests": 4.0, "prompt_tokens": 1000.0, "cached_tokens": 8.5}
    assert cache.subtract(found, found) == dict.fromkeys(found, 0.0)


def small_tree():
    """A prompt of 3 tokens; a rollout with turns of 4 and 2 tokens; two forks of its first turn, one with two turns."""
    prompt = Prompt("p", np.arange(3, dtype=np.int32), None)

    def turn(action, observation, finish, **end):
        ids = [np.full(n, 7, np.int32) for n in (action, observation)]
        return Turn(ids[0], np.full(action, -0.5, np.float32), ids[1], finish, 0, **end)

    middle = turn(3, 1, Finish.TURN)
    last = turn(2, 0, Finish.ANSWER, reward=1.0, success=1.0)
    tree = grow.add_rollouts(grow.new_tree(prompt), [(0, Stage.ROOT_ROLLOUT, [middle, last])])
    return grow.add_rollouts(tree, [(1, Stage.CONTINUATION, [last]), (1, Stage.CONTINUATION, [middle, last])])


def test_forks_and_their_prefixes_are_counted_once_each():
    assert cache.forked([small_tree(), small_tree()]) == (4, 4 * 7)  # 3 of the prompt and 4 of the turn


def test_the_longest_history_ends_before_the_last_turn():
    assert logprobs.longest_history(small_tree()).size == 3 + 4 + 4


def test_flat_and_tree_spend_the_same_units_on_prompts_of_the_same_draw():
    flat, tree = prefill.STRATEGIES["flat"], prefill.STRATEGIES["tree"]
    chosen = {name: s.roots(None, 64, np.random.default_rng(5)) for name, s in prefill.STRATEGIES.items()}
    units = {name: m.sum() * (1 + prefill.STRATEGIES[name].continuations_per_root / 2) for name, m in chosen.items()}
    assert units == {"flat": 256, "tree": 256}
    assert np.all(chosen["flat"][chosen["tree"] > 0] == 8)
    none = np.zeros(5)
    copies = tree.forks(none, None, none, 16, np.random.default_rng(0))
    assert copies.sum() == 16 and copies.shape == (5,)
    assert flat.forks(none, None, none, 0, np.random.default_rng(0)).sum() == 0


def test_the_two_engines_differ_in_nothing_else():
    local, served = (quickstart.flags(Path("w"), 3, urls) for urls in ([], ["http://a:1", "http://b:2"]))
    assert served[: len(local)] == local
    assert served[len(local) :] == ["--config.engine=sglang", "--config.sglang.urls=http://a:1,http://b:2"]
    assert "--config.seed=3" in local and f"--config.steps={quickstart.STEPS}" in local


@pytest.mark.parametrize("name", ["results.json", "table.md"])
def test_the_published_numbers_follow_from_the_raw_measurements(tmp_path, name):
    report.write(FOLDER / "raw", tmp_path)
    assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_the_published_results_are_complete():
    assert REQUIRED <= set(json.loads((FOLDER / "results.json").read_text()))
