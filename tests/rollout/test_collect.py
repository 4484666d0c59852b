"""One prompt's tree, on the specification's worked example and on random trees whose delays change."""

import asyncio
import dataclasses

import numpy as np
import pytest

from trace_jax.budget.grpo import Grpo
from trace_jax.budget.trace import Trace
from trace_jax.engines.base import EngineError
from trace_jax.engines.scripted import ScriptedEngine
from trace_jax.rollout.collect import collect_prompt, sample_prompt
from trace_jax.rollout.keys import prompt_key
from trace_jax.rollout.runner import Runner
from trace_jax.rollout.slots import EpisodeSlots
from trace_jax.tree import query
from trace_jax.types import Finish, NodeKind, Stage

TRACE = Trace(root_budget=4, continuations_per_root=2)


class Table:
    """A predictor that reads its scores off a list, one per anchor."""

    def __init__(self, values):
        self.values, self.asked = values, []

    async def score_anchors(self, tree, anchors):
        self.asked.append(anchors.tolist())
        await asyncio.sleep(0)
        return np.array(self.values[: len(anchors)])


class Hashed:
    """A predictor that scores a history by its tokens alone."""

    async def score_anchors(self, tree, anchors):
        return np.array([query.prefix_tokens(tree, node).sum() % 11 / 10 for node in anchors])


def collect(toy, engine, predictor, *, strategy=TRACE, rollouts=2, environment=None, concurrency=64, uid="p"):
    runner = Runner(engine, environment or toy.environment(), toy.sampling(), EpisodeSlots(concurrency))
    return asyncio.run(collect_prompt(runner, strategy, predictor, toy.prompt(uid), rollouts))


# The worked tree of the specification, section 6.5: rollout 1 has three turns and succeeds (total even), rollout 2 has
# two turns and fails. Leaves 2 and 3 run on from (1,1), total 2, and return 0 and 1; leaves 4 and 5 from (2,1), total
# 1, and return 1 and 0.
WORKED = {
    0: ("+2\n", "+2\n", "!\n"),
    1: ("+1\n", "!\n"),
    2: (None, "+1\n", "!\n"),
    3: (None, "!\n"),
    4: (None, "+1\n", "!\n"),
    5: (None, "!\n"),
}


def worked_script(toy):
    return lambda request: toy.encode(WORKED[request.key[-2]][request.key[-1]])


def test_worked_tree(toy):
    engine, predictor = ScriptedEngine(worked_script(toy)), Table([0.6, 0.9, 0.3])
    collected = collect(toy, engine, predictor)
    tree = collected.tree.validate()
    # nodes: 0 root | 1 2 3 rollout 1 | 4 5 rollout 2 | 6 7, 8 from node 1 | 9 10, 11 from node 4
    assert tree.parent.tolist() == [-1, 0, 1, 2, 0, 4, 1, 6, 1, 4, 9, 4]
    assert predictor.asked == [[1, 2, 4]]
    turn, leaf = NodeKind.TURN, NodeKind.LEAF
    assert tree.kind.tolist() == [NodeKind.ROOT, turn, turn, leaf, turn, leaf, turn, leaf, leaf, turn, leaf, leaf]
    assert tree.stage.tolist() == [Stage.PROMPT] + [Stage.ROOT_ROLLOUT] * 5 + [Stage.CONTINUATION] * 6
    assert tree.success[[3, 5, 7, 8, 10, 11]].tolist() == [1, 0, 0, 1, 1, 0]
    assert tree.reward[[3, 5, 7, 8, 10, 11]] == pytest.approx([0.4, 0.1, 0.3, 0.2, 0.2, 0.1])
    assert tree.value[[1, 2, 4]] == pytest.approx([0.6, 0.9, 0.3]) and np.isnan(tree.value).sum() == 9
    # q = .6, .9, .7 give K = (2, 0, 2); cost 2 * 1 + 4 / 2
    assert collected.counts.units == 4.0 and collected.fallback_rollouts == 0 and collected.errors == ()
    # every "+d" is a tool call: 2 + 1 bare, 1 + 0 + 1 + 0 continued
    assert collected.counts.tool_calls == 5


def test_worked_tree_histories_keys_and_cache(toy):
    engine = ScriptedEngine(worked_script(toy))
    collected = collect(toy, engine, Table([0.6, 0.9, 0.3]), concurrency=1)  # one after the other
    by_key = {request.key[-2:]: toy.decode(request.tokens) for request in engine.requests}
    assert by_key == {
        (0, 0): "go\n",
        (0, 1): "go\n+2\n=2\n",
        (0, 2): "go\n+2\n=2\n+2\n=4\n",
        (1, 0): "go\n",
        (1, 1): "go\n+1\n=1\n",
        (2, 1): "go\n+2\n=2\n",
        (2, 2): "go\n+2\n=2\n+1\n=3\n",
        (3, 1): "go\n+2\n=2\n",
        (4, 1): "go\n+1\n=1\n",
        (4, 2): "go\n+1\n=1\n+1\n=2\n",
        (5, 1): "go\n+1\n=1\n",
    }
    assert {request.key[:-2] for request in engine.requests} == {(3, 0, 5, prompt_key("p"))}
    # tokens of each request that the engine knew, by hand: at a fork everything but the last token
    cached = [0, 5, 11, 2, 5, 8, 11, 8, 8, 11, 8]
    histories = [3, 9, 15, 3, 9, 9, 15, 9, 9, 15, 9]
    assert collected.counts.cached_tokens == sum(cached)
    assert collected.counts.prefilled_tokens == sum(histories) - sum(cached)
    assert collected.counts.generated_tokens == (3 + 3 + 2) + (3 + 2) + (3 + 2) + 2 + (3 + 2) + 2
    # four forks, each from a prefix of 9 tokens of which all but the last were known
    assert (collected.counts.prefix_tokens, collected.counts.prefix_cached_tokens) == (4 * 9, 4 * 8)
    assert {request.group for request in engine.requests} == {"p"}


def test_the_response_limit_counts_from_the_prompt_also_for_forks(toy):
    """The worked tree, at most 13 tokens behind the 3 of the prompt: the third turn of a path begins at token 15.

    So the answers of leaves 0, 2 and 4 are cut behind one token, "!"; leaves 2 and 4 start from a history of 9 tokens.
    """
    engine = ScriptedEngine(worked_script(toy))
    sampling = toy.sampling(limits=toy.limits(max_response_tokens=13))
    runner = Runner(engine, toy.environment(), sampling, EpisodeSlots(64))
    collected = asyncio.run(collect_prompt(runner, TRACE, Table([0.6, 0.9, 0.3]), toy.prompt(), 2))
    tree = collected.tree.validate()
    cut, answered = Finish.LENGTH, Finish.ANSWER
    leaves = [3, 5, 7, 8, 10, 11]
    assert tree.finish[leaves].tolist() == [cut, answered, cut, answered, cut, answered]
    assert [query.prefix_tokens(tree, leaf).size - 3 for leaf in leaves] == [13, 8, 13, 8, 13, 8]
    assert tree.reward[leaves] == pytest.approx([0.4, 0.1, 0.3, 0.2, 0.2, 0.1])  # of the state before the cut turn
    assert collected.counts.generated_tokens == (3 + 3 + 1) + (3 + 2) + (3 + 1) + 2 + (3 + 1) + 2
    assert {(r.tokens.size, r.max_new_tokens) for r in engine.requests} == {(3, 13), (9, 7), (15, 1)}


def test_flat_strategies_never_ask_the_predictor(toy):
    engine = ScriptedEngine(worked_script(toy))
    collected = collect(toy, engine, None, strategy=Grpo(2, 2))
    assert collected.tree.parent.tolist() == [-1, 0, 1, 2, 0, 4]
    assert collected.counts.units == 2.0 and np.all(np.isnan(collected.tree.value))


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Forks that are given; needs no predictor."""

    copies: tuple
    continuations_per_root: int = 2
    name: str = "fixed"
    needs_predictor: bool = False

    def forks(self, success, value, rollout, total, rng):
        assert value is None
        return np.array(self.copies)


def test_a_strategy_without_predictor_forks_too(toy):
    collected = collect(toy, ScriptedEngine(worked_script(toy)), None, strategy=Fixed((2, 0, 2)))
    assert query.leaf_count(collected.tree)[[1, 2, 4]].tolist() == [3, 1, 3]
    assert np.all(np.isnan(collected.tree.value))


@pytest.mark.parametrize("copies", [(2, 0, 1), (2, 2), (5, -1, 0)])
def test_forks_that_do_not_spend_the_budget_are_refused(toy, copies):
    with pytest.raises(ValueError, match="strategy fixed gave forks .* sum to 4"):
        collect(toy, ScriptedEngine(worked_script(toy)), None, strategy=Fixed(copies))


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.5, 1.5, 0.5], [0.5, np.nan, 0.5]])
def test_scores_that_are_no_probabilities_are_refused(toy, values):
    with pytest.raises(ValueError, match="value"):
        collect(toy, ScriptedEngine(worked_script(toy)), Table(values))


@pytest.mark.parametrize("rollouts, n, extra", [(2, 2, 2), (3, 1, 1), (1, 1, 0), (5, 3, 7)])
def test_fallback_without_an_anchor(toy, rollouts, n, extra):
    # floor(m N / 2): 2, 1, 0, 7. One-turn rollouts have no anchor.
    engine = ScriptedEngine(toy.lines("!\n"))
    collected = collect(toy, engine, Table([]), strategy=Trace(4, n), rollouts=rollouts)
    assert collected.fallback_rollouts == extra and collected.counts.units == rollouts + extra
    assert collected.tree.parent.tolist() == [-1] + [0] * (rollouts + extra)
    assert set(collected.tree.stage[1:].tolist()) == {Stage.ROOT_ROLLOUT}
    assert [request.key[-2] for request in engine.requests] == list(range(rollouts + extra))


def test_anchors_of_fallback_rollouts_are_not_forked(toy):
    def script(request):
        return toy.encode("!\n" if request.key[-2] < 2 or request.key[-1] else "+1\n")

    collected = collect(toy, ScriptedEngine(script), Table([]))
    assert collected.tree.parent.tolist() == [-1, 0, 0, 0, 3, 0, 5]
    assert collected.counts.units == 4.0


def test_no_unit_is_lost_when_everything_fails(toy):
    def refuse(request):
        raise EngineError("down")

    collected = collect(toy, ScriptedEngine(refuse), Table([]), rollouts=3)
    # 3 bare, no anchor, so 3 more bare: 6 scored leaves without an action for 6 units
    assert collected.tree.validate().finish[1:].tolist() == [Finish.ENGINE_ERROR] * 6
    assert collected.tree.reward[1:].tolist() == [0.0] * 6 and collected.counts.units == 6.0
    assert collected.errors == ("EngineError: down",) * 6


def test_failing_continuations_are_scored_leaves(toy):
    def script(request):
        if request.key[-2] >= 2:
            raise EngineError("down")
        return worked_script(toy)(request)

    collected = collect(toy, ScriptedEngine(script), Table([0.6, 0.9, 0.3]))
    tree = collected.tree.validate()
    assert tree.parent.tolist() == [-1, 0, 1, 2, 0, 4, 1, 1, 4, 4]
    assert tree.finish[6:].tolist() == [Finish.ENGINE_ERROR] * 4 and collected.counts.units == 4.0


def test_continuations_start_from_the_anchors_own_state(toy):
    starts = {}

    class Watched(toy.Adder):
        def step(self, state, action):
            result = super().step(state, action)
            starts.setdefault(id(state), []).append((state, action))
            return result

    environment = dataclasses.replace(toy.environment(), task=Watched())
    collect(toy, ScriptedEngine(worked_script(toy)), Table([0.6, 0.9, 0.3]), environment=environment)
    # The state behind (1,1) is one object: it met the factual turn and both continuations.
    met = [sorted(action for _, action in group) for group in starts.values() if group[0][0].actions == ("+2",)]
    assert met == [["!\n", "+1\n", "+2\n"]]


def test_sample_prompt_is_flat(toy):
    engine = ScriptedEngine(toy.random_script)
    runner = Runner(engine, toy.environment(), toy.sampling(), EpisodeSlots(2))
    collected = asyncio.run(sample_prompt(runner, toy.prompt(), 5))
    assert np.count_nonzero(collected.tree.parent == 0) == 5 == query.leaves(collected.tree).size
    assert collected.counts.units == 5.0 and collected.stage1_seconds > 0 == collected.stage2_seconds


@pytest.mark.parametrize("delay_seed", range(4))
def test_trees_do_not_depend_on_arrival_order(toy, delay_seed):
    def delay(request):
        return float(np.random.default_rng([delay_seed, *request.key]).exponential(0.002))

    def grown(delay, concurrency):
        engine = ScriptedEngine(toy.random_script, delay)
        return collect(toy, engine, Hashed(), rollouts=6, uid="q", concurrency=concurrency)

    straight, shuffled = grown(None, 1), grown(delay, (64, 5, 2, 1)[delay_seed])
    assert straight.tree.num_nodes > 20
    for field in dataclasses.fields(straight.tree):
        a, b = getattr(straight.tree, field.name), getattr(shuffled.tree, field.name)
        np.testing.assert_array_equal(a, b, strict=True)
    for name in ("units", "generated_tokens", "tool_calls"):
        assert getattr(straight.counts, name) == getattr(shuffled.counts, name)
    whole = straight.counts.prefilled_tokens + straight.counts.cached_tokens
    assert whole == shuffled.counts.prefilled_tokens + shuffled.counts.cached_tokens


def test_counts_equal_a_recount_of_the_tree(toy):
    collected = collect(toy, ScriptedEngine(toy.random_script), Hashed(), rollouts=6, uid="q")
    tree, counts = collected.tree, collected.counts
    assert counts.generated_tokens == tree.is_action.sum()
    # Each node is one request, whose history is the path above it.
    histories = sum(query.prefix_tokens(tree, int(tree.parent[i])).size for i in range(1, tree.num_nodes))
    assert counts.prefilled_tokens + counts.cached_tokens == histories
    continued = np.count_nonzero((tree.kind == NodeKind.LEAF) & (tree.stage == Stage.CONTINUATION))
    assert continued == 12 and counts.units == 6 + 12 / 2
