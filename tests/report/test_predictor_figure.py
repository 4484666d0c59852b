"""The figure and tables of a predictor's report: what they say, and that what is missing leaves them standing."""

import sys

import numpy as np
import pytest

from trace_jax.eval.predictor_measures import Scored
from trace_jax.eval.regret import Measured
from trace_jax.report import predictor_figure, predictor_tables

FIGURES = {
    "uniform_rollouts": 8.0,
    "root/items": 64.0,
    "root/brier": 0.1875,
    "root/spearman": float("nan"),
    "root/plugged_in": 0.12,
    "root/effective_ratio_learned": 0.5,
    "root/effective_ratio_oracle": 0.8,
    "root/effective_ratio_share_of_oracle": 0.625,
    "anchor/items": 0.0,
    "depth_0/items": 64.0,
    "depth_0/brier": 0.1875,
    "depth_0/brier_class": 0.2,
    "depth_0/brier_perfect": 0.125,
    "depth_4/items": 3.0,
    "depth_4/brier": 0.2,
    "depth_4/brier_class": 0.3,
    "depth_4/brier_perfect": 0.1,
}
ROWS = [
    {"step": 0, "eval/success": 0.5},
    {"step": 1, "rollout/success": 0.5, "predictor/brier": 0.2, "predictor/bias_depth_4": None},
    {"step": 2, "rollout/success": 0.6, "predictor/brier": 0.1, "predictor/bias_depth_4": 0.1},
]


def scored(size):
    rng = np.random.default_rng(0)
    return Scored(rng.random(size), Measured(rng.binomial(4, 0.5, size), np.full(size, 4)), [""] * size, np.zeros(size))


def test_tables_show_what_is_there():
    plain, markdown = predictor_tables.tables(FIGURES), predictor_tables.tables(FIGURES, markdown=True)
    rows = {line.split("  ")[0]: line.split() for line in plain.splitlines()}
    assert rows["learned"][1:] == ["0.500", "-", "-"] and rows["oracle"][1:] == ["0.800", "-", "-"]
    assert rows["learned / oracle"][-3:] == ["0.625", "-", "-"]
    assert rows["prompts"] == ["prompts", "64", "-", "0.188", "-", "-", "-", "-", "-"]
    assert "anchors" not in rows and "depth 3" not in rows  # none were measured
    assert rows["depth 4+"][2:] == ["3", "-", "0.200", "0.300", "-", "0.100", "-", "-"]
    assert "What the allocator buys (uniform: 8 rollouts of each prompt)" in plain
    note = "12% of the chosen prompts get more rollouts than judge them, so contrast looks too rare; raise --rollouts"
    assert plain.endswith(f"a share may exceed 1.\n\n{note}")
    assert "| learned / oracle" in markdown and "**How good the scores are**" in markdown


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws and gives back the axes, which the function closes."""
    from matplotlib import pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)

    def draw(*arguments):
        path = tmp_path / "picture.png"
        predictor_figure.draw(path, "a run", *arguments)
        figure = plt.gcf()
        monkeypatch.undo()
        plt.close(figure)
        return path.read_bytes(), figure.axes

    return draw


def test_the_figure_holds_the_numbers(drawn):
    roots = scored(64)
    content, axes = drawn(FIGURES, roots, scored(0), ROWS)
    assert content.startswith(b"\x89PNG\r\n") and len(content) > 20_000 and len(axes) == 9
    shares = [bar.get_height() for bar in axes[0].patches]
    expected = np.histogram(roots.score, bins=10, range=(0, 1))[0] / 64
    np.testing.assert_allclose(shares, expected)
    assert [t.get_text() for t in axes[1].texts] == ["no anchors"]
    heights = [bar.get_height() for bar in axes[2].patches]  # three measures of each allocation in turn
    assert (heights[6], heights[9]) == (0.5, 0.8) and np.isnan(heights).sum() == 10
    assert "62% of oracle" in axes[2].get_xticklabels()[0].get_text()
    assert [bar.get_height() for bar in axes[3].patches] == [0.2, 0.3, 0.1875, 0.2, 0.125, 0.1]
    assert axes[4].lines[0].get_xydata().tolist() == [[1, 0.5], [2, 0.6]]
    assert axes[7].lines[0].get_xydata().tolist() == [[2, 0.1]]  # where it is known
    assert [t.get_text() for t in axes[8].texts] == ["not in metrics.jsonl"]


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"the figure needs matplotlib; pip install 'trace_jax\[plots\]'"):
        predictor_figure.draw(tmp_path / "x.png", "", {}, scored(2), scored(0), [])
