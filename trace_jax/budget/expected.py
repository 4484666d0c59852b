"""Counting the budget in expected tokens instead of rollouts (our option; the paper counts rollouts, E.5)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExpectedTokens:
    """Running means of what a rollout costs, part of the allocator's state and of every checkpoint."""

    root: float | None = None  # generated tokens of a bare rollout; None before the first step
    continuation: float | None = None  # of a continuation; None while there was none
    decay: float = 0.8  # weight of the past in the running means

    def updated(self, *, root: float | None, continuation: float | None) -> ExpectedTokens:
        """With a step's measured means; None where the step had no such rollout."""

        def blend(old: float | None, new: float | None) -> float | None:
            if old is None or new is None:
                return old if new is None else new
            return self.decay * old + (1 - self.decay) * new

        return dataclasses.replace(
            self, root=blend(self.root, root), continuation=blend(self.continuation, continuation)
        )

    def roots(self, tokens: int, continuations_per_root: int, *, default: int) -> int:
        """M, so that M (c_root + N c_continuation) is about `tokens`; even, at least 2. `default` before any step."""
        if self.root is None:
            return default
        each = self.root + continuations_per_root * self._continuation()
        return max(int(tokens / max(each, 1e-9)) // 2 * 2, 2)

    def expected(self, roots: int, continuations: int) -> float | None:
        """Tokens that these rollouts are expected to generate; None before any step."""
        if self.root is None:
            return None
        return roots * self.root + continuations * self._continuation()

    def _continuation(self) -> float:
        """Until one was seen it counts as half a root rollout, as in the paper's units."""
        return self.root / 2 if self.continuation is None else self.continuation
