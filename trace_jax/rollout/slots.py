"""How many episodes are in flight, and which goes next.

Forks go before bare rollouts that have not started: their prefixes are still in the engine's cache, and a prompt that
is finished frees its state. Otherwise first come, first served. (Our choice.)
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class EpisodeSlots:
    """A semaphore with priorities: at most `limit` pieces of work run at once, lower `priority` goes first."""

    def __init__(self, limit: int):
        if limit < 1:
            raise ValueError(f"concurrency is {limit}; at least 1 episode must be allowed in flight")
        self._free = limit
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future]] = []

    async def run(self, work: Callable[[], Awaitable[T]], *, priority: int) -> T:
        """Waits for a slot, awaits `work()` in it, and hands the slot on whatever happens."""
        await self._acquire(priority)
        try:
            return await work()
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
        if self._free > 0:
            self._free -= 1
            return
        ticket = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), ticket))
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():  # the slot had been granted just before the cancellation
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            ticket = heapq.heappop(self._waiting)[2]
            if not ticket.done():  # a cancelled waiter is skipped
                ticket.set_result(None)
                return
        self._free += 1


async def run_all(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Results in the order of `coroutines`. The first exception cancels the others, waits for them, and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
