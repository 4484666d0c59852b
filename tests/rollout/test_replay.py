"""States and starts behind a tree's nodes, on the tree that the adder's rules give by hand."""

import asyncio

from trace_jax.rollout import replay
from trace_jax.types import Stage


def test_states_are_those_of_the_actions_up_to_each_node(toy):
    tree = toy.hand_tree()
    states, calls = asyncio.run(replay.states_at(toy.environment(), toy.prompt(), tree, [2, 4]))
    assert {node: state.value for node, state in states.items()} == {0: 0, 1: 1, 2: 3, 4: 4} and calls == 3


def test_starts_have_the_history_and_a_key_of_their_own(toy):
    tree, prompt = toy.hand_tree(), toy.prompt()
    states, _ = asyncio.run(replay.states_at(toy.environment(), prompt, tree, [2, 4]))
    second, fourth = replay.continuation_starts(prompt, tree, states, [2, 4], copies=3, first_leaf=16)
    assert [s.leaf for s in second] == [22, 23, 24] and [s.leaf for s in fourth] == [28, 29, 30]
    assert {(s.turn, s.state.value, s.stage) for s in second} == {(2, 3, Stage.CONTINUATION)}
    question = toy.decode(prompt.tokens)
    assert toy.decode(second[0].history) == question + "+1\n=1\n+2\n=3\n" and second[0].prompt_tokens == len(question)
    assert (fourth[0].turn, fourth[0].node) == (1, 4)
