"""Faults of real SGLang servers during a step of rollouts: each ends in a bounded time with a named outcome.

    python -m experiments.sglang_cpu.faults

Real servers on the CPU, killed, stopped, or behind a proxy that spoils what passes; one step of TRACE (64 units, 96
leaves, random values) on them. Counted: leaves that are missing from the trees, budget units that are missing from the
account. Faults that end the run are also tried on `trace_jax.main` (`faults_main`): its checkpoint is there, it prints
one line, and the same command goes on. Records go to raw/faults.json.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from experiments.sglang_cpu import common, faults_main
from experiments.sglang_cpu.faults_lab import Drill, Lab, RealServer, record
from tests import sglang_faults as behaviour
from trace_jax.loop import Run

DONE, DOWN = "completed", "run ends with EngineDown"
UPDATE = "/update_weights_from_disk"


async def nothing(lab: Lab) -> None:
    """A step without a fault, for comparison."""
    await lab.publish(0)
    await lab.step()


async def killed(lab: Lab) -> None:
    """SIGKILL in the middle of episodes; started again at once, with the weights of its start."""

    async def beside(lab: Lab) -> None:
        await lab.some_done()
        lab.servers[0].kill()
        await asyncio.to_thread(lab.servers[0].start)

    await lab.publish(3)
    await lab.step(beside)


async def hanging(lab: Lab) -> None:
    """SIGSTOP in the middle of episodes. It goes on when the client has noticed."""

    async def beside(lab: Lab) -> None:
        await lab.some_done()
        lab.servers[0].hang()
        try:
            while not lab.engine.stats()["server_losses"]:
                await asyncio.sleep(0.1)
        finally:
            lab.servers[0].wake()

    await lab.publish(0)
    await lab.step(beside)


def spoiled(fault: behaviour.Behaviour, *paths: str, **extent: Any) -> Drill:
    """A step with a fault of the first server's replies."""

    async def drill(lab: Lab) -> None:
        await lab.publish(0)
        lab.proxies[0].fail(fault, *paths, **extent)
        await lab.step()

    return drill


async def late(lab: Lab) -> None:
    """Nobody listens at the start; after 5 s somebody does."""
    await lab.proxies[0].stop()

    async def come() -> None:
        await asyncio.sleep(5)
        await lab.proxies[0].start()

    coming = asyncio.create_task(come())
    await lab.publish(0)
    await coming
    await lab.step()


async def booting(lab: Lab) -> None:
    """The server is started when the client asks already: it answers before it is ready."""
    lab.servers[0].kill()
    starting = asyncio.create_task(asyncio.to_thread(lab.servers[0].start))
    await lab.publish(0)
    await starting
    await lab.step()


async def never(lab: Lab) -> None:
    """Nobody ever listens."""
    await lab.proxies[0].stop()
    await lab.publish(0)


async def refused(lab: Lab) -> None:
    """The first server refuses new weights."""
    await lab.publish(0)
    lab.proxies[0].fail(behaviour.says({"success": False, "message": "Failed to load weights"}, 400), UPDATE)
    await lab.publish(1)
    await lab.step()


async def disk_full(lab: Lab) -> None:
    """No space left while weights are exported."""
    await lab.publish(0)
    lab.disk_full = True
    await lab.publish(1)


ERROR, HALF = behaviour.status(500), behaviour.truncate
# name: drill, servers, outcome, seconds that it may take, settings
DRILLS: dict[str, tuple[Drill, int, str, float, dict[str, float]]] = {
    "none": (nothing, 2, DONE, 60, {}),
    "killed and restarted, one of two": (killed, 2, DONE, 300, {}),
    "killed and restarted, the only one": (killed, 1, DONE, 300, {"outage_timeout": 280}),
    "hanging, one of two": (hanging, 2, DONE, 120, {}),
    "hanging, the only one": (hanging, 1, DONE, 120, {"outage_timeout": 110}),
    "slow (2 s a request), the only one": (spoiled(behaviour.slow(2.0)), 1, DONE, 120, {}),
    "500 to the next 40 requests of the only one": (spoiled(ERROR, count=40), 1, DONE, 120, {}),
    "500 to 30 % of one of two": (spoiled(ERROR, share=0.3), 2, DONE, 120, {}),
    "500 to 10 % of the only one": (spoiled(ERROR, share=0.1), 1, DONE, 120, {}),
    "500 to 30 % of the only one": (spoiled(ERROR, share=0.3), 1, DONE, 180, {}),
    "500 to all, for good, the only one": (spoiled(ERROR), 1, DONE, 240, {}),
    "truncated JSON, 30 % of one of two": (spoiled(HALF, share=0.3), 2, DONE, 120, {}),
    "truncated JSON, 10 % of the only one": (spoiled(HALF, share=0.1), 1, DONE, 120, {}),
    "connection cut in the middle, 10 % of the only one": (spoiled(behaviour.cut_off, share=0.1), 1, DONE, 120, {}),
    "connection refused at the start, up after 5 s": (late, 1, DONE, 60, {}),
    "starting when it is asked": (booting, 1, DONE, 300, {"outage_timeout": 280}),
    "connection refused at the start, never up": (never, 1, DOWN, 25, {"outage_timeout": 10}),
    "update refused by one of two": (refused, 2, DONE, 60, {}),
    "update refused by the only one": (refused, 1, DOWN, 30, {}),
    "out of disk during export": (disk_full, 1, DOWN, 30, {}),
}


def run_drills(run: Run, servers: list[RealServer], names: list[str]) -> list[dict[str, Any]]:
    """A record for each of `names`."""
    rows = []
    for name in names:
        drill, count, expected, limit, settings = DRILLS[name]
        with tempfile.TemporaryDirectory(prefix="trace_jax_faults_") as folder:

            async def one(settings=settings, count=count, folder=folder):
                lab = Lab(run, servers[:count], Path(folder) / "weights", **settings)
                return await record(lab, name, drill, expected, limit)

            rows.append(asyncio.run(one()))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Runs all drills and writes raw/faults.json."""
    arguments = common.parse(__doc__, only="")
    model = common.policy_folder(arguments.workdir)
    run = common.make_run(arguments.workdir, "faults", ["http://127.0.0.1:1"])
    names = [name for name in DRILLS if arguments.only in name]
    logs = common.ROOT / arguments.workdir / "servers"
    servers = [
        RealServer(model, common.server_python(), run.limits.context_length, logs / f"faults-{index}.log", index)
        for index in range(2)
    ]
    try:
        rows = run_drills(run, servers, names)
        rows += faults_main.run_all(servers[0], common.ROOT / arguments.workdir, arguments.only)
    finally:
        for server in servers:
            server.kill()
    arguments.raw.mkdir(parents=True, exist_ok=True)
    (arguments.raw / "faults.json").write_text(json.dumps(rows, indent=1) + "\n")
    odd = [row["fault"] for row in rows if row["outcome"] != row["expected"] or row["leaves_lost"] or row["units_lost"]]
    print(f"{len(rows)} faults; not as expected: {odd or 'none'}")


if __name__ == "__main__":
    main()
