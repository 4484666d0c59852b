"""The device side of the local engine: caches, slot state and the jitted calls, each of one static shape."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.engines import sampling
from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.models.state_features import StateFeatures
from trace_jax.types import GenerateRequest


@dataclasses.dataclass(frozen=True)
class LocalEngineConfig:
    """Static shapes of the engine."""

    slots: int = 64  # W: rows that decode together
    cache_rows: int = 512  # R: finished rows kept for reuse; at least the episodes in flight, plus forked parents
    context_length: int = 128  # tokens of a row in all: trunk, prompt and everything after it
    prefill_rows: int = 16  # P: slots of a prefill call, at most W
    prefill_chunk: int = 8  # C: tokens of each slot per prefill call
    decode_steps: int = 4  # device steps between two looks at the queue
    max_stop_ids: int = 4


@dataclasses.dataclass
class Plan:
    """What must happen before the next decode steps."""

    imports: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (slot, cache row)
    prefills: list[tuple[int, int, np.ndarray]] = dataclasses.field(default_factory=list)  # (slot, start, tokens)


class Device:
    """Slot cache [W, ...], row cache [R, ...], trunk and per-slot state. Not thread safe: one call at a time.

    Positions of a slot are counted from the end of the trunk, and its rows have `context_length` minus the trunk's
    length. The caches are made at the first call that needs them, so that only the length in use takes memory.
    """

    def __init__(self, model: DecoderConfig, config: LocalEngineConfig, features: StateFeatures | None = None):
        self._config = config
        self._model = decoder.engine_config(model)
        self._to_layout = jax.jit(functools.partial(decoder.engine_params, model))
        self._home = jax.local_devices()[0]
        self._params = self._kernel = self._trunk = self._slot_cache = self._row_cache = None
        self._length = 0  # S of the caches
        w = config.slots
        self._prefill_rows = min(config.prefill_rows, w)
        self._token = np.zeros(w, np.int32)  # next token to feed
        self._start = np.zeros(w, np.int32)  # its position
        self._left = np.zeros(w, np.int32)  # tokens that may still be sampled; 0 = the slot is free
        self._limit = np.zeros(w, np.int32)
        self._temperature = np.ones(w, np.float32)
        self._stop = np.full((w, config.max_stop_ids), -1, np.int32)
        self._key = np.zeros((w, 2), np.uint32)
        self._preload = jax.jit(functools.partial(_preload, self._model))
        self._copy = jax.jit(functools.partial(_copy_rows), donate_argnums=0)  # a partial: its own compile cache
        self._prefill = jax.jit(functools.partial(_prefill, self._model), donate_argnums=2)
        self._decode = jax.jit(functools.partial(_decode, self._model, config.decode_steps, features), donate_argnums=3)

    def compiles(self) -> dict[str, int]:
        """Compiled variants of each call."""
        calls = {"preload": self._preload, "copy": self._copy, "prefill": self._prefill, "decode": self._decode}
        return {name: call._cache_size() for name, call in calls.items()}

    def set_weights(self, params) -> None:
        """Takes parameters in the trainer's layout, sharded or not; keeps its own copy on this engine's device."""
        self._params, self._trunk = self._to_layout(jax.device_put(params, self._home)), None
        # Transposed once where it is tied to the embedding; inside a decode call that would cost as much as its steps.
        self._kernel = decoder.unembed(self._model, self._params)

    def set_trunk(self, tokens: np.ndarray) -> None:
        """Computes the keys and values that every row shares from now on; no tokens: none."""
        self._trunk = self._preload(self._params, tokens[None]) if tokens.shape[0] else None

    def admit(self, slot: int, request: GenerateRequest, limit: int) -> None:
        """Sets up a slot to decode `request` for at most `limit` tokens."""
        self._token[slot] = request.tokens[-1]
        self._start[slot] = request.tokens.shape[0] - 1 - decoder.trunk_length(self._trunk)
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

    def run(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Copies, prefills and decodes. Returns sampled ids (-1 where none) and log-probs, [W, decode_steps].

        Then features float32 [W, F] behind the first token that each slot fed, the last one of its history for a slot
        of this plan; None without features, and where the plan gives no slot away.
        """
        self._make_caches()
        self._slot_cache = self._copied(self._slot_cache, self._row_cache, plan.imports)
        self._run_prefill(plan.prefills)
        state = (self._token, self._start, self._left)
        fixed = (self._temperature, self._stop, self._key)
        self._slot_cache, state, token_WN, logprob_WN, features_WF = self._decode(
            self._params, self._kernel, self._trunk, self._slot_cache, state, fixed
        )
        self._token, self._start, self._left = (np.array(x) for x in state)
        wanted = features_WF is not None and plan.prefills
        return np.asarray(token_WN), np.asarray(logprob_WN), np.asarray(features_WF) if wanted else None

    def export(self, pairs: list[tuple[int, int]]) -> None:
        """Copies finished slots (slot, row) into the row cache."""
        self._row_cache = self._copied(self._row_cache, self._slot_cache, [(row, slot) for slot, row in pairs])

    def _make_caches(self) -> None:
        length = self._config.context_length - decoder.trunk_length(self._trunk)
        if length != self._length:
            self._length, self._slot_cache, self._row_cache = length, None, None  # the old ones go first
            # Placed like the parameters, so that the first call already has the layout of all later ones: one compile.
            empty = lambda rows: jax.device_put(decoder.init_cache(self._model, rows, length), self._home)
            self._slot_cache, self._row_cache = empty(self._config.slots), empty(self._config.cache_rows)

    def _copied(self, target, source, pairs: list[tuple[int, int]]):
        if not pairs:
            return target
        index = np.zeros((2, self._config.slots), np.int32)
        index[:, : len(pairs)] = np.asarray(pairs, np.int32).T
        return self._copy(target, source, index[0], index[1], np.int32(len(pairs)))

    def _run_prefill(self, prefills: list[tuple[int, int, np.ndarray]]) -> None:
        """Chunk after chunk of every slot, the slots with most left first: the fewest calls."""
        width, rows = self._config.prefill_chunk, self._prefill_rows
        left = [(slot, start, tokens) for slot, start, tokens in prefills if tokens.shape[0]]
        while left:
            left.sort(key=lambda entry: -entry[2].shape[0])
            token = np.zeros((rows, width), np.int32)
            slots, start, count = (np.zeros(rows, np.int32) for _ in range(3))
            now, left = left[:rows], left[rows:]
            for i, (slot, at, tokens) in enumerate(now):
                part, rest = tokens[:width], tokens[width:]
                token[i, : part.shape[0]] = part
                slots[i], start[i], count[i] = slot, at, part.shape[0]
                if rest.shape[0]:
                    left.append((slot, at + width, rest))
            self._slot_cache = self._prefill(
                self._params, self._trunk, self._slot_cache, slots, token, start, count, np.int32(len(now))
            )


def _copy_rows(target, source, target_row, source_row, count):
    """target[target_row[i]] = source[source_row[i]] for i < count, for every layer's keys and values, in place."""

    def body(i, target):
        def one(old, new):
            row = jax.lax.dynamic_slice_in_dim(new, source_row[i], 1, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(old, row, target_row[i], axis=0)

        return jax.tree.map(one, target, source)

    return jax.lax.fori_loop(0, count, body, target)


def _preload(model, params, token_1L):
    length = token_1L.shape[1]
    start, count = jnp.zeros(1, jnp.int32), jnp.full(1, length, jnp.int32)
    cache = decoder.init_cache(model, 1, length)
    return decoder.as_trunk(decoder.extend(model, params, token_1L, start, count, cache)[1])


def _prefill(model, params, trunk, cache, slot_P, token_PC, start_P, count_P, rows):
    """Feeds tokens to the slots `slot_P[:rows]`; the rest of the call is padding."""
    part = jax.tree.map(lambda x: x[slot_P], cache)
    part = decoder.extend(model, params, token_PC, start_P, count_P, part, trunk)[1]
    return _copy_rows(cache, part, slot_P, jnp.arange(slot_P.shape[0]), rows)


def _decode(model, steps, features, params, kernel_DV, trunk, cache, state, fixed):
    """Up to `steps` tokens for every slot with something left to sample. Ends early when no slot has.

    With features, also those of the first step's states [W, F]; else None, and nothing is kept of them.
    """
    temperature_W, stop_WJ, key_W2 = fixed
    slots = temperature_W.shape[0]
    # A slot's noise depends on its key and the position in the whole row, trunk included, and on nothing else.
    at_WN = state[1][:, None] + decoder.trunk_length(trunk) + jnp.arange(steps)[None]
    noise = jax.vmap(jax.vmap(lambda key, at: jax.random.uniform(jax.random.fold_in(key, at)), (None, 0)))
    noise_WN = noise(jax.random.wrap_key_data(key_W2), at_WN)

    def body(carry):
        i, cache, (token_W, start_W, left_W), out_WN, logprob_WN, first_WLD = carry
        live_W = left_W > 0
        hidden_WCD, cache, *states = decoder.extend(
            model, params, token_W[:, None], start_W, live_W.astype(jnp.int32), cache, trunk, layers
        )
        if features is not None:
            first_WLD = jnp.where(i == 0, states[0][:, 0], first_WLD)
        logits_WV = hidden_WCD[:, 0] @ kernel_DV.astype(jnp.float32) / temperature_W[:, None]
        new_W, logprob_W = sampling.draw(logits_WV, noise_WN[:, i])
        stopped_W = jnp.any(new_W[:, None] == stop_WJ, axis=-1)
        left_W = jnp.where(live_W & ~stopped_W, left_W - 1, 0)
        state = (jnp.where(live_W, new_W, token_W), start_W + live_W, left_W)
        out_WN = out_WN.at[:, i].set(jnp.where(live_W, new_W, -1))
        logprob_WN = logprob_WN.at[:, i].set(jnp.where(live_W, logprob_W, 0.0))
        return i + 1, cache, state, out_WN, logprob_WN, first_WLD

    layers = first_WLD = None
    if features is not None:
        layers, first_WLD = features.layers, jnp.zeros((slots, len(features.layers), model.hidden_size), jnp.float32)
    out_WN, logprob_WN = jnp.full((slots, steps), -1, jnp.int32), jnp.zeros((slots, steps), jnp.float32)
    going = lambda carry: (carry[0] < steps) & jnp.any(carry[2][2] > 0)
    carry = (0, cache, state, out_WN, logprob_WN, first_WLD)
    _, cache, state, out_WN, logprob_WN, first_WLD = jax.lax.while_loop(going, body, carry)
    return cache, state, out_WN, logprob_WN, None if features is None else features.of_states(first_WLD)
