"""What the client of SGLang servers costs: 512 requests kept in flight through `SglangEngine`.

    python -m experiments.sglang_cpu.client

The server (`client_server`, in a process of its own) answers after 1 s, so 512 requests/s are ideal. Every request has
a history of 600 tokens and gets 16 tokens with log-probs. Beside it the same with a server that answers at once: how many
requests/s the client can do at all; and the server alone, asked by a client that does nothing but write and read bytes.
Medians go to raw/client.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.sglang_cpu import client_server
from trace_jax.engines import sglang_wire as wire
from trace_jax.engines.sglang import Settings, SglangEngine
from trace_jax.engines.weight_folders import WeightFolders
from trace_jax.types import GenerateRequest

HERE = Path(__file__).resolve().parent
IN_FLIGHT, DELAY = 512, 1.0
PROMPT, NEW, CONTEXT, VOCABULARY = 600, 16, 2048, 151_936
PER_PROMPT = 8  # requests of one prompt, whose prefixes are shared
WARM_UP = 3.0  # seconds that are not measured: connections, and the first answers


@contextlib.contextmanager
def server(delay: float) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    module = "experiments.sglang_cpu.client_server"
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(delay), str(PROMPT), str(NEW)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def request(index: int) -> GenerateRequest:
    """A turn of an episode late enough to have a long history."""
    tokens = np.random.default_rng(index).integers(0, VOCABULARY, PROMPT, dtype=np.int32)
    group = str(index // PER_PROMPT)
    return GenerateRequest(tokens, max_new_tokens=256, temperature=1.0, stop_ids=(7,), key=(index,), group=group)


async def measure(url: str, seconds: float) -> dict[str, float]:
    """Requests/s, and the CPU seconds of this process for each, while `IN_FLIGHT` are in flight all the time."""
    settings = Settings(
        request_timeout=60.0, attempts=6, update_timeout=60.0, outage_timeout=60.0, release_memory=False
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = SglangEngine(
            [url],
            router=None,
            context_length=CONTEXT,
            vocab_size=VOCABULARY,
            sampled_vocab=VOCABULARY,
            weights=WeightFolders(Path(folder) / "weights", lambda folder, params: None),
            settings=settings,
        )
        await engine.set_weights(None, 0)
        done = 0

        async def keep(index: int) -> None:
            nonlocal done
            turn = request(index)
            while True:
                generation = await engine.generate(turn)
                assert generation.tokens.shape == (NEW,)
                done += 1

        work = [asyncio.create_task(keep(index)) for index in range(IN_FLIGHT)]
        await asyncio.sleep(WARM_UP)
        before, cpu, begin = done, time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        count, cpu, wall = done - before, time.process_time() - cpu, time.perf_counter() - begin
        assert not any(task.done() for task in work), "a request failed"
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        assert engine.stats()["retries"] == 0
        await engine.close()
    return {"requests": count, "seconds": wall, "requests_per_second": count / wall, "cpu_ms": 1000 * cpu / count}


async def server_alone(url: str, seconds: float) -> dict[str, float]:
    """Requests/s of the server where the client only writes and reads bytes, on 64 connections."""
    body = wire.generate_body(request(0), context_length=CONTEXT, salt="0")
    content = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    size = len(client_server.framed(client_server.reply(PROMPT, NEW)))
    done, end = 0, time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        while time.perf_counter() < end:
            writer.write(content)
            await reader.readexactly(size)
            done += 1
        writer.close()

    await asyncio.gather(*(ask() for _ in range(64)))
    return {"requests": done, "seconds": seconds, "requests_per_second": done / seconds}


def main() -> None:
    """Measures and writes raw/client.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw", default=HERE / "raw", type=Path, help="where measurements are kept")
    parser.add_argument("--seconds", default=20.0, type=float, help="of one measurement")
    parser.add_argument("--repeats", default=3, type=int)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for repeat in range(arguments.repeats):
        for kind, delay, act, seconds in (
            ("server_alone", 0.0, server_alone, 5.0),
            ("in_flight", DELAY, measure, arguments.seconds),
            ("saturation", 0.0, measure, arguments.seconds / 2),
        ):
            load = os.getloadavg()[0]
            with server(delay) as url:
                rows.append({"kind": kind, "repeat": repeat, "load_before": load} | asyncio.run(act(url, seconds)))
            print(json.dumps(rows[-1]), flush=True)

    def median(kind: str, name: str) -> float:
        return statistics.median(row[name] for row in rows if row["kind"] == kind)

    result = {
        "ideal_throughput_share": median("in_flight", "requests_per_second") * DELAY / IN_FLIGHT,
        "cpu_ms_per_request": median("in_flight", "cpu_ms"),
        "saturation_requests_per_second": median("saturation", "requests_per_second"),
        "saturation_cpu_ms_per_request": median("saturation", "cpu_ms"),
        "server_alone_requests_per_second": median("server_alone", "requests_per_second"),
        "rows": rows,
    }
    arguments.raw.mkdir(parents=True, exist_ok=True)
    (arguments.raw / "client.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
