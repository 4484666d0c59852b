r"""What an answer to a mathematical question is, as text: where it stands in a reply, and its plain form.

What reads whole replies takes time linear in them. What reads one answer may take its square, inline and with no other
thread running, so answers are bounded by `MAX_ANSWER`. What needs algebra is `checker.py`'s.
"""

from __future__ import annotations

import re
from decimal import Decimal

MAX_ANSWER = 1000  # characters of an answer that are read (our choice)
MAX_NESTED = 8  # boxes around nothing but a box that are taken off: the work stays linear
MAX_EXPONENT = 400  # of a number in scientific notation that is read here
ABSOLUTE = Decimal("5e-7")  # decimals are compared to six places, as math-verify does, ...
RELATIVE = Decimal("1e-5")  # ... and to five significant digits: six places tell 3e-10 and 5e-10 not apart

# In this order: "\\" is a line break, unless it is a doubly escaped box; "\{" and "\}" are no groups.
_BRACES = re.compile(r"\\boxed\s*\{|\\\\(?!boxed)|\\[{}]|[{}]")
_SYMBOLS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
        "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "°": r"^{\circ}",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "⁄": "/",
        **{digit: f"^{{{i}}}" for i, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full-width ASCII
    }
)  # fmt: skip
_ENDS = re.compile(r"^(?:\\approx|\\quad|\\[,;:! ]|[~\s])+|(?:\\[,;:! ]|[~\s.,;])+$")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?\s*(?:\\(?:text|mathrm)\s*\{\s*)?[CFK]\s*\}?$")
_ARC = re.compile(r"(?<=\d)\s*\^\s*\{\s*(?:\\prime\s*)+\}$")
_EXPONENT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,4})")
_SPACING = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;: ]|~")
_BLANKS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not those between two digits
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<digits>\d{1,3}(?:(?:,\\!|\{,\}|,)\s?\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
    r"(?:\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{\s*(?P<braced>[+-]?\d{1,4})\s*\}|(?P<bare>\d)))?"
)
_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*\)?|\(?\s*([A-Z])\s*(?:\)|[.:])(?:\s.*)?", re.DOTALL)
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathsf|boldsymbol)\s*\{([^{}]*)\}")
_STATED = re.compile(r"(?i:answer)\b[^A-Za-z\n]{0,8}(?:(?i:is)\b)?[^A-Za-z\n]{0,8}([A-Z])(?![A-Za-z'])")
_LAST_LINE = re.compile(r"[*_`\s]*\(?([A-Z])[).:]?[*_`\s.]*")


def boxed(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{}` of `text`; None if there is none.

    Braces are balanced, so the content may hold groups. Several boxes: the one that closes last. A box around nothing
    but a box: the inner one's content. A box that is never closed is none (each our choice).
    """
    found = _last_box(text)
    if found is None:
        return None
    content = text[found[1] : found[2]].strip()
    for _ in range(MAX_NESTED):
        found = _last_box(content)
        if found is None or found[0] != 0 or found[2] != len(content) - 1:
            break
        content = content[found[1] : found[2]].strip()
    return content


def _last_box(text: str) -> tuple[int, int, int] | None:
    """(begin of the command, begin of the content, its end) of the box that closes last."""
    opened: list[tuple[int, int] | None] = []  # begins of the open boxes; None for any other group
    last = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            opened.append(None)
        elif token == "}":
            if opened and (begins := opened.pop()):
                last = (*begins, match.start())
        elif token[-1] == "{" and len(token) > 2:
            opened.append(match.span())
    return last


def plain(text: str) -> str:
    """An answer in LaTeX without what says nothing about its value.

    Unicode signs become LaTeX; dollars (of formulas and of money), blanks and full stops around it, temperature scales
    and arc marks behind a number go; 4.5e33 becomes a power of ten, because math-verify reads an Euler number there.
    """
    text = text.translate(_SYMBOLS).replace(r"\$", "").replace("$", "")
    text = _ENDS.sub("", text)
    text = _ARC.sub("", _DEGREES.sub(r"^{\\circ}", text))
    if power := _EXPONENT.fullmatch(text):
        text = rf"{power[1]} \times 10^{{{int(power[2])}}}"
    return text


def key(text: str) -> str:
    """A plain answer without spacing and spelling variants: equal keys are equal answers."""
    text = _SPACING.sub("", text)
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\^\{(\\circ|\w)\}", r"^\1", text)
    return _BLANKS.sub("", text)


def number(text: str) -> Decimal | None:
    """The value of a plain answer that is one decimal number, maybe with separators or a power of ten; else None."""
    match = _NUMBER.fullmatch(text)
    if match is None or len(match["digits"]) > MAX_EXPONENT:
        return None
    exponent = int(match["braced"] or match["bare"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = Decimal(match["sign"] + re.sub(r"[,{}\\!\s]", "", match["digits"]))
    return value.scaleb(exponent)


def quick(answer: str, truth: str) -> bool | None:
    """Whether two plain answers are equal, where that shows without algebra; None where it does not.

    Equal keys are equal. Of two numbers, integers must be the same and decimals
    `|a - b| <= min(ABSOLUTE, RELATIVE * |truth|)`.
    """
    if key(answer) == key(truth):
        return bool(key(truth))
    a, b = number(answer), number(truth)
    if a is None or b is None:
        return None
    if a == a.to_integral_value() and b == b.to_integral_value():
        return a == b
    return abs(a - b) <= min(ABSOLUTE, RELATIVE * abs(b))


def letter(text: str) -> str | None:
    r"""The option that an answer such as "B", "(b)", "\text{B}", "B. because" or "B) text" names; None for none.

    Only the head of a long answer is read.
    """
    text = plain(text[:MAX_ANSWER]).replace("**", "")
    while (stripped := _WRAPPED.sub(r"\1", text)) != text:
        text = stripped
    match = _LETTER.fullmatch(text.strip())
    return None if match is None else (match[1] or match[2]).upper()


def stated_letter(text: str) -> str | None:
    """The option that a reply without a box names: the last "answer is (B)", else a last line that is one letter."""
    if stated := _STATED.findall(text):
        return stated[-1]
    lines = text.strip().rsplit("\n", 1)
    match = _LAST_LINE.fullmatch(lines[-1][:40])
    return None if match is None else match[1]
