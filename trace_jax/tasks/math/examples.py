"""Two solved conversations for few-shot prompts, written for this project."""

from __future__ import annotations

from trace_jax.tasks.chat.family import Message, Reply, ToolCall

_COPRIME = """from math import gcd
print(sum(gcd(n, 60) == 1 for n in range(1, 201)))"""
_ROOTS = """from sympy import symbols, solve
x = symbols("x")
print(solve(2*x**2 - 6*x + 3, x))"""

EXAMPLES = (
    (
        Message("user", "How many of the integers from 1 to 200 have no common factor with 60 except 1?"),
        Reply("I count them.", (ToolCall("python", {"code": _COPRIME}),)),
        Message("tool", "54", "python"),
        Reply(r"There are \boxed{54} of them."),
    ),
    (
        Message("user", "What is the larger root of $2x^2 - 6x + 3 = 0$?"),
        Reply("", (ToolCall("python", {"code": _ROOTS}),)),
        Message("tool", "[3/2 - sqrt(3)/2, sqrt(3)/2 + 3/2]", "python"),
        Reply(r"The larger root is \boxed{\frac{3 + \sqrt{3}}{2}}."),
    ),
)
