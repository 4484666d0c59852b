"""`validate()` accepts what the collector makes and names every way in which a value can be corrupt."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from tests.tree.tree_oracle import Case, cases, worked_case
from trace_jax.tree import grow
from trace_jax.types import Finish, Generation, NodeKind, PackedBatch, Prompt, RolloutTree, Stage

# Ids of the worked tree: 0 -> 1 -> 2 -> 3 and 0 -> 4 -> 5 are bare, 6 and 7 continue 1, 8 and 9 continue 4.
# Tokens 0-2 are the prompt; turn 1 owns 3-5 (two sampled, one observed), turn 2 owns 6-8.
TREE = worked_case().tree
NAN = np.nan


def changed(**edits: dict[int, float]) -> RolloutTree:
    """The worked tree with some elements of some arrays replaced."""
    arrays = {}
    for name, elements in edits.items():
        arrays[name] = getattr(TREE, name).copy()
        for index, value in elements.items():
            arrays[name][index] = value
    return dataclasses.replace(TREE, **arrays)


@given(cases())
def test_grown_trees_are_valid(case: Case):
    assert case.tree.validate() is case.tree


def test_an_unrolled_tree_is_valid():
    grow.new_tree(Prompt("p", np.ones(2, np.int32), state=None)).validate()


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"parent": {0: 0}}, "node 0 must be the root"),
        ({"kind": {0: NodeKind.TURN}}, "node 0 must be the root"),
        ({"parent": {4: 4}}, "node 4 has parent 4; a parent must be an earlier node"),
        ({"parent": {4: 7}}, "node 4 has parent 7"),
        ({"parent": {4: -1}}, "node 4 has parent -1"),
        ({"kind": {4: NodeKind.ROOT}}, "node 4 has kind 0"),
        ({"kind": {4: 7}}, "node 4 has kind 7"),
        ({"kind": {2: NodeKind.LEAF}}, "node 2 is a leaf with children"),
        ({"kind": {9: NodeKind.TURN}}, "node 9 is a turn without a continuation"),
        ({"stage": {0: Stage.ROOT_ROLLOUT}}, "node 0 has stage 1"),
        ({"stage": {6: Stage.PROMPT}}, "node 6 has stage 0"),
        ({"stage": {6: 5}}, "node 6 has stage 5"),
        ({"stage": {2: Stage.CONTINUATION}}, "node 3 is a root rollout below a continuation"),
        ({"stage": {4: Stage.CONTINUATION, 5: Stage.CONTINUATION}}, "node 4 is a continuation of the prompt"),
        ({"stage": {6: Stage.ROOT_ROLLOUT}}, "node 1 has 2 root-rollout children"),
        ({"stage": {3: Stage.CONTINUATION}}, "node 2 has 0 root-rollout children"),
        ({"finish": {2: Finish.TURN_LIMIT}}, "node 2 has finish 2; a turn that goes on has 0"),
        ({"finish": {3: Finish.TURN}}, "node 3 has finish 0"),
        ({"finish": {3: 9}}, "node 3 has finish 9"),
        ({"finish": {3: -1}}, "node 3 has finish -1"),
        ({"weight_version": {0: 3}}, "the root has weight version 3"),
        ({"weight_version": {5: -1}}, "node 5 holds sampled tokens but has weight version -1"),
        ({"value": {1: 1.5}}, "value is 1.5"),
        ({"value": {1: -np.inf}}, "value is -inf"),
        ({"offset": {0: 1}}, "offset must rise from 0"),
        ({"offset": {2: 12}}, "offset must rise from 0"),
        ({"offset": {-1: 27}}, "offset must rise from 0 to 24 in 11 steps"),
        ({"offset": {1: 0}}, "the prompt has no tokens"),
        ({"is_action": {1: True}}, "the prompt holds action tokens"),
        ({"is_action": {3: False}, "logprob": {3: 0.0}}, "follows an observation token within one turn"),
        ({"is_action": {3: False, 4: False}, "logprob": {3: 0.0, 4: 0.0}}, "node 1 goes on without an action token"),
        ({"logprob": {3: NAN}}, "missing or positive log-prob"),
        ({"logprob": {3: -np.inf}}, "missing or positive log-prob"),
        ({"logprob": {3: 0.5}}, "missing or positive log-prob"),
        ({"logprob": {5: -1.0}}, "not sampled carries a log-prob"),
        ({"logprob": {0: NAN}}, "not sampled carries a log-prob"),
        ({"reward": {3: NAN}}, "leaf 3 has reward nan"),
        ({"reward": {3: np.inf}}, "leaf 3 has reward inf"),
        ({"success": {3: NAN}}, "leaf 3 has reward 1.0 and success nan"),
        ({"success": {3: 0.5}}, "success of 0 or 1"),
        ({"reward": {2: 1.0}}, "node 2 carries a reward or a success"),
        ({"success": {0: 1.0}}, "node 0 carries a reward or a success"),
    ],
)
def test_each_corruption_of_a_tree_is_named(edits, message):
    with pytest.raises(ValueError, match=message) as error:
        changed(**edits).validate()
    assert str(error.value).startswith("tree 'prompt': ") and "\n" not in str(error.value)


NODE_ARRAYS = ["parent", "kind", "stage", "finish", "weight_version", "reward", "success", "value"]


@pytest.mark.parametrize("name", [*NODE_ARRAYS[1:], "offset", "is_action", "logprob"])
def test_an_array_of_another_length_is_named(name):
    with pytest.raises(ValueError, match=f"{name} is .* expected"):
        dataclasses.replace(TREE, **{name: getattr(TREE, name)[:-1]}).validate()


@pytest.mark.parametrize("name", [*NODE_ARRAYS, "offset", "token", "is_action", "logprob"])
def test_an_array_of_another_dtype_is_named(name):
    with pytest.raises(ValueError, match=f"{name} is (float64|complex128)"):
        array = getattr(TREE, name)
        dataclasses.replace(TREE, **{name: array.astype(np.float64)}).validate()


def test_a_turn_that_ended_before_sampling_needs_no_weight_version():
    prompt = Prompt("p", np.ones(1, np.int32), state=None)
    leaf = dataclasses.replace(
        grow.new_tree(prompt),
        parent=np.array([-1, 0], np.int32),
        kind=np.array([NodeKind.ROOT, NodeKind.LEAF], np.int8),
        stage=np.array([Stage.PROMPT, Stage.ROOT_ROLLOUT], np.int8),
        finish=np.array([Finish.TURN, Finish.ENGINE_ERROR], np.int8),
        weight_version=np.array([-1, -1], np.int32),
        offset=np.array([0, 1, 1], np.int32),
        reward=np.array([NAN, 0.0], np.float32),
        success=np.array([NAN, 0.0], np.float32),
        value=np.array([NAN, NAN], np.float32),
    )
    assert leaf.validate().num_nodes == 2


def test_node_and_action_counts():
    assert TREE.num_nodes == 10
    assert TREE.action_counts().tolist() == [0, 2, 2, 2, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    "tokens", [np.zeros(0, np.int32), np.zeros(2, np.int64), np.zeros((1, 2), np.int32)], ids=["empty", "int64", "2-D"]
)
def test_a_malformed_prompt_is_named(tokens):
    with pytest.raises(ValueError, match="prompt 'p': tokens must be a non-empty int32 vector"):
        Prompt("p", tokens, state=None).validate()


def generation(logprobs, tokens=(1, 2)) -> Generation:
    return Generation(np.array(tokens, np.int32), np.array(logprobs, np.float32), True, 0, 4, 0)


def test_a_good_prompt_and_a_good_generation_come_back():
    prompt = Prompt("p", np.ones(1, np.int32), state=None)
    assert prompt.validate() is prompt
    for good in (generation([-1.0, 0.0]), generation([-1.0, 5e-5])):  # a rounding error above 0 is no error
        assert good.validate() is good


@pytest.mark.parametrize(
    ("logprobs", "tokens", "message"),
    [
        ([-1.0], (1, 2), r"\(2,\) tokens and \(1,\) log-probs"),
        ([], (), "at least one token"),
        ([-1.0, NAN], (1, 2), "log-prob nan of token 1"),
        ([-np.inf, -1.0], (1, 2), "log-prob -inf of token 0"),
        ([-1.0, 0.01], (1, 2), "of token 1; log-probs must be finite and <= 0"),
    ],
)
def test_a_generation_with_a_log_prob_missing_is_named(logprobs, tokens, message):
    with pytest.raises(ValueError, match=message):
        generation(logprobs, tokens).validate()


def test_the_shape_of_a_batch_is_that_of_its_rows():
    fields = {field.name: np.zeros((2, 5)) for field in dataclasses.fields(PackedBatch)}
    assert PackedBatch(**fields).shape == (2, 5)
