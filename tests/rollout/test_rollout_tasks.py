"""The real small tasks through the whole collection, played by their scripted expert."""

import asyncio

import numpy as np
import pytest

from trace_jax.budget.trace import Trace
from trace_jax.engines.scripted import ScriptedEngine
from trace_jax.rollout.environment import make_environment
from trace_jax.rollout.keys import prompt_key
from trace_jax.rollout.scheduler import collect_batch
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.tasks.arithmetic.task import Arithmetic
from trace_jax.tasks.lookup.task import Lookup
from trace_jax.tree import query
from trace_jax.types import Finish, NodeKind


class Half:
    """Predicts one half everywhere."""

    async def score_anchors(self, tree, anchors):
        return np.full(len(anchors), 0.5)


@pytest.mark.parametrize("family, level", [(Arithmetic, 3), (Lookup, 2)])
def test_an_expert_collects_full_trees(toy, family, level):
    task = family(0, {level: 1.0})
    environment = make_environment(task, tokenizers.build_tokenizer(task.symbols(), task.word_level))
    instances = [task.instance("train", index) for index in range(3)]
    prompts = [environment.prompt(instance) for instance in instances]

    def script(request):
        """Replays the history as text, line by line: the prompt, then pairs of action and observation."""
        instance = next(i for i in instances if prompt_key(i.uid) == request.key[3])
        lines = environment.decode(request.tokens).splitlines(keepends=True)
        state = instance.state
        assert lines[0] == instance.text
        for action, observation in zip(lines[1::2], lines[2::2], strict=True):
            result = task.step(state, action)
            assert result.observation == observation
            state = result.state
        return environment.encode(task.expert(state))

    results = asyncio.run(
        collect_batch(
            ScriptedEngine(script),
            environment,
            Trace(6, 2),
            Half(),
            prompts,
            np.array([2, 2, 2]),
            sampling=toy.sampling(limits=toy.limits(max_turns=task.max_turns, max_turn_tokens=32)),
            concurrency=4,
        )
    )
    for result, instance in zip(results, instances, strict=True):
        leaves = query.leaves(result.tree)
        assert result.tree.prompt_uid == instance.uid and leaves.size == 6 and result.counts.units == 4.0
        assert np.all(result.tree.success[leaves] == 1.0) and np.all(result.tree.finish[leaves] == Finish.ANSWER)
        # `level` calls, then the answer; each call of a bare rollout is an anchor
        assert query.depth(result.tree)[leaves].tolist() == [level + 1] * 6
        assert query.anchors(result.tree).size == 2 * level
        assert result.counts.tool_calls == np.count_nonzero(result.tree.kind == NodeKind.TURN)
