"""The device side of the local engine: caches, slot state and the four jitted calls, each of one static shape."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.types import GenerateRequest


@dataclasses.dataclass(frozen=True)
class LocalEngineConfig:
    """Static shapes of the engine."""

    slots: int = 64  # W: rows that decode together
    cache_rows: int = 512  # R: finished rows kept for reuse; at least the episodes in flight, plus forked parents
    context_length: int = 128  # S: tokens of a row, prompt and everything after it
    prefill_chunk: int = 8  # C: tokens of each slot per prefill call
    decode_steps: int = 4  # device steps between two looks at the queue
    max_stop_ids: int = 4


@dataclasses.dataclass
class Plan:
    """What must happen before the next decode steps."""

    imports: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (slot, cache row)
    prefills: list[tuple[int, int, np.ndarray]] = dataclasses.field(default_factory=list)  # (slot, start, tokens)


class Device:
    """Slot cache [W, ...], row cache [R, ...] and per-slot state. Not thread safe: one call at a time."""

    def __init__(self, model: DecoderConfig, config: LocalEngineConfig):
        self._config = config
        self._model = decoder.engine_config(model)
        self._to_layout = jax.jit(functools.partial(decoder.engine_params, model))
        self._home = jax.local_devices()[0]
        # Placed like the parameters, so that the first call already has the layout of all later ones: one compile.
        empty = lambda rows: jax.device_put(decoder.init_cache(self._model, rows, config.context_length), self._home)
        self._slot_cache, self._row_cache = empty(config.slots), empty(config.cache_rows)
        self._params = None
        w = config.slots
        self._token = np.zeros(w, np.int32)  # next token to feed
        self._start = np.zeros(w, np.int32)  # its position
        self._left = np.zeros(w, np.int32)  # tokens that may still be sampled; 0 = the slot is free
        self._limit = np.zeros(w, np.int32)
        self._temperature = np.ones(w, np.float32)
        self._stop = np.full((w, config.max_stop_ids), -1, np.int32)
        self._key = np.zeros((w, 2), np.uint32)
        self._copy = jax.jit(functools.partial(_copy_rows), donate_argnums=0)  # a partial: its own compile cache
        self._prefill = jax.jit(functools.partial(_prefill, self._model), donate_argnums=1)
        self._decode = jax.jit(functools.partial(_decode, self._model, config.decode_steps), donate_argnums=1)

    def compiles(self) -> dict[str, int]:
        """Compiled variants of each call."""
        calls = {"copy": self._copy, "prefill": self._prefill, "decode": self._decode}
        return {name: call._cache_size() for name, call in calls.items()}

    def set_weights(self, params) -> None:
        """Takes parameters in the trainer's layout, sharded or not; keeps its own copy on this engine's device."""
        self._params = self._to_layout(jax.device_put(params, self._home))

    def admit(self, slot: int, request: GenerateRequest, limit: int) -> None:
        """Sets up a slot to decode `request` for at most `limit` tokens."""
        self._token[slot] = request.tokens[-1]
        self._start[slot] = request.tokens.shape[0] - 1
        self._left[slot] = self._limit[slot] = limit
        self._temperature[slot] = request.temperature
        self._stop[slot] = -1
        self._stop[slot, : len(request.stop_ids)] = request.stop_ids
        self._key[slot] = np.random.SeedSequence(request.key).generate_state(2, np.uint32)

    def retire(self, slot: int) -> None:
        """Frees a slot."""
        self._left[slot] = 0

    def limit(self, slot: int) -> int:
        """Tokens that the slot's request may sample in all."""
        return int(self._limit[slot])

    def run(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """Copies, prefills and decodes. Returns sampled ids (-1 where none) and log-probs, [W, decode_steps]."""
        self._slot_cache = self._copied(self._slot_cache, self._row_cache, plan.imports)
        self._run_prefill(plan.prefills)
        state = (self._token, self._start, self._left)
        fixed = (self._temperature, self._stop, self._key)
        self._slot_cache, state, token_WN, logprob_WN = self._decode(self._params, self._slot_cache, state, fixed)
        self._token, self._start, self._left = (np.array(x) for x in state)
        return np.asarray(token_WN), np.asarray(logprob_WN)

    def export(self, pairs: list[tuple[int, int]]) -> None:
        """Copies finished slots (slot, row) into the row cache."""
        self._row_cache = self._copied(self._row_cache, self._slot_cache, [(row, slot) for slot, row in pairs])

    def _copied(self, target, source, pairs: list[tuple[int, int]]):
        if not pairs:
            return target
        index = np.zeros((2, self._config.slots), np.int32)
        index[:, : len(pairs)] = np.asarray(pairs, np.int32).T
        return self._copy(target, source, index[0], index[1], np.int32(len(pairs)))

    def _run_prefill(self, prefills: list[tuple[int, int, np.ndarray]]) -> None:
        width = self._config.prefill_chunk
        longest = max((tokens.shape[0] for _, _, tokens in prefills), default=0)
        for at in range(0, longest, width):
            token = np.zeros((self._config.slots, width), np.int32)
            start, count = np.zeros(self._config.slots, np.int32), np.zeros(self._config.slots, np.int32)
            for slot, cached, tokens in prefills:
                part = tokens[at : at + width]
                token[slot, : part.shape[0]] = part
                start[slot], count[slot] = cached + at, part.shape[0]
            self._slot_cache = self._prefill(self._params, self._slot_cache, token, start, count)


def _copy_rows(target, source, target_row, source_row, count):
    """target[target_row[i]] = source[source_row[i]] for i < count, for every layer's keys and values, in place."""

    def body(i, target):
        def one(old, new):
            row = jax.lax.dynamic_slice_in_dim(new, source_row[i], 1, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(old, row, target_row[i], axis=0)

        return jax.tree.map(one, target, source)

    return jax.lax.fori_loop(0, count, body, target)


def _prefill(model, params, cache, token_WC, start_W, count_W):
    return decoder.extend(model, params, token_WC, start_W, count_W, cache)[1]


def _decode(model, steps, params, cache, state, fixed):
    """Up to `steps` tokens for every slot with something left to sample. Ends early when no slot has."""
    temperature_W, stop_WJ, key_W2 = fixed
    key_W = jax.random.wrap_key_data(key_W2)
    kernel_DV = decoder.unembed(model, params)
    slots = temperature_W.shape[0]

    def sample(hidden_WD, start_W):
        logits_WV = hidden_WD @ kernel_DV.astype(jnp.float32) / temperature_W[:, None]
        logprob_WV = jax.nn.log_softmax(logits_WV)
        noise = jax.vmap(lambda key, at: jax.random.gumbel(jax.random.fold_in(key, at), logits_WV.shape[1:]))
        token_W = jnp.argmax(logprob_WV + noise(key_W, start_W), axis=-1).astype(jnp.int32)
        return token_W, jnp.take_along_axis(logprob_WV, token_W[:, None], axis=-1)[:, 0]

    def body(carry):
        i, cache, (token_W, start_W, left_W), out_WN, logprob_WN = carry
        live_W = left_W > 0
        hidden_WCD, cache = decoder.extend(
            model, params, token_W[:, None], start_W, live_W.astype(jnp.int32), cache
        )
        new_W, logprob_W = sample(hidden_WCD[:, 0], start_W)
        stopped_W = jnp.any(new_W[:, None] == stop_WJ, axis=-1)
        left_W = jnp.where(live_W & ~stopped_W, left_W - 1, 0)
        state = (jnp.where(live_W, new_W, token_W), start_W + live_W, left_W)
        out_WN = out_WN.at[:, i].set(jnp.where(live_W, new_W, -1))
        logprob_WN = logprob_WN.at[:, i].set(jnp.where(live_W, logprob_W, 0.0))
        return i + 1, cache, state, out_WN, logprob_WN

    out_WN, logprob_WN = jnp.full((slots, steps), -1, jnp.int32), jnp.zeros((slots, steps), jnp.float32)
    going = lambda carry: (carry[0] < steps) & jnp.any(carry[2][2] > 0)
    _, cache, state, out_WN, logprob_WN = jax.lax.while_loop(going, body, (0, cache, state, out_WN, logprob_WN))
    return cache, state, out_WN, logprob_WN
