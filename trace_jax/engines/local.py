"""The in-process engine: continuous batching over a fixed number of slots, with a prefix cache.

A request takes a slot. What the cache already holds of its history is copied into the slot, the rest is prefilled in
chunks of a fixed width, and the slot decodes until a stop id. The finished row is copied back to the cache, where the
next turn of the same episode, or a fork of it, finds it: a fork prefills only what its parent's row does not hold.
What all requests begin with (few-shot examples, say) can be preloaded: it is computed and stored once, and slots and
cache rows hold only what comes after it.

Results never depend on arrival order. Every device call has one static shape ([P, C] to prefill, [W, 1] to decode), so
a row's bits do not depend on its slot or its neighbours; noise comes from a key folded from the request's own key and
the position; and each token is computed by the same call whoever asks first: the last token of a history and all but
the last token of a generation by decode, everything else by prefill. The one exception is a full cache: evicted rows
are computed again, generated tokens then by prefill, and log-probs move in the last bits (`stats` counts them).

With features (`models.state_features`) the engine keeps a record of them: as the last token of every history goes
through the first decode step after its request got a slot, that step's states are the history's own, and a predictor
that is linear in them needs no forward pass. What is true of log-probs is true of the record: its bits do not depend on
arrival order. They are not those of packed rows, only equal to rounding.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from trace_jax.engines import local_device
from trace_jax.engines.base import EngineError
from trace_jax.engines.local_device import LocalEngineConfig
from trace_jax.engines.prefix_cache import PrefixCache
from trace_jax.models.config import DecoderConfig
from trace_jax.models.state_features import StateFeatures
from trace_jax.types import GenerateRequest, Generation


@dataclasses.dataclass
class _Slot:
    """A slot that decodes: its request, and what was sampled so far."""

    request: GenerateRequest
    future: asyncio.Future
    cached: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    done: bool = False
    stopped: bool = False


_NO_TOKENS = np.zeros(0, np.int32)


class LocalEngine:
    """`engines.base.Engine` in this process. One asyncio loop at a time; call `set_weights` before any request."""

    def __init__(self, model: DecoderConfig, config: LocalEngineConfig, *, features: StateFeatures | None = None):
        """With features, those of every history that is asked for are kept.

        `state_record` maps `record_key(history)` to them, float32 [F], until the next weights or another trunk: then
        the engine starts a fresh dict, and whoever holds the old one keeps it.
        """
        self.config = config
        self.context_length = config.context_length
        self.weight_version = -1
        self.preloaded_tokens = 0
        self._trunk = _NO_TOKENS
        self._model = model
        self.state_record: dict[bytes, np.ndarray] = {}
        self._features = features
        self._scored_tokens = 0
        self._device = local_device.Device(model, config, features)
        self._cache = PrefixCache(config.cache_rows, config.context_length)
        self._slots: list[_Slot | None] = [None] * config.slots
        self._held: list[int] = [-1] * config.slots  # cache row whose content a free slot still holds
        self._queue: list[tuple[GenerateRequest, asyncio.Future]] = []
        self._worker: asyncio.Task | None = None

    def stats(self) -> dict[str, float]:
        """Since the engine was made.

        `cache_evictions`: cache rows that were given up for lack of room. With features also `scored_tokens`: tokens
        that `states` had prefilled.
        """
        scored = {} if self._features is None else {"scored_tokens": self._scored_tokens}
        return {"cache_evictions": self._cache.evictions, **scored}

    async def release(self) -> None:
        """Keeps its memory: this process's allocator would not give it to anyone else."""

    def compiles(self) -> dict[str, int]:
        """Compiled variants of each device call: one each (the copy has two, in and out), for each trunk length."""
        return self._device.compiles()

    async def set_weights(self, params, version: int) -> None:
        """Takes the policy's parameters (any layout of `models.decoder`) and empties the prefix cache."""
        if self._queue or any(slot is not None for slot in self._slots):
            raise EngineError("set_weights while requests are running; wait for them first")
        self._device.set_weights(params)
        self._forget(_NO_TOKENS)
        self.weight_version = version

    async def preload(self, tokens: np.ndarray) -> None:
        """See `engines.base.Engine`. Another length than the last one compiles all calls anew and remakes the caches.

        All salts share the trunk. Raises EngineError without weights, for tokens that leave no room in the context or
        lie outside the vocabulary, and while requests are running.
        """
        tokens = np.array(tokens, np.int32)
        if self.weight_version < 0:
            raise EngineError("the engine has no weights; call set_weights first")
        if self._queue or any(slot is not None for slot in self._slots):
            raise EngineError("preload while requests are running; wait for them first")
        if tokens.shape[0] > self.context_length - 2:
            raise EngineError(
                f"{tokens.shape[0]} tokens to preload leave no room in the engine's context of {self.context_length}; "
                "enlarge it or shorten them"
            )
        self._check_ids(tokens)
        if np.array_equal(tokens, self._trunk):
            return  # the weights are those it was computed with
        self._device.set_trunk(tokens)  # not in a thread: a request that came meanwhile would find half a change
        self._forget(tokens)
        self.preloaded_tokens += tokens.shape[0]

    def _forget(self, trunk: np.ndarray) -> None:
        """Empties the cache, whose rows hold what comes after `trunk` from now on, and begins a new record."""
        self._cache.clear()
        self.state_record = {}
        self._held = [-1] * self.config.slots
        self._trunk = trunk

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples one turn. Raises EngineError for a request that can never be served, or when the engine is closed."""
        self._check(request)
        return await self._submit(request)

    async def states(self, histories: Sequence[np.ndarray], salt: str = "") -> np.ndarray:
        """float32 [n, F]: the features of each history, from the record; what is not on record is computed for it.

        That takes a request of one token for each such history, under `salt`, as `GenerateRequest` has it. Its row then
        is in the prefix cache, where a request for the same history, or for one that goes on after it, finds it.

        Raises EngineError for a history that `generate` could not serve, and when the engine is closed; ValueError for
        an engine without features.
        """
        if self._features is None:
            raise ValueError("the engine keeps no states; make it with features")
        keys, record = [record_key(history) for history in histories], self.state_record
        missing = {key: _one_token(key, salt) for key in keys if key not in record}
        for request in missing.values():
            self._check(request)
        # All at once, before anyone else's turn: weights cannot change under them, so they are put on this record.
        for generation in await asyncio.gather(*(self._submit(request) for request in missing.values())):
            self._scored_tokens += generation.prefilled_tokens
        return np.stack([record[key] for key in keys]) if keys else np.zeros((0, self._features.size), np.float32)

    def _submit(self, request: GenerateRequest) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        self._queue.append((request, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return future

    async def close(self) -> None:
        """Stops the worker; requests still running fail with EngineError."""
        if self._worker is not None:
            self._worker.cancel()
        self._fail_all(EngineError("the local engine was closed"))

    def _check(self, request: GenerateRequest) -> None:
        n, trunk = request.tokens.shape[0], self._trunk.shape[0]
        if self.weight_version < 0:
            raise EngineError("the engine has no weights; call set_weights first")
        if not 1 <= n < self.context_length:
            raise EngineError(f"a request of {n} tokens does not fit the engine's context of {self.context_length}")
        self._check_ids(request.tokens)
        if trunk and not (n > trunk and np.array_equal(request.tokens[:trunk], self._trunk)):
            raise EngineError(
                f"a request of {n} tokens does not begin with the {trunk} preloaded ones and go on after them; "
                "preload what all prompts share, or nothing"
            )
        if request.stop_texts or request.top_p != 1 or request.top_k:
            raise EngineError(
                "the in-process engine ends a turn at ids and draws from all tokens; stop texts, top_p and top_k need "
                "an SGLang server"
            )
        if request.max_new_tokens < 1 or request.temperature <= 0:
            raise EngineError("max_new_tokens must be at least 1 and temperature above 0")
        if len(request.stop_ids) > self.config.max_stop_ids:
            raise EngineError(f"{len(request.stop_ids)} stop ids, but max_stop_ids is {self.config.max_stop_ids}")

    def _check_ids(self, tokens: np.ndarray) -> None:
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self._model.vocab_size):
            raise EngineError(f"a token id lies outside the vocabulary of {self._model.vocab_size}")

    async def _work(self) -> None:
        """Admit, prefill, decode a few steps, hand out what is finished; until nobody waits."""
        try:
            while self._queue or any(self._slots):
                self._drop_cancelled()
                plan = self._admit()
                tokens, logprobs, features = await asyncio.to_thread(self._device.run, plan)
                if features is not None:
                    self._put_on_record(features)
                self._collect(tokens, logprobs)
                await asyncio.sleep(0)  # the callers' next turns arrive before the next admission
        except asyncio.CancelledError:
            self._fail_all(EngineError("the local engine was stopped"))
            raise
        except Exception as error:
            # A defect or a broken device must end the run: every waiting request raises it, as nobody awaits this task.
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        waiting = [future for _, future in self._queue] + [slot.future for slot in self._slots if slot]
        self._queue, self._slots = [], [None] * self.config.slots
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def _drop_cancelled(self) -> None:
        self._queue = [(request, future) for request, future in self._queue if not future.done()]
        for i, slot in enumerate(self._slots):
            if slot is not None and slot.future.done():
                self._release(i, -1)

    def _release(self, i: int, held: int) -> None:
        self._slots[i], self._held[i] = None, held
        self._device.retire(i)

    def _admit(self) -> local_device.Plan:
        """Gives free slots to waiting requests and says what must be copied and prefilled for them."""
        plan, trunk = local_device.Plan(), self._trunk.shape[0]
        free = [i for i, slot in enumerate(self._slots) if slot is None]
        while self._queue and free:
            request, future = self._queue.pop(0)
            own = request.tokens[trunk:]
            row, cached = self._cache.longest_prefix(own, request.salt)
            i = next((j for j in free if row >= 0 and self._held[j] == row), free[0])
            free.remove(i)
            if cached and self._held[i] != row:
                plan.imports.append((i, row))
            self._held[i] = -1
            self._slots[i] = _Slot(request, future, trunk + cached)
            plan.prefills.append((i, cached, own[cached:-1]))
            room = self.context_length - request.tokens.shape[0]
            self._device.admit(i, request, min(request.max_new_tokens, room))
        return plan

    def _put_on_record(self, features_WF: np.ndarray) -> None:
        """Keeps the features of the slots that were given away this round, before their first tokens are collected."""
        for slot, features_F in zip(self._slots, features_WF, strict=True):
            if slot is not None and not slot.tokens:
                key = record_key(slot.request.tokens)
                if key not in self.state_record:
                    self.state_record[key] = features_F.copy()  # not a view, which would keep all slots' alive

    def _collect(self, tokens_WN: np.ndarray, logprobs_WN: np.ndarray) -> None:
        """Appends what the slots sampled (-1: nothing) and resolves the finished ones."""
        finished = []
        for i, slot in enumerate(self._slots):
            if slot is None:
                continue
            new = tokens_WN[i][tokens_WN[i] >= 0]
            slot.tokens.extend(new.tolist())
            slot.logprobs.extend(logprobs_WN[i][: new.shape[0]].tolist())
            slot.stopped = bool(slot.tokens) and slot.tokens[-1] in slot.request.stop_ids
            if slot.stopped or len(slot.tokens) >= self._device.limit(i):
                finished.append(i)
        exports = []
        for i in finished:
            row = self._finish(i)
            exports.append((i, row))
        self._device.export(exports)

    def _finish(self, i: int) -> int:
        slot = self._slots[i]
        request, n = slot.request, slot.request.tokens.shape[0]
        tokens = np.asarray(slot.tokens, np.int32)
        own = request.tokens[self._trunk.shape[0] :]
        row = self._cache.insert(np.concatenate([own, tokens[:-1]]), request.salt)
        self._held = [-1 if held == row else held for held in self._held]
        self._release(i, row)
        if not slot.future.done():
            slot.future.set_result(
                Generation(
                    tokens=tokens,
                    logprobs=np.asarray(slot.logprobs, np.float32),
                    stopped=slot.stopped,
                    cached_tokens=slot.cached,
                    prefilled_tokens=n - slot.cached,
                    weight_version=self.weight_version,
                )
            )
        return row


def record_key(history: np.ndarray) -> bytes:
    """Under which `LocalEngine.state_record` has a history: the bytes of its ids as int32."""
    return np.asarray(history, np.int32).tobytes()


def _one_token(key: bytes, salt: str) -> GenerateRequest:
    """A request for the history's state; what it samples is of no interest."""
    return GenerateRequest(np.frombuffer(key, np.int32), 1, 1.0, (), (0,), salt=salt)
