"""What an evaluation keeps of each prompt, in a file that outlives a kill, and the figures of a whole benchmark."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.eval import estimates
from trace_jax.rollout.collect import Collected
from trace_jax.tree import query
from trace_jax.types import Finish, NodeKind, Prompt


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """All samples of one prompt, in order."""

    uid: str
    group: str
    prompt: str  # digest of its tokens
    successes: tuple[int, ...]  # 0 or 1
    rewards: tuple[float, ...]
    finish: tuple[str, ...]  # labels of `types.Finish` in lower case
    turns: tuple[int, ...]
    tool_calls: int  # of all samples together
    failed_calls: int  # of all samples together: meant as calls, but malformed or impossible
    generated_tokens: int  # of all samples together
    errors: tuple[str, ...]  # messages of samples that ended with an error
    elapsed: float  # seconds spent on the benchmark until this prompt was finished, earlier processes included


def of_prompt(prompt: Prompt, collected: Collected, elapsed: float) -> Outcomes:
    """What the flat tree of a prompt says; samples in the order of their noise."""
    tree = collected.tree
    leaves = np.flatnonzero(tree.kind == NodeKind.LEAF)
    return Outcomes(
        uid=prompt.uid,
        group=prompt.group,
        prompt=digest(prompt),
        successes=tuple(int(s) for s in tree.success[leaves]),
        rewards=tuple(float(r) for r in tree.reward[leaves]),
        finish=tuple(Finish(f).name.lower() for f in tree.finish[leaves]),
        turns=tuple(query.depth(tree)[leaves].tolist()),
        tool_calls=collected.counts.tool_calls,
        failed_calls=collected.counts.failed_calls,
        generated_tokens=collected.counts.generated_tokens,
        errors=collected.errors,
        elapsed=elapsed,
    )


def digest(prompt: Prompt) -> str:
    """16 hex digits of the prompt's tokens: another template, tokenizer or data set gives others."""
    return hashlib.blake2b(prompt.tokens.astype("<i4").tobytes(), digest_size=8).hexdigest()


class OutcomesFile:
    """One JSON object a prompt and line, appended as prompts finish; a kill can tear the last line only."""

    def __init__(self, path: Path):
        """Reads what is there and cuts a torn last line off. ValueError for any other line that cannot be read."""
        self.outcomes: dict[str, Outcomes] = {}
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found = _parse(line)
            except (ValueError, TypeError) as error:
                raise ValueError(f"line {number} of {path} is no result of a prompt ({error}); delete it") from error
            self.outcomes.setdefault(found.uid, found)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if len(whole) < len(content):
            os.truncate(self._file, len(whole))

    def add(self, outcomes: Outcomes) -> None:
        """Appends one line, by one write."""
        line = json.dumps(dataclasses.asdict(outcomes), allow_nan=False) + "\n"
        content = line.encode()
        if os.write(self._file, content) != len(content):
            raise OSError(f"the result of {outcomes.uid} was not written: the disk is full")
        self.outcomes[outcomes.uid] = outcomes

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def _parse(line: bytes) -> Outcomes:
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("no object")
    return Outcomes(**{k: tuple(v) if isinstance(v, list) else v for k, v in document.items()})


def summary(outcomes: Sequence[Outcomes], ks: Sequence[int]) -> dict[str, Any]:
    """The figures of a benchmark from all of its prompts, which have the same number of samples each.

    `avg`: mean 0/1 success (avg@samples); `mean_reward`: mean score. `format_valid_share`: of what was meant as tool
    calls, the share that could be carried out; 1 without any. `finish_shares`: of the samples, by how they ended. A
    figure that does not exist (the spread of one prompt) is None.
    """
    count = sum(len(o.successes) for o in outcomes)
    calls, failed = sum(o.tool_calls for o in outcomes), sum(o.failed_calls for o in outcomes)
    finish = Counter(label for o in outcomes for label in o.finish)
    groups: dict[str, list[float]] = {}
    for o in outcomes:
        groups.setdefault(o.group, []).append(float(np.mean(o.successes)))
    return {
        "prompts": len(outcomes),
        "samples": len(outcomes[0].successes),
        **_estimates(outcomes, ks),
        "format_valid_share": calls / (calls + failed) if calls + failed else 1.0,
        "finish_shares": {f.name.lower(): finish[f.name.lower()] / count for f in Finish if f != Finish.TURN},
        "mean_turns": sum(sum(o.turns) for o in outcomes) / count,
        "mean_tool_calls": calls / count,
        "mean_generated_tokens": sum(o.generated_tokens for o in outcomes) / count,
        "generated_tokens": sum(o.generated_tokens for o in outcomes),
        "errors": sum(len(o.errors) for o in outcomes),
        "by_group": {name: float(np.mean(groups[name])) for name in sorted(groups)},
        "seconds": max(o.elapsed for o in outcomes),
    }


def _estimates(outcomes: Sequence[Outcomes], ks: Sequence[int]) -> dict[str, Any]:
    """Success, pass@k and score with their errors and 95 % intervals."""
    success = estimates.over_prompts(np.array([np.mean(o.successes) for o in outcomes]))
    correct = np.array([sum(o.successes) for o in outcomes])
    solved = {str(k): estimates.pass_at_k(correct, len(outcomes[0].successes), k) for k in ks}
    return {
        "avg": success.value,
        "standard_error": _or_none(success.standard_error),
        "interval": _interval(success),
        "pass_at_k": {k: estimate.value for k, estimate in solved.items()},
        "pass_at_k_interval": {k: _interval(estimate) for k, estimate in solved.items()},
        **_score(np.array([np.mean(o.rewards) for o in outcomes])),
    }


def _score(values: np.ndarray) -> dict[str, Any]:
    """The mean reward; its spread only where rewards are scores from 0 to 1."""
    if np.any((values < 0) | (values > 1)):
        return {"mean_reward": float(values.mean()), "reward_standard_error": None, "reward_interval": None}
    score = estimates.over_prompts(values)
    return {
        "mean_reward": score.value,
        "reward_standard_error": _or_none(score.standard_error),
        "reward_interval": _interval(score),
    }


def _interval(estimate: estimates.Estimate) -> list[float] | None:
    return None if math.isnan(estimate.low) else [estimate.low, estimate.high]


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
