"""Whether an episode did what its user wanted: the official verdict, turn by turn.

The package's own checks of states and of results are used; its runner, which evaluates call texts, is not. In order,
for each user turn (as the official checker has it):
1. a turn with no right call is not checked: what was called there shows in the next turn's state;
2. a turn with right calls and no call at all fails;
3. every public attribute of every service equals that after the right calls;
4. the results of the right calls are among all results so far, each as often as the turn has it, in any order. So a
   call from an earlier turn counts, and calls beyond the right ones do no harm if they change no state.
An episode that ended before its last turn fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trace_jax.tasks.bfcl.entry import Entry
from trace_jax.tasks.bfcl.services import Services


@dataclasses.dataclass(frozen=True)
class EndedTurn:
    """What happened in a user turn that is over."""

    steps: tuple[tuple[str, ...], ...]  # the call texts of each reply that has calls
    results: tuple[str, ...]  # of all calls, in order
    services: Services  # after the turn


def succeeded(entry: Entry, ended: Sequence[EndedTurn]) -> bool:
    """The official checker's verdict on the user turns that are over."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

    if len(ended) != len(entry.truth):
        return False
    results: list[str] = []
    for number, (turn, truth) in enumerate(zip(ended, entry.outcomes)):
        results += turn.results
        if not entry.truth[number]:
            continue
        if not turn.steps:
            return False
        if not state_checker(dict(turn.services), dict(truth.services))["valid"]:
            return False
        if not response_checker(results, list(truth.results), number)["valid"]:
            return False
    return True
