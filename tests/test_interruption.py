"""The first signal ends a command in good order; the handlers of before come back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from trace_jax.interruption import Interruption


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_there_is_something_to_call_it_interrupts(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Interruption() as interruption:
        try:
            send(number)
        finally:
            assert interruption.asked and signal.getsignal(number) == signal.SIG_DFL  # a second one ends the process
    assert signal.getsignal(number) is before


def test_a_task_is_cancelled_and_later_signals_do_nothing():
    async def work(interruption):
        task = asyncio.create_task(asyncio.sleep(60))
        with interruption.calls(asyncio.get_running_loop(), task.cancel):
            send(signal.SIGTERM)
            with pytest.raises(asyncio.CancelledError):
                await task
        return True

    with Interruption() as interruption:
        assert not interruption.asked and asyncio.run(work(interruption)) and interruption.asked


def test_after_the_work_a_first_signal_does_nothing():
    async def work(interruption):
        with interruption.calls(asyncio.get_running_loop(), lambda: pytest.fail("called")):
            pass

    with Interruption() as interruption:
        asyncio.run(work(interruption))
        send(signal.SIGTERM)
        assert interruption.asked
