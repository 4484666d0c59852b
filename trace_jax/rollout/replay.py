"""Going on from any node of a tree: the environment's state there, by replaying, and the rollouts that start there.

A tree keeps tokens, not states; so tasks must be deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trace_jax.rollout.environment import Environment
from trace_jax.rollout.runner import Start
from trace_jax.tree import query
from trace_jax.types import Prompt, RolloutTree, Stage


async def states_at(
    environment: Environment, prompt: Prompt, tree: RolloutTree, nodes: Sequence[int] | np.ndarray
) -> tuple[dict[int, Any], int]:
    """({node: the environment's state after it} of `nodes` and of what is above them, tool calls that it took)."""
    timeout = environment.task.tool_timeout
    states, calls = {0: prompt.state}, 0
    for end in np.asarray(nodes).tolist():
        for node in query.path(tree, end).tolist():
            if node not in states:
                span = slice(tree.offset[node], tree.offset[node + 1])
                action = tree.token[span][tree.is_action[span]]
                result = await environment.step(states[int(tree.parent[node])], action, timeout)
                states[node] = result.state
                calls += result.tool_calls
    return states, calls


def continuation_starts(
    prompt: Prompt,
    tree: RolloutTree,
    states: Mapping[int, Any],
    anchors: Sequence[int] | np.ndarray,
    *,
    copies: int,
    first_leaf: int,
) -> list[list[Start]]:
    """Starts of `copies` continuations of each anchor.

    Leaves are numbered by node id from `first_leaf` on: no two nodes share a sampling key, whichever are asked for.
    """
    depth, size, starts = query.depth(tree), prompt.tokens.shape[0], []
    for node in np.asarray(anchors).tolist():
        history, first = query.prefix_tokens(tree, node), first_leaf + node * copies
        starts.append(
            [
                Start(node, Stage.CONTINUATION, leaf, history, states[node], int(depth[node]), size)
                for leaf in range(first, first + copies)
            ]
        )
    return starts
