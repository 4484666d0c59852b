"""The official checker of BFCL's multi-turn categories, end to end, as the reference that our scoring is held against.

It evaluates call texts. None gets in here that was not rebuilt from plain values: a text is read as literals first, its
function must be documented, and it must be what we would write ourselves. What the checker leaves behind in the
package's modules is taken back after every verdict, so that a verdict does not depend on those before it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import long_context, posting_api, vehicle_control

from trace_jax.tasks.bfcl import literal_calls
from trace_jax.tasks.bfcl.family import REFUSED

Steps = Sequence[Sequence[str]]  # call texts, reply by reply


def verdict(record: Mapping[str, Any], turns: Sequence[Steps]) -> bool:
    """What the official checker says of the calls of all user turns. Raises ValueError for a text that is not ours."""
    if len(turns) != len(record["ground_truth"]):
        return False  # the official evaluation, before it asks the checker
    documented = {document["name"] for document in record["functions"]}
    for text in (text for steps in turns for step in steps for text in step):
        _check(text, documented)
    entry = {name: record[name] for name in ("id", "initial_config", "involved_classes")}
    decoded = [[list(step) for step in steps] for steps in turns]
    with clean():
        return multi_turn_checker.multi_turn_checker(decoded, record["ground_truth"], entry, "", "reference")["valid"]


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """Takes back what the official runner changes in the package's modules."""
    names = set(vars(multi_turn_utils))
    constants = {name: value for module in (long_context, vehicle_control) for name, value in vars(module).items()}
    shared = [value for name, value in constants.items() if name.isupper() and isinstance(value, (dict, list))]
    shared += list(posting_api.TwitterAPI.post_tweet.__defaults__)
    before = copy.deepcopy(shared)
    try:
        yield
    finally:
        for name in set(vars(multi_turn_utils)) - names:
            delattr(multi_turn_utils, name)
        for value, kept in zip(shared, before):
            value.clear()
            value.update(kept) if isinstance(value, dict) else value.extend(kept)


def _check(text: str, documented: set[str]) -> None:
    if text == REFUSED:
        return
    call = literal_calls.parse(text)
    if call.positional or call.name not in documented or literal_calls.call_text(call.name, call.named) != text:
        raise ValueError(f"{text[:80]!r} was not written by the family: it is not evaluated")
