"""The server that the client's cost is measured against, and the measurement on it."""

from __future__ import annotations

import asyncio
import json

import pytest

from experiments.sglang_cpu import client, client_server
from trace_jax.engines import sglang_wire as wire


class Transport:
    """Keeps what is written."""

    def __init__(self):
        self.written = b""

    def is_closing(self):
        return False

    def write(self, content):
        self.written += content


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_requests_are_found_however_they_arrive(size):
    """A generation and a control call in pieces of `size` bytes: two replies, in order."""

    async def main():
        connection = client_server.Connection(client_server.framed(b"generated"), 0.0, client_server.Weights())
        connection.connection_made(transport := Transport())
        body = b'{"input_ids":[1,2]}'
        content = b"GET /model_info HTTP/1.1\r\nHost: a\r\n\r\n"
        content = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body + content
        for start in range(0, len(content), size):
            connection.data_received(content[start : start + size])
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        return transport.written

    written = asyncio.run(main())
    assert written.count(b"HTTP/1.1 200 OK") == 2
    assert b"generated" in written and b"max_req_input_len" in written


def test_the_reply_is_one_that_the_client_takes():
    request = client.request(0)
    generation = wire.read_generation(
        client_server.reply(client.PROMPT, client.NEW), request, version=0, vocab_size=client.VOCABULARY
    )
    assert generation.tokens.shape == (client.NEW,) and generation.cached_tokens == client.PROMPT - 1


def test_a_measurement_in_small(monkeypatch):
    """8 in flight on a server that answers after 0.1 s: at most 80 requests/s, and about as many."""
    monkeypatch.setattr(client, "IN_FLIGHT", 8)
    monkeypatch.setattr(client, "WARM_UP", 0.3)
    with client.server(0.1) as url:
        row = asyncio.run(client.measure(url, 1.0))
    assert 30 <= row["requests_per_second"] <= 88
    assert 0 < row["cpu_ms"] < 1000 / 30
    with client.server(0.0) as url:
        assert asyncio.run(client.server_alone(url, 0.3))["requests"] > 64


def test_bodies_are_as_large_as_those_of_large_vocabularies():
    body = json.loads(wire.generate_body(client.request(3), context_length=client.CONTEXT, salt="0"))
    assert len(body["input_ids"]) == 600 and max(body["input_ids"]) > 100_000
