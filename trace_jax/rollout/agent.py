"""One multi-turn episode over token ids.

The history only ever grows: sampled ids go into it as they are, never decoded and encoded again, and of an
observation the text is tokenised once. Only sampled ids are actions.

How a turn ends, and what an episode that ends with it is worth (each rule is our choice; every start of an episode
gives exactly one scored last turn, so that no budget unit is lost):

| what happened                                               | finish            | scored on              |
| ----------------------------------------------------------- | ----------------- | ---------------------- |
| stop id, environment answered, another turn fits            | TURN              | not: the episode goes on |
| stop id, environment says done                              | ANSWER            | state after the step   |
| stop id, `max_turns` turns are done                         | TURN_LIMIT        | state after the step   |
| stop id, no token fits behind the observation               | LENGTH            | state after the step   |
| `max_turn_tokens` or the context ended the generation       | LENGTH            | state before the turn  |
| the history given leaves no room for a token                | LENGTH, no action | the state given        |
| deadline passed before or while the turn was sampled        | DEADLINE, no action | state before the turn |
| deadline passed while a tool was running                    | DEADLINE          | state before the turn  |
| environment raised, hung or answered nonsense (score too)   | ENVIRONMENT_ERROR | reward 0, success 0    |
| the engine gave up on the request                           | ENGINE_ERROR, no action | reward 0, success 0 |

"The context" ends `max_response_tokens` behind the prompt where that is sooner (`Limits.of_prompt`).
The last turn has no observation: nobody reads it. So a turn that is followed by another (an anchor) always leaves room
for at least one token. Long observations are cut by the rule of `Environment.observation`. A deadline cannot interrupt
a tool that runs inline (`tool_timeout` None); it is looked at before each turn. Any exception that is not named here is
a defect and ends the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from typing import Any

import numpy as np

from trace_jax.budget.account import BudgetCount
from trace_jax.engines.base import Engine, EngineError
from trace_jax.rollout.environment import Environment, ToolTimeout
from trace_jax.types import Finish, GenerateRequest, Generation, Turn

ERROR_CHARACTERS = 300  # of an exception's message that are kept
_NO_TOKENS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What bounds an episode."""

    max_turns: int  # of the whole path from the prompt
    max_turn_tokens: int  # sampled tokens of one turn
    context_length: int  # tokens of the longest history plus generation
    max_observation_tokens: int  # kept of one observation
    deadline: float | None = None  # wall-clock seconds of one episode; None keeps runs reproducible
    max_response_tokens: int | None = None  # tokens behind the prompt, observations included; None: the context's

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_tokens", "context_length", "max_observation_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits: {name} is {getattr(self, name)}; it must be at least 1")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"limits: deadline is {self.deadline} s; use a positive number, or None for no deadline")
        if self.max_response_tokens is not None and self.max_response_tokens < 1:
            got = self.max_response_tokens
            raise ValueError(f"limits: max_response_tokens is {got}; use at least 1, or None for the context's limit")

    def of_prompt(self, prompt_tokens: int) -> Limits:
        """The limits of episodes behind a prompt of this length: `max_response_tokens` as a shorter context.

        A fork's history holds turns, so the end is counted from the prompt's length and not from the history's.
        """
        if self.max_response_tokens is None:
            return self
        end = prompt_tokens + self.max_response_tokens
        return dataclasses.replace(self, context_length=min(self.context_length, end))


@dataclasses.dataclass(frozen=True)
class Episode:
    """The turns that one rollout added behind the history it started from."""

    turns: list[Turn]  # at least one; the last carries reward and success
    states: list[Any]  # the environment's state after each turn; of the last turn, the state that was scored
    counts: BudgetCount  # tokens and tool calls; units are the caller's, who knows the stage
    error: str = ""  # what ENVIRONMENT_ERROR or ENGINE_ERROR was about


class _DeadlinePassed(Exception):
    """The episode's wall-clock deadline passed while a turn was sampled."""


class _Run:
    """The growing part of one episode."""

    def __init__(self, environment: Environment, limits: Limits, history: np.ndarray, state: Any, *, forked: bool):
        self.environment = environment
        self.state = state
        self._forked = forked  # until its prefix was booked
        self.size = history.shape[0]
        self._tokens = np.empty(max(limits.context_length, self.size), np.int32)
        self._tokens[: self.size] = history
        self._end = math.inf if limits.deadline is None else time.monotonic() + limits.deadline
        self._turns: list[Turn] = []
        self._states: list[Any] = []
        self._generated = self._prefilled = self._cached = 0
        self._prefix = self._prefix_cached = 0
        self.tool_calls = self.failed_calls = 0
        self.weight_version = -1  # stays so where nothing was sampled

    def history(self) -> np.ndarray:
        """A read-only view of all tokens so far; later appends never touch it."""
        view = self._tokens[: self.size]
        view.flags.writeable = False
        return view

    def remaining(self) -> float | None:
        """Seconds until the deadline, None without one."""
        return None if self._end == math.inf else self._end - time.monotonic()

    def count(self, generation: Generation) -> None:
        """Books what one request cost."""
        self._generated += generation.tokens.shape[0]
        self._prefilled += generation.prefilled_tokens
        self._cached += generation.cached_tokens
        if self._forked:
            trunk = self.environment.trunk.size  # held by the engine whoever asks: no merit of the fork's
            self._prefix, self._prefix_cached = self.size - trunk, max(generation.cached_tokens - trunk, 0)
            self._forked = False
        self.weight_version = generation.weight_version

    def extend(self, generation: Generation, observation: np.ndarray) -> None:
        """Appends a turn that is followed by another."""
        action, start = generation.tokens, self.size
        middle = start + action.shape[0]
        self.size = middle + observation.shape[0]
        self._tokens[start:middle] = action
        self._tokens[middle : self.size] = observation
        self._turns.append(Turn(action, generation.logprobs, observation, Finish.TURN, generation.weight_version))
        self._states.append(self.state)

    async def close(self, finish: Finish, generation: Generation | None = None) -> Episode:
        """Ends the episode by the task's score of the current state, or as ENVIRONMENT_ERROR if scoring fails."""
        try:
            outcome = await self.environment.score(self.state)
        except (Exception, SystemExit) as error:
            return self.fail(Finish.ENVIRONMENT_ERROR, error, generation)
        return self._end_with(finish, generation, float(outcome.reward), float(outcome.success), "")

    def fail(self, finish: Finish, error: BaseException, generation: Generation | None = None) -> Episode:
        """Ends the episode with reward and success 0."""
        message = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
        return self._end_with(finish, generation, 0.0, 0.0, message)

    def _end_with(
        self, finish: Finish, generation: Generation | None, reward: float, success: float, error: str
    ) -> Episode:
        action = _NO_TOKENS if generation is None else generation.tokens
        logprobs = _NO_LOGPROBS if generation is None else generation.logprobs
        self._turns.append(Turn(action, logprobs, _NO_TOKENS, finish, self.weight_version, reward, success))
        self._states.append(self.state)
        counts = BudgetCount(
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._cached,
            prefix_tokens=self._prefix,
            prefix_cached_tokens=self._prefix_cached,
            tool_calls=self.tool_calls,
            failed_calls=self.failed_calls,
        )
        return Episode(self._turns, self._states, counts, error)


async def run_episode(
    engine: Engine,
    environment: Environment,
    *,
    history: np.ndarray,
    state: Any,
    turn: int,
    limits: Limits,
    temperature: float,
    key: tuple[int, ...],
    salt: str,
    group: str = "",
    top_p: float = 1.0,
    top_k: int = 0,
) -> Episode:
    """Runs an episode to its end by the rules at the top of this file; returns its turns from `turn` on.

    Args:
      history: int32 [n], all tokens so far: the prompt, or the prefix H_t of an anchor.
      state: the environment's state that belongs to `history`.
      turn: turns already in `history`, below `limits.max_turns`.
      limits: of this episode, `Limits.of_prompt` applied.
      temperature: of sampling, > 0.
      key: the episode's sampling key; each request's key is this and the turn's index in the whole path.
      salt: name space of the engine's prefix cache (the weight version).
      group: whose prefixes it shares: the prompt's uid.
      top_p, top_k: of sampling, see `GenerateRequest`.

    Raises:
      ValueError: `turn` is no turn of an episode, or a generation breaks the engine's contract.
      Whatever the engine raises beside `EngineError`.
    """
    if not 0 <= turn < limits.max_turns:
        raise ValueError(f"an episode cannot start at turn {turn}; limits allow 0 to {limits.max_turns - 1}")
    run = _Run(environment, limits, history, state, forked=turn > 0)
    while True:
        if run.size >= limits.context_length:
            return await run.close(Finish.LENGTH)
        request = GenerateRequest(
            tokens=run.history(),
            max_new_tokens=min(limits.max_turn_tokens, limits.context_length - run.size),
            temperature=temperature,
            stop_ids=environment.stop_ids,
            key=(*key, turn),
            timeout=run.remaining(),
            salt=salt,
            group=group,
            stop_texts=environment.stop_texts,
            top_p=top_p,
            top_k=top_k,
        )
        turn += 1
        episode = await _one_turn(engine, run, request, turn, limits)
        if episode is not None:
            return episode


async def _one_turn(engine: Engine, run: _Run, request: GenerateRequest, turn: int, limits: Limits) -> Episode | None:
    """Samples a turn and has it answered; `turn` counts it already. None if the episode goes on."""
    try:
        generation = await _generate(engine, request)
    except _DeadlinePassed:
        return await run.close(Finish.DEADLINE)
    except EngineError as error:
        return run.fail(Finish.ENGINE_ERROR, error)
    run.count(generation)
    if not generation.stopped:
        return await run.close(Finish.LENGTH, generation)
    return await _answer(run, generation, turn, limits)


async def _generate(engine: Engine, request: GenerateRequest) -> Generation:
    """One checked generation. Raises `_DeadlinePassed` where `request.timeout` seconds were not enough."""
    if request.timeout is None:
        generation = await engine.generate(request)
    else:
        if request.timeout <= 0:
            raise _DeadlinePassed
        try:
            async with asyncio.timeout(request.timeout) as timer:
                generation = await engine.generate(request)
        except TimeoutError:
            if timer.expired():
                raise _DeadlinePassed from None
            raise
    generation.validate()
    if generation.tokens.shape[0] > request.max_new_tokens:
        raise ValueError(
            f"the engine returned {generation.tokens.shape[0]} tokens where {request.max_new_tokens} were allowed; "
            "it must honour max_new_tokens"
        )
    return generation


async def _answer(run: _Run, generation: Generation, turn: int, limits: Limits) -> Episode | None:
    """Lets the environment answer the turn; `turn` counts it already. None if the episode goes on."""
    environment = run.environment
    remaining, timeout = run.remaining(), environment.task.tool_timeout
    if timeout is not None and remaining is not None:
        timeout = min(timeout, max(remaining, 0.0))
    try:
        result = await environment.step(run.state, generation.tokens, timeout)
        goes_on = not result.done and turn < limits.max_turns
        calls, failed = int(result.tool_calls), int(result.failed_calls)
        observation = _NO_TOKENS
        if goes_on:
            observation = environment.observation(result.observation, limits.max_observation_tokens)
    except ToolTimeout as error:
        if timeout is not None and timeout < environment.task.tool_timeout:
            return await run.close(Finish.DEADLINE, generation)
        return run.fail(Finish.ENVIRONMENT_ERROR, error, generation)
    except (Exception, SystemExit) as error:
        return run.fail(Finish.ENVIRONMENT_ERROR, error, generation)
    run.state = result.state
    run.tool_calls += calls
    run.failed_calls += failed
    if not goes_on:
        return await run.close(Finish.ANSWER if result.done else Finish.TURN_LIMIT, generation)
    if run.size + generation.tokens.shape[0] + observation.shape[0] >= limits.context_length:
        return await run.close(Finish.LENGTH, generation)
    run.extend(generation, observation)
    return None
