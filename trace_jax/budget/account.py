"""What rollouts cost: budget units, and the tokens and tool calls that the units stand for."""

from __future__ import annotations

import dataclasses

ROOT_UNITS = 1.0  # paper appendix E.5: a complete rollout from the prompt
CONTINUATION_UNITS = 0.5  # paper appendix E.5: half a rollout in expectation, whatever the depth of its anchor


@dataclasses.dataclass(frozen=True)
class BudgetCount:
    """Cost of some rollouts. `a + b` is the cost of both; `sum(counts, BudgetCount())` is that of many."""

    units: float = 0.0  # ROOT_UNITS per root rollout, CONTINUATION_UNITS per continuation
    generated_tokens: int = 0  # sampled from the policy
    prefilled_tokens: int = 0  # of histories, computed by the engine
    cached_tokens: int = 0  # of histories, served from the prefix cache
    tool_calls: int = 0  # executed by the environment
    failed_calls: int = 0  # meant as tool calls, but malformed or impossible
    prefix_tokens: int = 0  # of the prefixes that continuations were forked from, behind what all prompts share
    prefix_cached_tokens: int = 0  # of those, served from the prefix cache

    def __add__(self, other: BudgetCount) -> BudgetCount:
        """Adds field by field."""
        if not isinstance(other, BudgetCount):
            return NotImplemented
        names = (field.name for field in dataclasses.fields(self))
        return BudgetCount(**{name: getattr(self, name) + getattr(other, name) for name in names})


def fallback_roots(continuations: int) -> int:
    """Root rollouts that the units of `continuations` pay for: `floor(continuations / 2)`.

    For a prompt without an anchor, whose stage-2 budget goes back to its root (paper appendix E.5). The paper does not
    give the exchange rate; equal units is our choice.
    """
    return int(continuations * CONTINUATION_UNITS // ROOT_UNITS)
