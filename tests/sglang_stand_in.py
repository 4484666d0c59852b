"""Stands in for an SGLang server where no model is needed: same paths, same shapes, random tokens.

What it says about its cache and its weights is true: a prefix is cached if it was computed since the last flush in the
same name space, and every token names the version that was loaded when it was sampled.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

from tests.sglang_faults import Answer, FaultyServer

START_VERSION = "default"  # what a real server says of the weights that it was started with


class StandIn(FaultyServer):
    """A server over `vocab_size` tokens."""

    def __init__(self, *, vocab_size: int = 20, input_limit: int = 136, delay: float = 0.0, seed: int = 0):
        """
        Args:
          input_limit: `max_req_input_len`; a request must stay below.
          delay: seconds of a generation.
        """
        super().__init__(seed=seed)
        self.vocab_size, self.input_limit, self.delay = vocab_size, input_limit, delay
        self.version, self.loaded, self.model_path = START_VERSION, "", "start"  # `loaded`: content of the folder
        self.released = False
        self.generated: list[dict[str, Any]] = []  # replies to /generate
        self._running = asyncio.Event()
        self._running.set()
        self._cache: dict[Any, Any] = {}  # name space -> trie of tokens
        self._draws = random.Random(seed)

    def restart(self) -> None:
        """Forgets what a process that ends forgets; it may still be listening."""
        self.version, self.loaded, self.model_path, self.released = START_VERSION, "", "start", False
        self._cache.clear()
        self._running.set()

    @property
    def paused(self) -> bool:
        """Whether requests wait."""
        return not self._running.is_set()

    async def answer(self, path: str, document: dict[str, Any], body: bytes) -> Answer:
        """As the real one, but for the tokens."""
        answers = {
            "/health": self._health,
            "/server_info": lambda _: _json({"max_req_input_len": self.input_limit}),
            "/model_info": lambda _: _json({"weight_version": self.version, "model_path": self.model_path}),
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }
        if path not in answers:
            return Answer(404, b'{"detail":"Not Found"}')
        answer = answers[path](document)
        return await answer if asyncio.iscoroutine(answer) else answer

    def _health(self, document: dict[str, Any]) -> Answer:
        return Answer(503 if self.paused else 200, b"")  # the real one samples a token to find out

    def _pause(self, document: dict[str, Any]) -> Answer:
        self._running.clear()
        return _json({"status": "ok"})

    def _continue(self, document: dict[str, Any]) -> Answer:
        self._running.set()
        return _json({"status": "ok"})

    def _flush(self, document: dict[str, Any]) -> Answer:
        self._cache.clear()
        return Answer(200, b"Cache flushed.")

    def _update(self, document: dict[str, Any]) -> Answer:
        folder = Path(document["model_path"])
        file = next((folder / name for name in ("weights", "config.json") if (folder / name).is_file()), None)
        if file is None:
            return _json({"success": False, "message": f"Failed to get weights iterator: {folder}"}, 400)
        self.loaded, self.version, self.model_path = file.read_text(), document["weight_version"], str(folder)
        return _json({"success": True, "message": "Succeeded to update model weights."})

    def _release(self, document: dict[str, Any]) -> Answer:
        self.released = True
        return Answer(200, b"null")

    def _resume(self, document: dict[str, Any]) -> Answer:
        if not self.released:
            raise RuntimeError("the scheduler of a real server dies of this")
        self.released = False
        return Answer(200, b"null")

    async def _generate(self, document: dict[str, Any]) -> Answer:
        tokens, sampling = document["input_ids"], document["sampling_params"]
        count = sampling["max_new_tokens"]
        if max(tokens) >= self.vocab_size:
            raise RuntimeError("the scheduler of a real server dies of this")
        if len(tokens) >= self.input_limit or len(tokens) + count > self.input_limit + 4:
            message = "Requested token count exceeds the model's maximum context length"
            return _json({"error": {"message": message}}, 400)
        await self._running.wait()
        first = self.version
        cached = self._cached(document.get("extra_key"), tokens)
        await asyncio.sleep(self.delay)
        await self._running.wait()
        entries, finish = [], {"type": "length", "length": count}
        for _ in range(count):
            entries.append([math.log(self._draws.uniform(0.01, 1.0)), self._draws.randrange(self.vocab_size), None])
            if entries[-1][1] in sampling.get("stop_token_ids", ()):
                finish = {"type": "stop", "matched": entries[-1][1]}
                break
        sampled = [entry[1] for entry in entries]
        self._remember(document.get("extra_key"), (tokens + sampled)[: len(tokens) + max(len(sampled) - 1, 0)])
        meta = {
            "id": "0245d5053bf042b7910b79a8a046dd43",
            "finish_reason": finish,
            "prompt_tokens": len(tokens),
            "weight_version": self.version,
            "output_token_logprobs": entries,
            "completion_tokens": len(entries),
            "cached_tokens": cached,
            "weight_versions": _spans(first, self.version, len(entries)),
        }
        reply = {"text": "", "output_ids": sampled, "meta_info": meta}
        self.generated.append(reply)
        return _json(reply)

    def _cached(self, key: Any, tokens: list[int]) -> int:
        node, found = self._cache.get(key, {}), 0
        while found < len(tokens) - 1 and tokens[found] in node:  # the last token is always computed
            node, found = node[tokens[found]], found + 1
        return found

    def _remember(self, key: Any, tokens: list[int]) -> None:
        node = self._cache.setdefault(key, {})
        for token in tokens:
            node = node.setdefault(token, {})


def _json(document: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(document).encode())


def _spans(first: str, last: str, count: int) -> list[dict[str, Any]]:
    """Of a request that waited while the weights changed: its first token, if it has more, is of the old ones."""
    if first == last or count < 2:
        return [{"version": last, "start": 0, "end": count}]
    return [{"version": first, "start": 0, "end": 1}, {"version": last, "start": 1, "end": count}]
