"""States and starts behind a tree's nodes, on the tree that the adder's rules give by hand."""

import asyncio

import numpy as np

from trace_jax.rollout import replay
from trace_jax.tree import grow
from trace_jax.types import Finish, Stage, Turn


def hand_tree(toy):
    """Node 1 "+1", 2 "+2", 3 "!" (leaf); node 4 "+4", 5 "!" (leaf)."""

    def turn(action, observation, finish=Finish.TURN, **outcome):
        action = toy.encode(action)
        return Turn(action, np.zeros(action.size, np.float32), toy.encode(observation), finish, 0, **outcome)

    first = [turn("+1\n", "=1\n"), turn("+2\n", "=3\n"), turn("!\n", "", Finish.ANSWER, reward=0.3, success=0.0)]
    second = [turn("+4\n", "=4\n"), turn("!\n", "", Finish.ANSWER, reward=0.4, success=1.0)]
    return grow.add_rollouts(
        grow.new_tree(toy.prompt()), [(0, Stage.ROOT_ROLLOUT, first), (0, Stage.ROOT_ROLLOUT, second)]
    )


def test_states_are_those_of_the_actions_up_to_each_node(toy):
    tree = hand_tree(toy)
    states, calls = asyncio.run(replay.states_at(toy.environment(), toy.prompt(), tree, [2, 4]))
    assert {node: state.value for node, state in states.items()} == {0: 0, 1: 1, 2: 3, 4: 4} and calls == 3


def test_starts_have_the_history_and_a_key_of_their_own(toy):
    tree, prompt = hand_tree(toy), toy.prompt()
    states, _ = asyncio.run(replay.states_at(toy.environment(), prompt, tree, [2, 4]))
    second, fourth = replay.continuation_starts(prompt, tree, states, [2, 4], copies=3, first_leaf=16)
    assert [s.leaf for s in second] == [22, 23, 24] and [s.leaf for s in fourth] == [28, 29, 30]
    assert {(s.turn, s.state.value, s.stage) for s in second} == {(2, 3, Stage.CONTINUATION)}
    question = toy.decode(prompt.tokens)
    assert toy.decode(second[0].history) == question + "+1\n=1\n+2\n=3\n" and second[0].prompt_tokens == len(question)
    assert (fourth[0].turn, fourth[0].node) == (1, 4)
