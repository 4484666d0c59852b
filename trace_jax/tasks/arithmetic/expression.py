"""Expression trees over small numbers: drawing, writing, evaluating, and walking them one operation at a time.

A tree is an int (a leaf) or an `Operation`. Values are kept modulo 100, so that a number never has more than two
digits. The evaluation order is the postfix one: left subtree, right subtree, operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

MODULUS = 100
OPERATORS = "+-*"


@dataclasses.dataclass(frozen=True)
class Operation:
    """left operator right."""

    operator: str  # one of OPERATORS
    left: Expression
    right: Expression


Expression = int | Operation


def draw_expression(rng: np.random.Generator, operations: int, max_number: int) -> Expression:
    """A random tree with this many operations and leaves in 1..max_number.

    The operations that the root leaves over are split between its subtrees uniformly.
    """
    if operations == 0:
        return int(rng.integers(1, max_number + 1))
    operator = OPERATORS[rng.integers(len(OPERATORS))]
    left = int(rng.integers(operations))
    return Operation(
        operator,
        draw_expression(rng, left, max_number),
        draw_expression(rng, operations - 1 - left, max_number),
    )


def write(expression: Expression) -> str:
    """Infix text with parentheses around every operation: "((12+7)*3)".

    The k-th ")" closes the k-th operation in postfix order, which a small policy learns in fewer steps than the same
    text without the outermost pair.
    """
    if isinstance(expression, int):
        return str(expression)
    return f"({write(expression.left)}{expression.operator}{write(expression.right)})"


def apply(left: int, operator: str, right: int) -> int:
    """One binary operation modulo 100, in 0..99."""
    if operator == "+":
        return (left + right) % MODULUS
    if operator == "-":
        return (left - right) % MODULUS
    return (left * right) % MODULUS


def evaluate(expression: Expression) -> int:
    """The tree's value modulo 100."""
    if isinstance(expression, int):
        return expression % MODULUS
    return apply(evaluate(expression.left), expression.operator, evaluate(expression.right))


def next_operation(expression: Expression, results: Sequence[int]) -> tuple[int, str, int] | None:
    """The first operation in postfix order that has no result yet, its operands filled in; None when all have one.

    `results[i]` is what was found for operation i, right or wrong: operands that are subtrees take their value from it.
    """
    stack: list[int] = []
    known = iter(results)
    for item in _postfix(expression):
        if isinstance(item, int):
            stack.append(item)
            continue
        right, left = stack.pop(), stack.pop()
        result = next(known, None)
        if result is None:
            return left, item, right
        stack.append(result)
    return None


def leaves(expression: Expression) -> list[int]:
    """The numbers of the tree from left to right."""
    return [item for item in _postfix(expression) if isinstance(item, int)]


def _postfix(expression: Expression) -> Iterator[int | str]:
    if isinstance(expression, int):
        yield expression
        return
    yield from _postfix(expression.left)
    yield from _postfix(expression.right)
    yield expression.operator
