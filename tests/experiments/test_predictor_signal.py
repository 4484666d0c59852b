"""The alignment of gradients: closed forms, the table, and that every loss and budget is one that a run would take."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments.predictor import config as experiment
from experiments.predictor import signal
from trace_jax import config as config_lib
from trace_jax import config_checks

SCALE = np.array([1.0, 4.0, 0.25])
TRUE = np.array([2.0, 1.0, -4.0])
SQUARE = 4.0 + 4.0 + 4.0  # sum of SCALE * TRUE^2


def test_the_true_gradient_is_aligned_at_any_length():
    found = signal.alignment(np.array([TRUE, TRUE, TRUE]) * 3, SCALE, TRUE, SQUARE)
    np.testing.assert_allclose([found["alignment"], found["standard_error"], found["alignment_of_mean"]], [1, 0, 1])


def test_noise_of_equal_square_halves_the_squared_alignment():
    # In the metric `SCALE`, noise of the length of TRUE and at right angles to it, both signs: cos^2 = 1/2, mean exact.
    noise = np.array([2.0, -1.0, 0.0]) * np.sqrt(12 / 8)
    assert noise @ (SCALE * TRUE) == 0
    found = signal.alignment(np.array([TRUE + noise, TRUE - noise]), SCALE, TRUE, SQUARE)
    np.testing.assert_allclose(found["alignment"] ** 2, 0.5)
    # The product of the two is |TRUE|^2 - |noise|^2 = 0: no length of the mean is seen.
    assert np.isnan(found["alignment_of_mean"])
    four = signal.alignment(np.array([TRUE + noise, TRUE - noise] * 2), SCALE, TRUE, SQUARE)
    # Of 12 ordered pairs 4 have equal signs (square 24) and 8 opposite ones (0).
    np.testing.assert_allclose(four["alignment_of_mean"], np.sqrt(12 / 8))


def test_the_standard_error_is_the_jackknifes():
    rng = np.random.default_rng(0)
    gradients = TRUE + rng.normal(size=(5, 3))
    inner, square = gradients @ (SCALE * TRUE), np.sum(SCALE * gradients**2, axis=1)
    left_out = [
        np.delete(inner, i).mean() / np.sqrt(np.delete(square, i).mean() * SQUARE) for i in range(5)
    ]
    error = np.sqrt(4 / 5 * np.sum((left_out - np.mean(left_out)) ** 2))
    np.testing.assert_allclose(signal.alignment(gradients, SCALE, TRUE, SQUARE)["standard_error"], error)


@pytest.mark.parametrize("name", signal.VARIANTS)
def test_every_variant_is_one_that_a_run_would_take(name, tmp_path):
    strategy, budget, losses = signal.VARIANTS[name]
    config = signal.settings("lookup", 100, tmp_path, strategy, **budget)
    units = config.budget.roots * (1 + config.budget.continuations_per_root / 2)
    assert units in (255, 256) and set(losses) <= set(signal.LOSSES)


@pytest.mark.parametrize("name", signal.LOSSES)
def test_every_loss_is_one_that_a_run_would_take(name):
    config = experiment.get_config("arithmetic,trace")
    config.loss.update(signal.LOSSES[name])
    config_checks.check(config_lib.parse(config))


def test_the_table_is_of_means_over_seeds(tmp_path, capsys):
    figures = lambda a: {"alignment": a, "standard_error": 0.03, "tokens": 2000.0, "square_per_1000_tokens": a * a / 2}
    seeds = {"lookup-100": {"pcl/grpo": figures(0.2)}, "lookup-101": {"pcl/grpo": figures(0.4)}}
    (tmp_path / "signal.json").write_text(json.dumps({"seeds": seeds}))
    signal.report(tmp_path)
    last = [cell.strip() for cell in (tmp_path / "signal.md").read_text().splitlines()[-1].strip("|").split("|")]
    # sqrt(0.03^2 + 0.03^2) / 2 = 0.021; (0.02 + 0.08) / 2 = 0.05
    assert last == ["lookup", "pcl", "grpo", "0.300 +- 0.021", "2000", "0.0500", "2"]
    assert "0.300" in capsys.readouterr().out
