"""Views by hand, and what must hold for every history: a limit, its two ends, and prefixes that stay prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tree.tree_oracle import Case, build, cases, chain, make_turn
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.train.history_view import HistoryView, recoder, shorten
from trace_jax.types import Prompt

BLOCKS = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.lists(st.integers(10, 99), max_size=6), max_size=5),
).map(lambda drawn: [drawn[0], *drawn[1]])


def ids(tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def short(blocks, limit) -> list[int]:
    return shorten([ids(block) for block in blocks], limit).tolist()


@pytest.mark.parametrize(
    "limit, kept",
    [
        (9, [1, 2, 3, 11, 12, 21, 31, 32, 33]),  # all nine fit
        # 8: the prompt (3 <= 4) leaves room for 5; turn 3 takes 3, turn 2 one, turn 1 would need 2 of the last 1
        (8, [1, 2, 3, 21, 31, 32, 33]),
        (7, [1, 2, 3, 21, 31, 32, 33]),  # room 4
        # 6: room 3, turn 3 alone; the prompt keeps 3 of 6
        (6, [1, 2, 3, 31, 32, 33]),
        # 5: the prompt is cut to no less than 2, room 3
        (5, [1, 2, 31, 32, 33]),
        # 4: room 2, too small for turn 3, of which the last 2 tokens stay
        (4, [1, 2, 32, 33]),
        (3, [1, 32, 33]),
        (2, [1, 33]),
        (1, [33]),
    ],
)
def test_shorten_by_hand(limit, kept):
    assert short([[1, 2, 3], [11, 12], [21], [31, 32, 33]], limit) == kept


def test_what_the_turns_leave_is_the_prompts():
    """A prompt of 8 in a limit of 10: turns have a room of 5. One turn of 3 leaves 7 for the prompt, two turns 5."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    assert short([prompt, [11, 12, 13]], 10) == [1, 2, 3, 4, 5, 6, 7, 11, 12, 13]
    assert short([prompt, [11, 12, 13], [21, 22]], 10) == [1, 2, 3, 4, 5, 11, 12, 13, 21, 22]
    assert short([prompt, [11, 12, 13], [21, 22, 23]], 10) == [1, 2, 3, 4, 5, 6, 7, 21, 22, 23]
    assert short([prompt], 5) == [1, 2, 3, 4, 5]  # a prompt alone keeps its head


@given(BLOCKS, st.integers(1, 40))
def test_limit_and_both_ends(blocks, limit):
    view, whole = short(blocks, limit), [token for block in blocks for token in block]
    assert 1 <= len(view) <= limit
    assert (view == whole) if len(whole) <= limit else (view != whole)
    head = [token for token in view if token < 10]  # prompts hold tokens below 10, turns do not
    tail = view[len(head) :]
    assert head == blocks[0][: len(head)] and len(head) >= min(len(blocks[0]), limit // 2)
    assert tail == whole[len(whole) - len(tail) :]
    if any(blocks[1:]):
        assert view[-1] == whole[-1]


@given(BLOCKS, st.integers(1, 40))
def test_turns_are_kept_whole_where_the_newest_fits(blocks, limit):
    view = short(blocks, limit)
    tail = [token for token in view if token >= 10]
    suffixes = [[token for block in blocks[i:] for token in block] for i in range(1, len(blocks))] + [[]]
    newest = next((block for block in reversed(blocks[1:]) if block), [])
    room = limit - min(len(blocks[0]), limit // 2)
    if len(newest) <= room:
        # the longest run of newest turns that fits
        assert tail == max((suffix for suffix in suffixes if len(suffix) <= room), key=len)
    else:
        assert tail == newest[-room:]


@given(BLOCKS, st.integers(1, 40))
def test_nested_views_share_all_until_a_turn_has_to_go(blocks, limit):
    """Depth by depth: either the longer view continues the shorter one, or it begins with a later turn."""
    whole_prompt = len(blocks[0]) <= limit // 2
    views = [short(blocks[:depth], limit) for depth in range(1, len(blocks) + 1)]
    for depth, (shorter, longer) in enumerate(zip(views, views[1:], strict=False), 1):
        if sum(map(len, blocks[: depth + 1])) <= limit:
            assert longer == shorter + blocks[depth]
        elif whole_prompt and longer[: len(shorter)] != shorter:
            assert len(shorter) + len(blocks[depth]) > limit  # it did not fit behind what was there


@given(cases())
def test_identity_view_is_the_history(case: Case):
    view = HistoryView(max_tokens=99)
    nodes = case.by_index()
    got = view.of_nodes(case.tree, np.arange(len(nodes)))
    want = [[t for node in route[: route.index(end) + 1] for t in node.tokens()] for end, route in _routes(case)]
    assert [tokens.tolist() for tokens in got] == want
    assert all(tokens.dtype == np.int32 for tokens in got)


def _routes(case: Case):
    """(node, a route through it) in the order of the nodes' ids."""
    for node in case.by_index():
        yield node, next(route for route in case.routes() if any(other is node for other in route))


def test_skip_leaves_the_start_of_the_prompt_out():
    case = build([chain(2, 1.0)], prompt=[7, 7, 7, 1, 2])
    view = HistoryView(max_tokens=99, skip=3)
    turn = case.by_index()[1].tokens()
    assert [v.tolist() for v in view.of_nodes(case.tree, [0, 1])] == [[1, 2], [1, 2, *turn]]
    assert view.of_prompts([Prompt("u", ids([7, 7, 7, 5]), None)])[0].tolist() == [5]
    with pytest.raises(ValueError, match="prompt 'u' has 3 tokens, all among the first 3"):
        view.of_prompts([Prompt("u", ids([7, 7, 7]), None)])


CHARACTERS = tokenizers.build_tokenizer([*"0123456789+=?\n", " "], word_level=False)
WORDS = tokenizers.build_tokenizer(["12", "+", "3", "?", "15", "\n"], word_level=True)


def encoded(tokenizer, text):
    return tokenizers.encode(tokenizer, text)


def _word_view(max_tokens=99, asked=None):
    def decode(tokens):
        text = tokenizers.decode(CHARACTERS, tokens)
        if asked is not None:
            asked.append(text)
        return text

    return HistoryView(max_tokens, recoder(decode, lambda text: tokenizers.encode(WORDS, text)))


def test_own_tokens_by_hand():
    """Characters for the policy, words for the predictor: pad 0, unknown 1, then 12 + 3 ? 15 line end = 2 .. 7."""
    turns = [make_turn(encoded(CHARACTERS, "12 + 3\n"), encoded(CHARACTERS, "15\n")), make_turn([5], [], 1.0)]
    case = build([turns], prompt=encoded(CHARACTERS, "12 + 3 ?\n"))
    asked = []
    view = _word_view(asked=asked)
    prompt, anchor = view.of_nodes(case.tree, [0, 1])
    assert prompt.tolist() == [2, 3, 4, 5, 7]
    assert anchor.tolist() == [2, 3, 4, 5, 7, 2, 3, 4, 7, 6, 7]
    assert view.of_prompts([Prompt("u", encoded(CHARACTERS, "12 + 3 ?\n"), None)])[0].tolist() == prompt.tolist()
    assert asked == ["12 + 3 ?\n", "12 + 3\n15\n"]  # each block was asked for once
    # limit 6: the prompt keeps 3, the turn's 6 tokens have a room of 3
    assert _word_view(6).of_nodes(case.tree, [1])[0].tolist() == [2, 3, 4, 7, 6, 7]


@given(st.lists(st.text("123+=? \n", max_size=6), min_size=1, max_size=5))
def test_prefixes_stay_prefixes_in_other_tokens(texts):
    """Whatever the text at a block's border: the view of a shorter history starts that of a longer one."""
    texts[0] = "1" + texts[0]
    turns = [make_turn([*encoded(CHARACTERS, text), 4], []) for text in texts[1:]] + [make_turn([5], [], 1.0)]
    case = build([turns], prompt=encoded(CHARACTERS, texts[0]))
    views = _word_view().of_nodes(case.tree, np.arange(len(turns) + 1))
    assert views[0].size > 0
    for shorter, longer in zip(views, views[1:], strict=False):
        assert longer[: shorter.size].tolist() == shorter.tolist()


def test_a_turn_without_a_token_keeps_the_view_and_a_prompt_without_one_is_an_error():
    blank = encoded(CHARACTERS, " ")  # no word
    case = build([[make_turn(blank, []), make_turn([5], [], 1.0)]], prompt=encoded(CHARACTERS, "12"))
    assert [v.tolist() for v in _word_view().of_nodes(case.tree, [0, 1])] == [[2], [2]]
    with pytest.raises(ValueError, match="prompt 'u' is no token in the predictor's tokenizer"):
        _word_view().of_prompts([Prompt("u", blank, None)])
