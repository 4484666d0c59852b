"""What the terminal shows, on something that is no terminal."""

from __future__ import annotations

import re

import pytest

from trace_jax.report import console


@pytest.fixture
def screen(capsys):
    """What was drawn on standard error since the last call, one entry a refresh. Under pytest it is no terminal."""

    def drawn():
        text = capsys.readouterr().err
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    return drawn


def test_a_bar_ends_with_its_last_state(screen):
    bar = console.Bar("warm start", 4, "step")
    for done in range(1, 5):
        bar.to(done, nats=f"{1 / done:.2f}", more="x")
    bar.close()
    last = screen()[-1]
    assert last.startswith("warm start 100%|") and " 4/4 [" in last and last.endswith("nats 0.25, more x]")


def test_without_a_terminal_lines_are_rare(screen, monkeypatch):
    """Of a thousand calls within five seconds one is drawn; the next one is drawn ten seconds after it."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    bar = console.Bar("rollouts", 1000, "rollout")
    for done in range(1, 1001):
        bar.to(done)
        now[0] += 0.005
    assert len(screen()) == 2  # the start and the first call
    bar.close()
    assert screen()[-1].startswith("rollouts 100%|")
    again = console.Bar("rollouts", 10, "rollout")
    again.to(1)
    screen()
    now[0] += 9
    again.to(2)
    assert not screen()
    now[0] += 2
    again.to(3)
    drawn = screen()
    assert len(drawn) == 1 and " 3/10 [" in drawn[0]


def test_a_bar_counts_parts_of_a_step_and_may_begin_in_the_middle(screen):
    bar = console.Bar("trace on lookup", 20, "step", initial=5)
    bar.to(5.8)
    bar.close()
    last = screen()[-1]
    assert last.startswith("trace on lookup  29%|") and " 6/20 [" in last


def test_a_line_above_a_bar(screen):
    bar = console.Bar("trace on lookup", 4, "step")
    bar.to(2)
    bar.say("warning: something")
    bar.close()
    drawn = screen()
    assert drawn.count("warning: something") == 1 and drawn[-1].startswith("trace on lookup  50%|")


def test_drift_is_called_out_once_and_only_above_the_limit():
    alarm, name = console.DriftAlarm(0.05), "train/logprob_gap_mean"
    assert alarm.check({"train/tokens": 0}) is None  # nothing was trained, so there is no gap
    assert alarm.check({name: 0.0}) is None and alarm.check({name: 0.05}) is None
    line = alarm.check({name: 0.0512})
    assert line.startswith("warning: train/logprob_gap_mean is 0.0512 nats, above config.loss.max_logprob_gap 0.05:")
    assert "\n" not in line
    assert alarm.check({name: 9.0}) is None
    assert console.DriftAlarm(1e9).check({name: 9.0}) is None  # a limit that switches it off


def test_notes_of_a_step():
    metrics = {
        "time/rollout": 1.5,
        "time/score": 0.5,
        "time/policy_update": 9.0,
        "rollout/effective_ratio": 0.456,
        "rollout/success": 1 / 3,
        "rollout/generated_tokens": 24690,
    }
    # 24,690 tokens in 1.5 + 0.5 seconds of sampling
    assert console.step_notes(metrics) == {"effective": "0.46", "success": "0.33", "tok/s": "12,345"}


def test_no_time_at_all_divides_by_no_zero():
    metrics = {"time/rollout": 0.0, "time/score": 0.0, "rollout/effective_ratio": 0.0, "rollout/success": 0.0}
    assert console.step_notes(metrics | {"rollout/generated_tokens": 0})["tok/s"] == "0"


def test_the_closing_table():
    rows = [("held-out success", "0.100 ± 0.010", "0.250 ± 0.020"), ("tokens", "", "12,345")]
    assert console.closing_table(rows).splitlines() == [
        "                  before         after",
        "----------------  -------------  -------------",
        "held-out success  0.100 ± 0.010  0.250 ± 0.020",
        "tokens                           12,345",
    ]
