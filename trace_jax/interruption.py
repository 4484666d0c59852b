"""What the first SIGTERM or Ctrl-C does to a command that can go on later."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any


class Interruption:
    """The first signal raises KeyboardInterrupt, or calls what `calls` names. The next one ends the process at once."""

    def __init__(self):
        self.asked = False
        self._respond: Callable[[], object] = _raise_keyboard_interrupt
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def calls(self, loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> Iterator[None]:
        """The first signal has `loop` call `function` in this context, and does nothing after it."""
        self._respond = lambda: loop.call_soon_threadsafe(function)
        try:
            yield
        finally:
            self._respond = lambda: None

    def _handle(self, number, frame) -> None:
        del number, frame
        self.asked = True
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        self._respond()


def _raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt
