"""Faults of real SGLang servers during a step of rollouts: each ends in a bounded time with a named outcome.

    python -m experiments.sglang_cpu.faults

Real servers on the CPU, killed, stopped, or behind a proxy that spoils what passes; one step of TRACE (64 units, 96
leaves, random values) on them. Counted: leaves that are missing from the trees, budget units that are missing from the
account. Faults that end the run are also tried on `trace_jax.main` (`faults_main`): its checkpoint is there, it prints
one line, and the same command goes on. Records go to raw/faults.json.
"""

from __future__ import annotations

import asyncio
import dataclasses
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
        while not lab.engine.stats()["server_returns"]:
            await asyncio.sleep(0.1)

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


@dataclasses.dataclass(frozen=True)
class Case:
    """A drill and what is expected of it."""

    drill: Drill
    servers: int = 1
    expected: str = DONE
    limit: float = 120.0  # seconds
    direct: bool = False  # without proxies
    outage_timeout: float = 60.0  # seconds


ERROR, HALF, CUT = behaviour.status(500), behaviour.truncate, behaviour.cut_off
# A server takes 15 s to start, and minutes on a busy machine: the client is told to wait that long.
CASES = {
    "none": Case(nothing, servers=2, limit=60),
    "killed and restarted, one of two": Case(killed, servers=2, direct=True, limit=300),
    "killed and restarted, the only one": Case(killed, direct=True, limit=300, outage_timeout=280),
    "hanging, one of two": Case(hanging, servers=2, direct=True),
    "hanging, the only one": Case(hanging, direct=True, outage_timeout=110),
    "slow (2 s a request), the only one": Case(spoiled(behaviour.slow(2.0))),
    "500 to 40 requests in a row, the only one": Case(spoiled(ERROR, count=40)),
    "500 to 30 % of one of two": Case(spoiled(ERROR, share=0.3), servers=2),
    "500 to 10 % of the only one": Case(spoiled(ERROR, share=0.1)),
    "500 to 30 % of the only one": Case(spoiled(ERROR, share=0.3), limit=180),
    "500 to all, for good, the only one": Case(spoiled(ERROR), expected=DOWN, limit=240),
    "truncated JSON, 30 % of one of two": Case(spoiled(HALF, share=0.3), servers=2),
    "truncated JSON, 10 % of the only one": Case(spoiled(HALF, share=0.1)),
    "connection cut in the middle, 10 % of the only one": Case(spoiled(CUT, share=0.1)),
    "connection refused at the start, up after 5 s": Case(late, limit=60),
    "starting when it is asked": Case(booting, direct=True, limit=300, outage_timeout=280),
    "connection refused at the start, never up": Case(never, expected=DOWN, limit=25, outage_timeout=10),
    "update refused by one of two": Case(refused, servers=2, limit=60),
    "update refused by the only one": Case(refused, expected=DOWN, limit=30),
    "out of disk during export": Case(disk_full, expected=DOWN, limit=30),
}


def run_case(case: Case, name: str, run: Run, servers: list[RealServer]) -> dict[str, Any]:
    """The record of a case."""
    with tempfile.TemporaryDirectory(prefix="trace_jax_faults_") as folder:

        async def one() -> dict[str, Any]:
            chosen, home = servers[: case.servers], Path(folder) / "weights"
            lab = Lab(run, chosen, home, direct=case.direct, outage_timeout=case.outage_timeout)
            return await record(lab, name, case.drill, case.expected, case.limit)

        return asyncio.run(one())


class Records:
    """raw/faults.json: one record a fault, written as soon as it is there."""

    def __init__(self, path: Path):
        self._path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.rows = {row["fault"]: row for row in json.loads(path.read_text())}

    def add(self, row: dict[str, Any]) -> None:
        """Keeps a record, in place of an older one of the same fault."""
        self.rows[row["fault"]] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(list(self.rows.values()), indent=1) + "\n")
        print(json.dumps(row), flush=True)

    def odd(self) -> list[str]:
        """Faults that did not end as expected, or lost something."""
        rows = self.rows.values()
        return [r["fault"] for r in rows if r["outcome"] != r["expected"] or r["leaves_lost"] or r["units_lost"]]


def main() -> None:
    """Tries all faults, or those whose names contain a part of `--only` (`;` between them); writes raw/faults.json."""
    arguments = common.parse(__doc__, only="")
    workdir = common.ROOT / arguments.workdir
    model = common.policy_folder(arguments.workdir)
    run = common.make_run(arguments.workdir, "faults", ["http://127.0.0.1:1"])
    python, length = common.server_python(), run.limits.context_length
    logs = [workdir / "servers" / f"faults-{index}.log" for index in range(2)]
    servers = [RealServer(model, python, length, log, seed) for seed, log in enumerate(logs)]
    records = Records(arguments.raw / "faults.json")

    def chosen(name: str) -> bool:
        return any(part in name for part in arguments.only.split(";"))

    try:
        for name, case in CASES.items():
            if chosen(name):
                records.add(run_case(case, name, run, servers))
        for name in faults_main.CASES:
            if chosen(name):
                records.add(faults_main.run_case(name, servers[0], workdir))
    finally:
        for server in servers:
            server.kill()
    print(f"{len(records.rows)} faults; not as expected: {records.odd() or 'none'}")


if __name__ == "__main__":
    main()
