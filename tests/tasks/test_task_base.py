import collections

import numpy as np
import pytest

from trace_jax.tasks import base


def test_instance_rng_is_a_function_of_all_three_arguments():
    draw = lambda *key: tuple(base.instance_rng(*key).integers(1 << 40, size=3))
    keys = [(seed, split, index) for seed in (0, 1) for split in base.SPLITS for index in (0, 1, 7)]
    assert [draw(*key) for key in keys] == [draw(*key) for key in reversed(keys)][::-1]
    assert len({draw(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    ("split", "index", "message"),
    [("test", 0, "split is 'test', must be one of train, eval, demo"), ("eval", -1, "index of the eval split is -1")],
)
def test_instance_rng_names_a_bad_argument(split, index, message):
    with pytest.raises(ValueError, match=message):
        base.instance_rng(0, split, index)


def test_check_seed():
    assert base.check_seed(3, task="toy") == 3
    with pytest.raises(ValueError, match="toy: seed is -1"):
        base.check_seed(-1, task="toy")


def test_owner_gives_train_half_and_the_others_a_quarter_of_all_texts():
    # 4,000 independent draws: the standard error of a share is at most sqrt(0.25 / 4000) = 0.008, and 5 * 0.008 = 0.04.
    share = collections.Counter(base.owner(f"{i}+{j}") for i in range(50) for j in range(80))
    assert share["train"] / 4000 == pytest.approx(0.5, abs=0.04)
    assert share["eval"] / 4000 == pytest.approx(0.25, abs=0.04)
    assert share["demo"] / 4000 == pytest.approx(0.25, abs=0.04)


def test_owner_does_not_change_between_releases():
    # Golden: a text that changed hands would leak held-out questions into a run that resumes from an older warm start.
    owners = [base.owner(text) for text in ("1+2\n", "3*4\n", "5-6\n", "7+8\n", "9*1\n", "2-2\n")]
    assert owners == ["train", "demo", "eval", "train", "demo", "eval"]


def test_difficulty_normalises_weights_and_leaves_out_zeros():
    difficulty = base.difficulty_of({3: 1.0, 1: 3.0, 2: 0.0}, task="toy", unit="hops", highest=5)
    assert difficulty.levels.tolist() == [1, 3]
    assert difficulty.probability.tolist() == [0.75, 0.25]
    rng = np.random.default_rng(0)
    drawn = collections.Counter(difficulty.draw(rng) for _ in range(2000))
    assert set(drawn) == {1, 3}
    assert drawn[1] / 2000 == pytest.approx(0.75, abs=0.05)  # five standard errors: 5 * sqrt(.75 * .25 / 2000) = 0.048


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "difficulty is empty"),
        ({0: 1.0}, "level 0; hops are integers in 1..5"),
        ({6: 1.0}, "level 6; hops are integers in 1..5"),
        ({1.5: 1.0}, "level 1.5"),
        ({"1": 1.0}, "level '1'"),
        ({True: 1.0}, "level True"),
        ({1: -0.5}, "gives 1 hops weight -0.5"),
        ({1: float("nan")}, "weight nan"),
        ({1: float("inf")}, "weight inf"),
        ({1: 0.0, 2: 0.0}, "all difficulty weights are 0"),
    ],
)
def test_difficulty_names_the_bad_weight(weights, message):
    with pytest.raises(ValueError, match=f"toy: .*{message}") as caught:
        base.difficulty_of(weights, task="toy", unit="hops", highest=5)
    assert "\n" not in str(caught.value)
