"""Scores an answer to a question: exact match or token F1 after the standard normalisation, over several references.

The measures are SQuAD's (Rajpurkar et al., 2016) with HotpotQA's rule for yes and no (Yang et al., 2018); the reward
is the paper's (spec 6.2): 1 for an exact match, else F1 where that is at least 0.3, else 0.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Sequence

from trace_jax.tasks.base import Outcome

THRESHOLD = 0.3  # the least F1 that counts [paper]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = ("yes", "no", "noanswer")  # answers that are right as a whole or not at all
_BRACES = re.compile(r"\\[{}]|boxed\s*\{|[{}]")


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, the, with single blanks.

    A step that would leave nothing is left out (our choice): "The The" and "!!!" are names, and an empty answer must
    not match them. So only a blank text normalises to "".
    """
    lower = " ".join(text.lower().split())
    plain = " ".join(lower.translate(_NO_PUNCTUATION).split()) or lower
    return " ".join(_ARTICLES.sub(" ", plain).split()) or plain


def f1(answer: str, reference: str) -> float:
    """Token F1 of two texts: 2 x common / (tokens of both), repeated tokens counted as often as they are in both.

    0 where one of them is "yes", "no" or "noanswer" and the other another text.
    """
    one, two = normalise(answer), normalise(reference)
    if one != two and (one in _CLOSED or two in _CLOSED):
        return 0.0
    left, right = one.split(), two.split()
    common = sum((collections.Counter(left) & collections.Counter(right)).values())
    return 2 * common / (len(left) + len(right)) if common else 0.0


def extract(response: str) -> str:
    r"""The answer in a response (our choice but for the first rule): the content of its last closed \boxed{}, of nested
    ones the innermost; else of its last <answer> tag; else all of it. Takes time in proportion to the length."""
    opened, box = [], None
    for brace in _BRACES.finditer(response):
        if brace.group().startswith("\\"):
            continue  # an escaped brace is text
        if brace.group() != "}":
            opened.append(brace)
        elif opened:
            start = opened.pop()
            if start.group() != "{" and (box is None or start.end() > box[0]):
                box = start.end(), brace.start()
    if box is not None:
        return response[box[0] : box[1]].strip()
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    return (response[start + len("<answer>") : end] if start >= 0 else response).strip()


def score(response: str, references: Sequence[str]) -> Outcome:
    """Reward and success of a response, the best over the references; success is an F1 of at least `THRESHOLD`."""
    answer = extract(response)
    best = max(f1(answer, reference) for reference in references)
    return Outcome(reward=best, success=1.0) if best >= THRESHOLD else Outcome(reward=0.0, success=0.0)
