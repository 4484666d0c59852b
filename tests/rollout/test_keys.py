"""Keys are pinned: a change of any golden value breaks the replay of old runs."""

import hashlib

import numpy as np

from trace_jax.rollout.keys import Stream, episode_key, forks_rng, host_rng, prompt_key


def test_prompt_key_is_the_head_of_blake2b():
    # RFC 7693 appendix A: BLAKE2b-512("abc") = ba80a53f 981c4d0d ...
    assert prompt_key("abc") == 0xBA80A53F981C4D0D
    assert prompt_key("ä") == int(hashlib.blake2b(b"\xc3\xa4").hexdigest()[:16], 16)


def test_episode_key_lists_its_parts():
    assert episode_key(7, Stream.EVAL, 3, "abc", 12) == (7, 1, 3, 0xBA80A53F981C4D0D, 12)
    assert all(type(part) is int for part in episode_key(7, Stream.ORACLE, 3, "abc", 12))


def test_fork_generators_depend_on_every_argument():
    def draw(*args):
        return forks_rng(*args).integers(2**62)

    assert draw(0, 1, "a") == draw(0, 1, "a")
    assert len({draw(0, 1, "a"), draw(1, 1, "a"), draw(0, 2, "a"), draw(0, 1, "b")}) == 4
    expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 3, 1, prompt_key("a")])))
    assert draw(0, 1, "a") == expected.integers(2**62)


def test_host_generators_depend_on_every_argument_and_not_on_fork_generators():
    def draw(*args):
        return host_rng(*args).integers(2**62)

    assert draw(0, 1, "roots") == draw(0, 1, "roots")
    different = {draw(0, 1, "roots"), draw(1, 1, "roots"), draw(0, 2, "roots"), draw(0, 1, "policy")}
    assert len(different | {forks_rng(0, 1, "roots").integers(2**62)}) == 5
