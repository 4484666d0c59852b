"""The alignment of gradients: closed forms, the table, and that every loss and budget is one that a run would take."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.spatial

from experiments.predictor import config as experiment
from experiments.predictor import signal
from trace_jax import config as config_lib
from trace_jax import config_checks

SCALE = np.array([1.0, 4.0, 0.25])
TRUE = np.array([2.0, 1.0, -4.0])
SQUARE = 4.0 + 4.0 + 4.0  # sum of SCALE * TRUE^2


def test_the_true_gradient_is_aligned_at_any_length_and_either_sign():
    found = signal.cosines(np.array([TRUE, TRUE * 3, -TRUE / 2]), SCALE, TRUE, SQUARE)
    np.testing.assert_allclose(found, [1, 1, -1])


def test_noise_of_equal_square_halves_the_squared_cosine():
    # In the metric `SCALE`, noise of the length of TRUE and at right angles to it.
    noise = np.array([2.0, -1.0, 0.0]) * np.sqrt(12 / 8)
    assert noise @ (SCALE * TRUE) == 0
    found = signal.cosines(np.array([TRUE + noise, TRUE - noise, noise]), SCALE, TRUE, SQUARE)
    np.testing.assert_allclose(found, [np.sqrt(0.5), np.sqrt(0.5), 0], atol=1e-12)


def test_a_step_that_learns_nothing_gains_nothing():
    np.testing.assert_array_equal(signal.cosines(np.zeros((1, 3)), SCALE, TRUE, SQUARE), [0.0])


def test_a_true_gradient_that_is_noise_is_refused():
    with pytest.raises(ValueError, match="estimated as -1; raise --reference"):
        signal.cosines(np.ones((2, 3)), SCALE, TRUE, -1.0)


@pytest.mark.parametrize("given", ["--batches=1", "--reference=128", "--reference=0", "--reference=-256"])
def test_too_little_to_measure_with_is_refused(given, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["signal", given])
    with pytest.raises(SystemExit):
        signal.main()
    assert "--batches is at least 2, --reference a multiple of 256" in capsys.readouterr().err


def test_the_cosine_is_euclids_in_coordinates_that_make_the_metric_flat():
    rng = np.random.default_rng(0)
    gradients, true = rng.normal(size=(4, 7)), rng.normal(size=7)
    scale = rng.uniform(0.1, 5, size=7)
    flat, along = gradients * np.sqrt(scale), true * np.sqrt(scale)
    expected = [1 - scipy.spatial.distance.cosine(each, along) for each in flat]
    np.testing.assert_allclose(signal.cosines(gradients, scale, true, float(along @ along)), expected)


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


def test_the_table_is_of_means_over_batches_and_seeds(tmp_path, capsys):
    batches = lambda cosines, tokens: {"cosines": cosines, "tokens": tokens}
    default = batches([0.0, 0.4], [1000, 3000])
    seeds = {
        "lookup-100": {signal.DEFAULT: default, "pcl/grpo": batches([0.1, 0.3], [2000, 2000])},
        "lookup-101": {signal.DEFAULT: default, "pcl/grpo": batches([0.3, 0.5], [1000, 3000])},
    }
    (tmp_path / "signal.json").write_text(json.dumps({"seeds": seeds}))
    signal.report(tmp_path)
    lines = (tmp_path / "signal.md").read_text().splitlines()[-2:]
    first, last = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    # Two batches at distance d: variance d^2 / 2, of their mean d^2 / 4. Two seeds of d = 0.4: sqrt(2 * 0.04) / 2.
    assert first == ["lookup", "trace", "tree_rloo", "0.200 +- 0.141", "-", "2000", "0.0200", "4"]
    # d = 0.2: sqrt(2 * 0.01) / 2. Differences 0.1, -0.1 and 0.3, 0.1: means 0 and 0.2, d = 0.2. 1000 * 0.09 / 2000.
    assert last == ["lookup", "pcl", "grpo", "0.300 +- 0.071", "+0.100 +- 0.071", "2000", "0.0450", "4"]
    assert "+0.100" in capsys.readouterr().out


def test_the_published_table_follows_from_the_kept_cosines(tmp_path):
    folder = Path(signal.__file__).parent
    (tmp_path / "signal.json").write_text((folder / "signal.json").read_text())
    signal.report(tmp_path)
    assert (tmp_path / "signal.md").read_text() == (folder / "signal.md").read_text()
