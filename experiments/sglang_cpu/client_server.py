"""Answers `/generate` with a fixed reply after a fixed time: so little that a client, not this, is the bottleneck.

    python -m experiments.sglang_cpu.client_server DELAY PROMPT_TOKENS NEW_TOKENS

prints its port. Only what the client under measurement needs is there; a body is read and not looked at.
"""

from __future__ import annotations

import asyncio
import json
import sys

SAMPLED_ID = 100_000  # six digits, as ids of large vocabularies have


def reply(prompt_tokens: int, new_tokens: int) -> bytes:
    """The body of every `/generate`, with all fields that SGLang 0.5.23 sends."""
    meta = {
        "id": "0245d5053bf042b7910b79a8a046dd43",
        "finish_reason": {"type": "length", "length": new_tokens},
        "prompt_tokens": prompt_tokens,
        "weight_version": "0",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-1.1670492887496948 - i / 64, SAMPLED_ID + i, None] for i in range(new_tokens)],
        "output_token_logprobs_length": new_tokens,
        "reasoning_tokens": 0,
        "completion_tokens": new_tokens,
        "cached_tokens": prompt_tokens - 1,
        "weight_versions": [{"version": "0", "start": 0, "end": new_tokens}],
        "cached_tokens_details": {"device": prompt_tokens - 1, "host": 0},
        "dp_rank": None,
        "e2e_latency": 0.038349447000655346,
        "response_sent_to_client_ts": 1795983972.045933,
    }
    ids = [SAMPLED_ID + i for i in range(new_tokens)]
    return json.dumps({"text": "word " * new_tokens, "output_ids": ids, "meta_info": meta}).encode()


class Weights:
    """What the server says that it serves: version 0, from the folder of the last update."""

    folder = ""

    def control(self, body: bytes) -> bytes:
        """The body of every reply but those of `/generate`."""
        self.folder = (json.loads(body) if body else {}).get("model_path", self.folder)
        served = {"weight_version": "0", "model_path": self.folder}
        return json.dumps({"success": True, "max_req_input_len": 2**20} | served).encode()


def framed(body: bytes) -> bytes:
    """A body as an HTTP reply."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Connection(asyncio.Protocol):
    """One connection that is kept alive: requests one after the other."""

    def __init__(self, answer: bytes, delay: float, weights: Weights):
        self._answer, self._delay, self._weights, self._buffer = answer, delay, weights, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            if head.startswith(b"post /generate "):
                asyncio.get_running_loop().call_later(self._delay, self._send, self._answer)
            else:
                self._send(framed(self._weights.control(body)))

    def _send(self, content: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(content)


async def serve(delay: float, prompt_tokens: int, new_tokens: int) -> None:
    """Serves until the process is ended."""
    answer, weights = framed(reply(prompt_tokens, new_tokens)), Weights()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answer, delay, weights), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
