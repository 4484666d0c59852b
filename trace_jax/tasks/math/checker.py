r"""The comparison of two answers by math-verify (https://github.com/huggingface/Math-Verify).

It runs in worker processes that may be killed: sympy may take any time and memory on what a model wrote. math-verify's
own time limits are off, because they rest on SIGALRM. The library is imported where it is used, so that the process
that starts the workers does not pay for it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import resource
import signal

SMALL = 0.01  # below it, math-verify's rounding to six places would call different decimals equal; then ...
RELATIVE = 1e-3  # ... they may differ by this part
UNITS = frozenset(("cm", "mm", "km", "kg", "ft", "Hz", "eV"))
KNOWN = ((r"\frac{1}{2}", "0.5", True), ("x^2-1", "(x-1)(x+1)", True), (r"\{1, 2\}", "[1, 2)", False))


def start(memory: int) -> None:
    """Prepares a worker: a limit on its address space in bytes, ended at once by SIGTERM, everything imported."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler in Python would wait for the end of a long multiplication
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warm()


def warm() -> None:
    """Imports math-verify and compiles its expressions and grammar: the first comparisons are slow otherwise."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    for truth, answer, equal in KNOWN:
        if compare(answer, truth, True) is not equal:
            raise RuntimeError(f"math-verify does not know whether {answer} is {truth}")


def equal(answer: str, truth: str, bare: bool, seconds: float) -> bool:
    """`compare` with a limit on the processor time, which holds even if nobody is left to watch this process."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds) + 1, hard))
    return compare(answer, truth, bare)


def compare(answer: str, truth: str, bare: bool) -> bool:
    """Whether `answer` has the value of `truth`, both plain (`answers.plain`).

    Args:
      answer: LaTeX if `bare`; else text from which math-verify extracts the answer by its own rules.
      truth: LaTeX.
      bare: see `answer`.
    """
    import math_verify

    latex = _reading(units=not has_variable(truth))
    wanted = math_verify.parse(rf"\boxed{{{truth}}}", [latex], parsing_timeout=None)
    if bare:  # LaTeX only: the rules for text would pick any number out of what cannot be read
        found = math_verify.parse(rf"\boxed{{{answer}}}", [latex], parsing_timeout=None)
    else:
        found = math_verify.parse(answer, [latex, math_verify.ExprExtractionConfig()], parsing_timeout=None)
    same = math_verify.verify(wanted, found, allow_set_relation_comp=True, timeout_seconds=None)
    return bool(same) and not _small_and_different(wanted, found)


def has_variable(truth: str) -> bool:
    r"""Whether a truth in LaTeX holds letters that are variables: outside of commands and text, and no unit's name.

    math-verify takes many letters behind a number for units: in "6m" an answer without the m would be as good. With a
    variable in the truth it may not drop any; without one, letters in the answer are units. A run of at most two
    letters that is not in `UNITS` is a variable (our choice).
    """
    return any(len(run) <= 2 and run not in UNITS for run in words(truth))


def words(latex: str) -> list[str]:
    """The runs of letters outside of commands and text."""
    bare = re.sub(r"\\(?:text|mbox|mathrm|textrm)\s*\{[^{}]*\}|\\[a-zA-Z]+", " ", latex)
    return re.findall("[a-zA-Z]+", bare)


@functools.cache
def _reading(units: bool):
    """math-verify's rules for LaTeX, boxes first, with units dropped or kept."""
    import math_verify

    default = math_verify.LatexExtractionConfig()
    kept = dataclasses.replace(default.normalization_config, units=units)
    return dataclasses.replace(default, boxed_match_priority=0, normalization_config=kept)


def _small_and_different(wanted: list, found: list) -> bool:
    """Whether two parsed answers are numbers near zero that rounding alone made equal."""
    import sympy

    pair = [[value for value in values if isinstance(value, sympy.Expr)][:1] for values in (wanted, found)]
    if not all(pair):
        return False
    a, b = pair[0][0], pair[1][0]
    if not (a.is_number and b.is_number) or not (a.has(sympy.Float) or b.has(sympy.Float)):
        return False
    try:
        a, b = complex(a.doit()), complex(b.doit())
    except (TypeError, ValueError, OverflowError):
        return False
    return max(abs(a), abs(b)) < SMALL and abs(a - b) > RELATIVE * abs(a)
