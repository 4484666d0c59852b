"""A second form of rollout trees for tests: nested objects and recursion, no arrays, no ids.

`Branch` is one node with its children inside it. A `Case` holds the same rollouts twice, as a `Branch` and as the
`RolloutTree` that `grow` makes of them. `Branch.index` is the id that the flat tree must give the node: rollout by
rollout, turn by turn. `cases()` draws random ones: bare rollouts, and continuations forked at their anchors.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from trace_jax.tree import grow
from trace_jax.types import Finish, Prompt, RolloutTree, Stage, Turn

SPEC_VECTORS = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "spec_vectors.json").read_text())


@dataclasses.dataclass
class Branch:
    """One node: the prompt (`turn` is None) or a turn."""

    index: int
    bare: bool
    turn: Turn | None
    prompt: list[int] = dataclasses.field(default_factory=list)
    children: list[Branch] = dataclasses.field(default_factory=list)

    def tokens(self) -> list[int]:
        return self.prompt if self.turn is None else [*self.turn.action.tolist(), *self.turn.observation.tolist()]

    def action_size(self) -> int:
        return 0 if self.turn is None else self.turn.action.size

    def preorder(self) -> Iterator[Branch]:
        yield self
        for child in self.children:
            yield from child.preorder()

    def leaves(self) -> list[Branch]:
        if not self.children:
            return [self] if self.turn is not None else []
        return [leaf for child in self.children for leaf in child.leaves()]

    def routes(self) -> list[list[Branch]]:
        """Every route from here to a leaf."""
        if not self.children:
            return [[self]]
        return [[self, *rest] for child in self.children for rest in child.routes()]


@dataclasses.dataclass
class Case:
    """The same rollouts in both forms."""

    root: Branch
    tree: RolloutTree

    def by_index(self) -> list[Branch]:
        """The nodes in the order of their flat ids."""
        return sorted(self.root.preorder(), key=lambda node: node.index)

    def routes(self) -> list[list[Branch]]:
        """Root-to-leaf routes, in the order of the leaves' ids."""
        return sorted(self.root.routes(), key=lambda route: route[-1].index)


def make_turn(action: int | Sequence[int], observation: int | Sequence[int], reward=None, success=None) -> Turn:
    """A turn of the given tokens, or of so many made-up ones. A reward makes it a rollout's last turn."""
    action = np.asarray(range(10, 10 + action) if isinstance(action, int) else action, np.int32)
    observation = np.asarray(range(50, 50 + observation) if isinstance(observation, int) else observation, np.int32)
    return Turn(
        action=action,
        logprobs=-0.125 * (1 + np.arange(action.size, dtype=np.float32) + action % 5).astype(np.float32),
        observation=observation,
        finish=Finish.TURN if reward is None else Finish.ANSWER,
        weight_version=3,
        reward=reward,
        success=success if success is not None or reward is None else float(reward >= 0.5),
    )


def chain(num_turns: int, reward: float, *, action: int = 2, observation: int = 1) -> list[Turn]:
    """A rollout of `num_turns` equal turns."""
    return [make_turn(action, observation) for _ in range(num_turns - 1)] + [make_turn(action, 0, reward)]


def build(
    bare: Sequence[Sequence[Turn]],
    forks: Sequence[tuple[int, int, Sequence[Turn]]] = (),
    *,
    uid: str = "prompt",
    prompt: Sequence[int] = (1, 2, 3),
) -> Case:
    """Both forms of bare rollouts, and of continuations (j, t, turns) after turn t >= 1 of bare rollout j >= 0."""
    root = Branch(index=0, bare=False, turn=None, prompt=list(prompt))
    count = 1
    bare_nodes: list[list[Branch]] = []
    for j, t, turns in [*((None, 0, turns) for turns in bare), *forks]:
        above = root if j is None else bare_nodes[j][t - 1]
        nodes = []
        for turn in turns:
            node = Branch(index=count, bare=j is None, turn=turn)
            above.children.append(node)
            nodes.append(node)
            above = node
            count += 1
        if j is None:
            bare_nodes.append(nodes)
    tree = grow.new_tree(Prompt(uid, np.asarray(prompt, np.int32), state=None))
    tree = grow.add_rollouts(tree, [(0, Stage.ROOT_ROLLOUT, turns) for turns in bare])
    tree = grow.add_rollouts(
        tree, [(bare_nodes[j][t - 1].index, Stage.CONTINUATION, turns) for j, t, turns in forks]
    )
    return Case(root, tree)


def worked_case() -> Case:
    """The worked tree of the specification: m = 2, N = 2, K = (2, 0, 2); ids 1-3 and 4-5 are the bare rollouts."""
    return build(
        bare=[chain(3, 1.0), chain(2, 0.0)],
        forks=[(0, 1, chain(1, 0.0)), (0, 1, chain(1, 1.0)), (1, 1, chain(1, 1.0)), (1, 1, chain(1, 0.0))],
    )


@st.composite
def _rollouts(draw, max_turns: int, min_last_action: int) -> list[Turn]:
    num_turns = draw(st.integers(1, max_turns))
    token = st.integers(0, 9)
    turns = [
        make_turn(draw(st.lists(token, min_size=1, max_size=3)), draw(st.lists(token, max_size=2)))
        for _ in range(num_turns - 1)
    ]
    # Success is drawn apart from the reward, so that a test notices where one is taken for the other.
    last = make_turn(
        draw(st.lists(token, min_size=min_last_action, max_size=3)),
        [],
        reward=draw(st.sampled_from([0.0, 1.0, 0.1, 0.7, -0.5])),
        success=draw(st.sampled_from([0.0, 1.0])),
    )
    return [*turns, last]


@st.composite
def cases(draw, max_rollouts: int = 4, max_turns: int = 4, max_forks: int = 5, min_last_action: int = 0) -> Case:
    """Random trees: 1 to `max_rollouts` bare rollouts, up to `max_forks` continuations at random anchors.

    `min_last_action` = 0 draws rollouts whose last turn sampled nothing too, 1 leaves them out.
    """
    rollouts = _rollouts(max_turns, min_last_action)
    bare = draw(st.lists(rollouts, min_size=1, max_size=max_rollouts))
    anchors = [(j, t) for j, turns in enumerate(bare) for t in range(1, len(turns))]
    places = draw(st.lists(st.sampled_from(anchors), max_size=max_forks)) if anchors else []
    forks = [(j, t, draw(rollouts)) for j, t in places]
    uid = draw(st.text("abc", min_size=1, max_size=4))
    return build(bare, forks, uid=uid, prompt=draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
