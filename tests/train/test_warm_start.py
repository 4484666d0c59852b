"""The warm start: what is trained and with which weight, that it learns, and when its cache is believed."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from trace_jax.models.config import DecoderConfig
from trace_jax.tasks.arithmetic.task import Arithmetic
from trace_jax.tasks.base import Outcome
from trace_jax.tasks.demonstrations import Demonstration, demonstrate
from trace_jax.tasks.tokenizer import build_tokenizer, encode
from trace_jax.train import sharding, warm_start
from trace_jax.types import Finish, Stage

TASK = Arithmetic(0, {1: 1.0}, max_number=9)
TOKENIZER = build_tokenizer(TASK.symbols(), TASK.word_level)
MODEL = DecoderConfig(
    vocab_size=len(TOKENIZER), hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=24
)
SETTINGS = warm_start.WarmStart(
    steps=12,
    demonstrations=8,
    distinct=32,
    slip_rate=0.1,
    learning_rate=2e-2,
    row_length=32,
    micro_rows=4,
    seed=0,
)


def ids(text):
    return encode(TOKENIZER, text)


def text_of(tokens):
    return TOKENIZER.backend_tokenizer.decode(list(tokens))


def tree(*turns, prompt="(1+2)\n", success=1.0):
    return warm_start.demonstration_tree(ids, Demonstration(prompt, turns, Outcome(success, success)), "demo/0")


def train(settings=SETTINGS, task=TASK, start=None):
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    losses, note = [], lambda step, nll: losses.append((step, nll))
    params = warm_start.train(MODEL, mesh, task, ids, settings, note, start=start)
    return params, losses


@pytest.fixture(scope="module")
def trained():
    return train()


def test_a_demonstration_is_a_tree_of_one_path():
    got = tree(("1+2\n", "3\n"), ("=3\n", "")).validate()
    assert got.prompt_uid == "demo/0" and got.parent.tolist() == [-1, 0, 1]
    assert got.finish.tolist()[1:] == [Finish.TURN, Finish.ANSWER]
    assert set(got.stage.tolist()[1:]) == {Stage.ROOT_ROLLOUT}
    assert text_of(got.token) == "(1+2)\n1+2\n3\n=3\n"
    assert text_of(got.token[got.is_action]) == "1+2\n=3\n"
    assert np.all(got.logprob == 0) and got.success[-1] == 1 and got.reward[-1] == 1


def test_observations_can_be_cut_as_a_rollouts_are():
    played = Demonstration("(1+2)\n", (("1+2\n", "3\n"), ("=3\n", "")), Outcome(1.0, 1.0))
    got = warm_start.demonstration_tree(ids, played, "demo/0", observe=lambda text: ids(text)[-1:])
    assert text_of(got.token) == "(1+2)\n1+2\n\n=3\n"


def test_only_actions_are_trained_each_token_the_same():
    trees = [tree(("1+2\n", "3\n"), ("=3\n", "")), tree(("=9\n", ""), success=0.0), tree(("2+2\n", "4\n"), ("=4\n", ""))]
    batch = warm_start.demonstration_batch(trees, row_length=24, rows_multiple=4)
    # Actions: 4 + 3, then 3, then 4 + 3 tokens; also those of the demonstration that failed.
    trained = batch.weight != 0
    assert trained.sum() == 17 and not np.any(trained & ~batch.is_action)
    np.testing.assert_allclose(batch.weight[trained], 1 / 17)
    assert batch.weight.sum() == pytest.approx(1)
    assert sorted(text_of(batch.token[trained])) == sorted("1+2\n=3\n" "=9\n" "2+2\n=4\n")
    assert np.all(batch.prev[trained] >= 0)
    assert batch.shape[0] % 4 == 0 and batch.shape[1] == 24


def test_weights_of_real_demonstrations_sum_to_one():
    rng = np.random.default_rng(1)
    trees = [
        warm_start.demonstration_tree(ids, demonstrate(TASK, TASK.instance("demo", i), rng, 0.5), f"demo/{i}")
        for i in range(20)
    ]
    batch = warm_start.demonstration_batch(trees, row_length=64, rows_multiple=8)
    actions = sum(int(t.is_action.sum()) for t in trees)
    assert np.count_nonzero(batch.weight) == actions and batch.weight.sum() == pytest.approx(1, rel=1e-5)


def test_loss_starts_at_a_guess_and_falls(trained):
    _, losses = trained
    assert [step for step, _ in losses] == list(range(SETTINGS.steps))
    # Small embeddings: the first prediction is nearly uniform over the vocabulary.
    assert losses[0][1] == pytest.approx(np.log(MODEL.vocab_size), abs=0.1)
    assert losses[-1][1] < 0.8 * losses[0][1]


def test_equal_settings_give_equal_bits_and_another_seed_does_not(trained):
    params, losses = trained
    again, losses_again = train()
    assert losses_again == losses
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), params, again)
    assert all(jax.tree.leaves(same))
    assert train(dataclasses.replace(SETTINGS, seed=1, steps=2))[1] != losses[:2]


def test_no_steps_leave_the_first_parameters():
    params, losses = train(dataclasses.replace(SETTINGS, steps=0))
    assert losses == [] and np.all(np.isfinite(params["embed"]["embedding"]))


def test_training_goes_on_from_given_parameters(trained):
    params, losses = trained
    _, more = train(dataclasses.replace(SETTINGS, steps=1, seed=1), start=params)
    assert more[0][1] < losses[-2][1]  # other demonstrations, but what was learnt is there
    unchanged, _ = train(dataclasses.replace(SETTINGS, steps=0), start=params)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), params, unchanged)))


class Shared:
    """The task with a line that every prompt begins with; `told`: whether it is told so."""

    stop, max_turns = TASK.stop, TASK.max_turns

    def __init__(self, told):
        self.preamble = "9\n" * told

    def instance(self, split, index):
        """The question behind that line."""
        instance = TASK.instance(split, index)
        return dataclasses.replace(instance, text="9\n" + instance.text)

    def __getattr__(self, name):
        return getattr(TASK, name)


def test_what_all_prompts_begin_with_stands_once_in_a_row():
    """The same likelihoods with one row a demonstration and the line in each, from fewer tokens."""
    settings = dataclasses.replace(SETTINGS, steps=3)
    losses = [[nll for _, nll in train(settings, Shared(told))[1]] for told in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    trees = [
        warm_start.demonstration_tree(
            ids, demonstrate(Shared(True), Shared(True).instance("demo", i), np.random.default_rng(0), 0.0), "d", "9\n"
        )
        for i in range(4)
    ]
    tokens = [
        int(np.sum(warm_start.demonstration_batch(trees, 96, 1, trunk).end > 0)) for trunk in (ids("9\n"), ids(""))
    ]
    assert tokens[1] - tokens[0] == 3 * len(ids("9\n"))  # four demonstrations in one row: the line is held once


def test_fewer_demonstrations_than_a_step_takes():
    _, losses = train(dataclasses.replace(SETTINGS, steps=1, distinct=3, demonstrations=8))
    assert len(losses) == 1


def test_a_demonstration_longer_than_a_row_is_named_before_training():
    with pytest.raises(ValueError, match=r"demonstration demo/\d+ has \d\d tokens, but row_length is 9; lengthen"):
        train(dataclasses.replace(SETTINGS, row_length=9))


def test_the_cache_is_believed_for_exactly_its_settings(tmp_path):
    folder, record = tmp_path / "warm" / "arithmetic", {"task": "arithmetic", "weights": (1.0, 2.0), "steps": 3}
    assert not warm_start.cached(folder, record)
    warm_start.begin(folder)
    assert folder.is_dir() and not warm_start.cached(folder, record)
    warm_start.mark(folder, record)
    assert warm_start.cached(folder, record) and warm_start.cached(folder, {**record, "weights": [1.0, 2.0]})
    for other in ({**record, "steps": 4}, {**record, "more": 1}, {"task": "arithmetic"}):
        assert not warm_start.cached(folder, other)
    # Training begins anew: until it is finished the folder promises nothing, whatever it held.
    warm_start.begin(folder)
    assert not warm_start.cached(folder, record)


def test_a_damaged_record_is_no_cache(tmp_path):
    warm_start.mark(tmp_path, {"steps": 3})
    (tmp_path / "warm_start.json").write_text('{"steps": ')
    assert not warm_start.cached(tmp_path, {"steps": 3})
