"""A task seen through token ids: the one place where text and tokens meet during a rollout."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.tasks.base import Instance, Outcome, StepResult, Task
from trace_jax.types import Prompt

CHARACTERS_PER_TOKEN = 16  # text beyond this many characters a token is cut before it is tokenised


class ToolTimeout(Exception):
    """A call into the environment did not return within its time."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """A task and the tokenizer that the policy reads it with.

    The environment's state is a value that this class never looks into: a fork of an episode is a reference to it.
    """

    task: Task
    encode: Callable[[str], np.ndarray]  # text -> int32 ids, no special tokens added
    decode: Callable[[np.ndarray], str]  # int32 ids -> text
    stop_ids: tuple[int, ...]  # ids that end a turn: the task's stop (if it is one id), then those that end a text
    stop_texts: tuple[str, ...] = ()  # the task's stop where it is several ids
    trunk: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # every prompt begins with it

    def prompt(self, instance: Instance) -> Prompt:
        """The instance as token ids, with its first state. What all prompts begin with is tokenised by itself."""
        tokens = np.asarray(self.encode(instance.text.removeprefix(self.task.preamble)), np.int32)
        tokens = np.concatenate([self.trunk, tokens])
        return Prompt(uid=instance.uid, tokens=tokens, state=instance.state, group=instance.group).validate()

    async def step(self, state: Any, action: np.ndarray, timeout: float | None) -> StepResult:
        """`task.step` on the decoded action, with the task's stop if that ended it.

        Raises what the task raises, or `ToolTimeout`.
        """
        ends = self.stop_ids if self.stop_texts else self.stop_ids[1:]
        if action[-1] in ends:
            action = action[:-1]
        return await call(self.task.step, state, self.decode(action), timeout=timeout)

    async def score(self, state: Any) -> Outcome:
        """`task.score` of a finished or cut-off episode; ValueError unless reward is finite and success is 0 or 1."""
        outcome = await call(self.task.score, state, timeout=self.task.tool_timeout)
        if not np.isfinite(outcome.reward) or outcome.success not in (0.0, 1.0):
            raise ValueError(
                f"task {self.task.name}: score gave reward {outcome.reward} and success {outcome.success}; "
                "a reward must be finite and a success 0 or 1"
            )
        return outcome

    def observation(self, text: str, limit: int) -> np.ndarray:
        """Token ids of an observation, at most `limit`.

        Rule for a longer one (our choice): the head is kept; if the whole text ended with one of the task's closings,
        so do the kept tokens, because the policy has learnt that a turn begins there. Text beyond
        `CHARACTERS_PER_TOKEN` characters a token is cut before it is tokenised, and the last token of the cut text,
        which may be half a word, is dropped; so the work is bounded by `limit`, whatever a tool returns.
        """
        most = CHARACTERS_PER_TOKEN * limit
        if len(text) <= most:
            ids = np.asarray(self.encode(text), np.int32)
            if ids.size <= limit:
                return ids
        else:
            ids = np.asarray(self.encode(text[:most]), np.int32)[:-1]
        tail = next((t for end, t in self.closings if text.endswith(end)), np.zeros(0, np.int32))
        return np.concatenate([ids[: limit - tail.size], tail])

    @functools.cached_property
    def closings(self) -> tuple[tuple[str, np.ndarray], ...]:
        """Each of the task's closings with its token ids."""
        return tuple((text, np.asarray(self.encode(text), np.int32)) for text in self.task.closings)


def make_environment(
    task: Task,
    tokenizer: tokenizers.PreTrainedTokenizerFast,
    end_ids: tuple[int, ...] = (),
    *,
    stop_texts: bool = False,
) -> Environment:
    """`task` read with a tokenizer of `tasks.tokenizer`; `end_ids` end a turn like the task's stop does.

    A sampled token that holds the stop among other text ("\\n\\n") ends nothing: what it stands for is not the stop.
    A stop of several tokens needs an engine that knows texts (`stop_texts`): all tokens of it stay in the turn, the
    last one with whatever other text it holds. Raises ValueError for such a stop without that.
    """
    encode = functools.partial(tokenizers.encode, tokenizer)
    texts = (task.stop,) if stop_texts and encode(task.stop).size > 1 else ()
    first = () if texts else (tokenizers.stop_id(tokenizer, task.stop),)
    return Environment(
        task=task,
        encode=encode,
        decode=functools.partial(tokenizers.decode, tokenizer),
        stop_ids=(*first, *(end for end in end_ids if end not in first)),
        stop_texts=texts,
        trunk=np.asarray(encode(task.preamble), np.int32),
    )


async def call(function: Callable[..., Any], *args: Any, timeout: float | None) -> Any:
    """`function(*args)`; inline if `timeout` is None, else in a thread of its own that is abandoned after `timeout` s.

    The thread is a daemon outside of any pool: a call that never returns can neither starve later calls nor keep the
    process from ending. Raises what the function raises, or `ToolTimeout`.
    """
    if timeout is None:
        return function(*args)
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not future.done():  # done: timed out or cancelled, nobody listens any more
            future.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except BaseException as caught:  # a thread has no one above it: everything goes to the caller
            error = caught
        try:
            loop.call_soon_threadsafe(deliver, value, error)
        except RuntimeError:
            pass  # the loop was closed while an abandoned call was still running

    threading.Thread(target=work, name="tool", daemon=True).start()
    try:
        value, error = await asyncio.wait_for(future, timeout)
    except asyncio.TimeoutError:
        name = getattr(function, "__qualname__", function)
        raise ToolTimeout(f"{name} did not return within {timeout:g} s") from None
    if error is not None:
        raise error
    return value
