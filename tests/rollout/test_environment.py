"""Observations that are too long, and calls that do not come back."""

import asyncio
import dataclasses
import subprocess
import sys
import time

import numpy as np
import pytest

from trace_jax.rollout.environment import Environment, ToolTimeout, call, make_environment
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.tasks.base import Instance, Outcome


def test_prompt_holds_the_instance(toy):
    made = toy.environment().prompt(Instance("u", "go\n", "state", "easy"))
    assert (made.uid, made.state, made.group) == ("u", "state", "easy")
    assert made.tokens.tolist() == [103, 111, 10] and made.tokens.dtype == np.int32


@pytest.mark.parametrize(
    "text, kept",
    [
        ("abcd\n", "abcd\n"),  # exactly the limit of 5: untouched
        ("abcde\n", "abcd\n"),  # one too long: 4 of the head and the stop
        ("abcdef", "abcde"),  # did not end with the stop, so the kept tokens don't either
        ("", ""),
        ("x" * 200 + "\n", "xxxx\n"),  # longer than 5 * 16 characters
    ],
)
def test_observation_rule(toy, text, kept):
    ids = toy.environment().observation(text, 5)
    assert toy.decode(ids) == kept and ids.dtype == np.int32


def test_text_is_cut_before_it_is_tokenised_and_half_words_are_dropped(toy):
    seen = []

    def words(text):  # one token a word, numbered by its length
        seen.append(len(text))
        return np.array([len(word) for word in text.replace("\n", " \n").split(" ") if word], np.int32)

    environment = Environment(toy.Adder(), words, str, (1,))
    ids = environment.observation("abcdefghijklmnopqrst " * 1_000_000 + "\n", 5)
    # 5 * 16 = 80 characters are tokenised: three words of 20 and 17 letters of a fourth, which are dropped; the stop
    assert ids.tolist() == [20, 20, 20, 1]
    assert max(seen) == 80


def test_ids_that_end_a_text_end_a_turn_and_are_not_shown_to_the_task(toy):
    task = toy.Adder()
    small = tokenizers.build_tokenizer(tuple("+0123456789=!go\n"), False)
    made = make_environment(task, small, end_ids=(7, 9))
    stop = int(made.encode("\n")[0])
    assert made.stop_ids == (stop, 7, 9)
    assert make_environment(task, small, end_ids=(stop,)).stop_ids == (stop,)
    seen = []
    watched = dataclasses.replace(made, task=_Recorder(seen))
    for ending in (made.encode("+3\n"), [*made.encode("+3"), 7], made.encode("+3")):
        asyncio.run(watched.step(None, np.asarray(ending, np.int32), None))
    assert seen == ["+3\n", "+3", "+3"]


def test_a_stop_of_several_tokens_needs_an_engine_that_knows_texts(toy):
    task = toy.Adder()
    task.stop = "=!"
    small = tokenizers.build_tokenizer(tuple("+0123456789=!go\n"), False)
    with pytest.raises(ValueError, match="stop text"):
        make_environment(task, small, end_ids=(7,))
    made = make_environment(task, small, end_ids=(7,), stop_texts=True)
    assert made.stop_ids == (7,) and made.stop_texts == ("=!",)
    seen = []
    watched = dataclasses.replace(made, task=_Recorder(seen))
    for ending in (made.encode("+3=!"), [*made.encode("+3"), 7]):
        asyncio.run(watched.step(None, np.asarray(ending, np.int32), None))
    assert seen == ["+3=!", "+3"]  # the closing text is part of the turn, the end of a text is not
    one = make_environment(toy.Adder(), small, stop_texts=True)
    assert one.stop_texts == () and one.stop_ids == (int(one.encode("\n")[0]),)


class _Recorder:
    tool_timeout = None

    def __init__(self, seen):
        self.seen = seen

    def step(self, state, action):
        self.seen.append(action)


def test_make_environment_reads_the_tokenizer(toy):
    task = toy.Adder()
    made = make_environment(task, tokenizers.build_tokenizer(tuple("+0123456789=!go\n"), False))
    ids = made.encode("+3\n")
    assert made.decode(ids) == "+3\n" and made.stop_ids == (int(ids[-1]),)
    assert [(text, tokens.tolist()) for text, tokens in made.closings] == [("\n", [ids[-1]])]
    assert asyncio.run(made.step(toy.Total(4), ids, None)).state.value == 7
    with pytest.raises(ValueError, match="stop text"):
        make_environment(task, tokenizers.build_tokenizer(tuple("+0123456789"), False))


@pytest.mark.parametrize("outcome", [Outcome(float("nan"), 1.0), Outcome(1.0, 0.5)])
def test_nonsense_scores_are_refused(toy, outcome):
    environment = toy.environment(score=lambda state: outcome)
    with pytest.raises(ValueError, match="task adder: score gave reward"):
        asyncio.run(environment.score(toy.Total()))


def test_call_inline_runs_in_this_thread_and_in_time_elsewhere():
    import threading

    here = threading.get_ident()
    assert asyncio.run(call(threading.get_ident, timeout=None)) == here
    assert asyncio.run(call(threading.get_ident, timeout=5.0)) != here


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(3)])
def test_call_raises_what_the_function_raises(error):
    def fail():
        raise error

    for timeout in (None, 5.0):
        with pytest.raises(type(error)):
            asyncio.run(call(fail, timeout=timeout))


def test_hung_calls_neither_block_later_ones_nor_the_loops_end():
    async def main():
        hung = [asyncio.ensure_future(call(time.sleep, 1.5, timeout=0.05)) for _ in range(60)]
        results = await asyncio.gather(*hung, return_exceptions=True)
        assert all(isinstance(result, ToolTimeout) for result in results)
        assert "sleep did not return within 0.05 s" in str(results[0])
        return await call(lambda: "quick", timeout=1.0)

    begin = time.monotonic()
    assert asyncio.run(main()) == "quick"
    assert time.monotonic() - begin < 1.4


def test_a_process_ends_while_a_call_hangs():
    code = (
        "import asyncio, time\n"
        "from trace_jax.rollout.environment import call, ToolTimeout\n"
        "try: asyncio.run(call(time.sleep, 600, timeout=0.05))\n"
        "except ToolTimeout: print('timed out')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "timed out\n"
