"""The priority semaphore against a list of who ran when."""

import asyncio

import pytest

from trace_jax.rollout.slots import EpisodeSlots, run_all


def test_limit_holds_and_is_used():
    running, most = 0, 0

    async def work():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    async def main():
        slots = EpisodeSlots(3)
        await run_all(slots.run(work, priority=i % 2) for i in range(20))

    asyncio.run(main())
    assert most == 3 and running == 0


def test_lower_priority_number_first_then_first_come():
    order = []

    async def main():
        slots = EpisodeSlots(1)

        async def work(name):
            order.append(name)
            await asyncio.sleep(0)

        jobs = [("a", 1), ("b", 1), ("c", 0), ("d", 1), ("e", 0)]
        await run_all(slots.run(lambda name=name: work(name), priority=p) for name, p in jobs)

    asyncio.run(main())
    assert order == ["a", "c", "e", "b", "d"]  # a found the slot free


def test_cancelled_waiters_and_granted_waiters_lose_no_slot():
    started = []

    async def main():
        slots = EpisodeSlots(1)
        gate = asyncio.Event()
        waiting = []

        async def hold():
            await gate.wait()
            # Runs after the release below has granted the slot to the second waiter and before that one resumes.
            asyncio.get_running_loop().call_soon(waiting[1].cancel)

        async def work():
            started.append(True)

        holder = asyncio.create_task(slots.run(hold, priority=0))
        await asyncio.sleep(0)
        waiting += [asyncio.create_task(slots.run(work, priority=0)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        gate.set()
        await holder
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2 and not started
        await asyncio.wait_for(slots.run(work, priority=0), 1.0)

    asyncio.run(main())
    assert started == [True]


def test_a_failure_frees_its_slot():
    async def fail():
        raise RuntimeError("boom")

    async def main():
        slots = EpisodeSlots(1)
        with pytest.raises(RuntimeError, match="boom"):
            await slots.run(fail, priority=0)
        return await asyncio.wait_for(slots.run(lambda: asyncio.sleep(0, "ran"), priority=0), 1.0)

    assert asyncio.run(main()) == "ran"


def test_run_all_keeps_order_and_cancels_the_rest_on_the_first_exception():
    ended = []

    async def slow(name):
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(name)

    async def fail():
        await asyncio.sleep(0.001)
        raise RuntimeError("first")

    async def value(delay, result):
        await asyncio.sleep(delay)
        return result

    assert asyncio.run(run_all([value(0.003, 1), value(0.0, 2)])) == [1, 2]
    with pytest.raises(RuntimeError, match="first"):
        asyncio.run(run_all([slow("a"), fail(), slow("b")]))
    assert ended == ["a", "b"]


def test_run_all_passes_a_cancellation_on():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(True)

    async def main():
        task = asyncio.create_task(run_all([slow(), slow()]))
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [True, True]


def test_no_slots_is_an_error():
    with pytest.raises(ValueError, match="concurrency is 0"):
        EpisodeSlots(0)
