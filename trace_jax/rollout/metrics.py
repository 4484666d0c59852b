"""What a step's rollouts cost and what they are worth, as the `rollout/` metrics of the run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_jax.budget.account import BudgetCount
from trace_jax.rollout.collect import Collected
from trace_jax.tree import metrics
from trace_jax.types import RolloutTree, Stage


def rollout_metrics(collected: Sequence[Collected], trees: Sequence[RolloutTree], pool: int) -> dict[str, float]:
    """Counts and shares of one step, by name.

    `prefix_hit_rate`: of the tokens of all forked prefixes H_t, the share that came from the engine's cache when the
    fork was made; at most (n - 1) / n for a prefix of n tokens, whose last one is always computed. What all prompts
    begin with (few-shot examples) is left out. 1 without forks.
    `format_valid_share`: of what was meant as tool calls, the share that could be carried out. 1 without any.
    `mixed_version_trees`: trees whose turns were sampled from more than one set of weights.

    Args:
      collected: one a tree.
      trees: the same trees, with what was added since.
      pool: prompts that were drawn.
    """
    counts = sum((c.counts for c in collected), BudgetCount())
    useful, calls = metrics.useful_groups(trees), counts.tool_calls + counts.failed_calls
    report = {
        "effective_ratio": metrics.effective_ratio(trees),
        "useful_groups": useful,
        "useful_groups_per_unit": useful / max(counts.units, 1),
        "active_prompts": len(trees),
        "skipped_prompts": pool - len(trees),
        "budget_units": counts.units,
        "generated_tokens": counts.generated_tokens,
        "prefilled_tokens": counts.prefilled_tokens,
        "cached_tokens": counts.cached_tokens,
        "prefix_hit_rate": counts.prefix_cached_tokens / counts.prefix_tokens if counts.prefix_tokens else 1.0,
        "tool_calls": counts.tool_calls,
        "format_valid_share": counts.tool_calls / calls if calls else 1.0,
        "success": metrics.success_rate(trees),
        "root_rollouts": metrics.num_rollouts(trees, Stage.ROOT_ROLLOUT),
        "continuations": metrics.num_rollouts(trees, Stage.CONTINUATION),
        "fallback_rollouts": sum(c.fallback_rollouts for c in collected),
        "mixed_version_trees": sum(_versions(tree).size > 1 for tree in trees),
        "errors": sum(len(c.errors) for c in collected),
    }
    report |= {f"finish_{name}": count for name, count in metrics.finish_counts(trees).items()}
    return {f"rollout/{name}": value for name, value in report.items()}


def staleness(trees: Sequence[RolloutTree], version: int) -> float:
    """How many versions older than `version` the weights were that sampled the trees: mean over sampled tokens."""
    tokens = [tree.action_counts() for tree in trees]
    behind = [np.sum(count * (version - tree.weight_version)) for count, tree in zip(tokens, trees, strict=True)]
    return float(sum(behind)) / max(sum(int(count.sum()) for count in tokens), 1)


def _versions(tree: RolloutTree) -> np.ndarray:
    return np.unique(tree.weight_version[tree.action_counts() > 0])
