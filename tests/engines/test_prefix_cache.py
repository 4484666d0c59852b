"""The prefix cache against a brute-force search over plain lists."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.engines.prefix_cache import PrefixCache

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, max_size=8), TOKENS)
def test_longest_prefix_equals_brute_force(stored, query):
    """With room for everything, a row that extends another replaces it, so no prefix is ever lost."""
    cache = PrefixCache(rows=16, length=6)
    for tokens in stored:
        cache.insert(np.array(tokens, np.int32), "")
    row, n = cache.longest_prefix(np.array(query, np.int32), "")
    assert n == max([shared(tokens, query[:-1]) for tokens in stored], default=0)
    assert (row == -1) == (n == 0)


def test_a_row_that_is_extended_is_overwritten_and_others_are_kept():
    cache = PrefixCache(rows=4, length=6)
    first = cache.insert(np.array([1, 2, 3]), "")
    assert cache.insert(np.array([1, 2, 3, 4]), "") == first
    assert cache.insert(np.array([1, 2, 9]), "") != first  # shares two tokens, does not extend
    assert cache.longest_prefix(np.array([1, 2, 3, 4, 5]), "") == (first, 4)
    assert cache.evictions == 0


def test_the_least_recently_used_row_goes_first():
    cache = PrefixCache(rows=2, length=4)
    a, b = cache.insert(np.array([1, 1]), ""), cache.insert(np.array([2, 2]), "")
    cache.longest_prefix(np.array([1, 1, 1]), "")  # a was used last
    assert cache.insert(np.array([3, 3]), "") == b
    assert cache.evictions == 1
    assert cache.longest_prefix(np.array([2, 2, 2]), "") == (-1, 0)
    assert cache.longest_prefix(np.array([1, 1, 1]), "") == (a, 2)


def test_salts_do_not_see_each_other_and_clear_forgets():
    cache = PrefixCache(rows=4, length=4)
    a = cache.insert(np.array([1, 2]), "a")
    assert cache.longest_prefix(np.array([1, 2, 3]), "b") == (-1, 0)
    b = cache.insert(np.array([1, 2]), "b")
    assert a != b
    assert cache.longest_prefix(np.array([1, 2, 3]), "b") == (b, 2)
    assert cache.longest_prefix(np.array([1, 2, 3]), "a") == (a, 2)
    cache.clear()
    assert cache.longest_prefix(np.array([1, 2, 3]), "a") == (-1, 0)
