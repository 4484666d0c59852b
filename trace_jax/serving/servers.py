"""Several servers as one: started together, restarted when they die, stopped together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from trace_jax.serving.process import Program, ServerError, ServerProcess

_POLL = 0.25  # seconds between two looks at the servers


@dataclasses.dataclass(frozen=True)
class Restarts:
    """How often a server that dies is started again: our choice, enough for a fault now and then."""

    limit: int = 5  # in a row; one more is an error
    first_delay: float = 1.0  # seconds, doubled each time
    longest_delay: float = 60.0
    steady: float = 600.0  # seconds after which a server that runs has no deaths behind it


class Servers:
    """Servers of one run; a context manager that stops them all, however it is left."""

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        start_timeout: float,
        restarts: Restarts = Restarts(),
        report: Callable[[str], None] = print,
    ):
        """Starts nothing yet. `report` gets a line when a server dies and when it is back."""
        self._report = report
        self._kept = [_Kept(program, start_timeout, restarts, report) for program in programs]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self, progress: Callable[[float, int], None] = lambda *_: None) -> None:
        """Starts all and returns once all are healthy; `progress` gets the seconds so far and how many are.

        Raises ServerError as soon as one of them cannot be started: what does not start once will not start again.
        """
        begin = time.monotonic()
        for kept in self._kept:
            kept.start()
        while not all(kept.look_at_start() for kept in self._kept):
            progress(time.monotonic() - begin, sum(kept.ready for kept in self._kept))
            time.sleep(_POLL)

    def watch(self) -> NoReturn:
        """Restarts servers that die, until the last one dies too often: ServerError."""
        while True:
            self.watch_once()
            time.sleep(_POLL)

    def watch_once(self) -> None:
        """One look at each server. One that dies too often is given up; ServerError where no other is left."""
        for kept in [*self._kept]:
            try:
                kept.look()
            except ServerError as error:
                self._kept.remove(kept)
                if not self._kept:
                    raise
                self._report(f"{error}; {len(self._kept)} left")

    def stop(self) -> None:
        """Asks all to stop, then waits for each, then kills: see `ServerProcess.stop`."""
        for kept in self._kept:
            kept.process and kept.process.ask_to_stop()
        for kept in self._kept:
            kept.process and kept.process.stop()


class _Kept:
    """One server and its deaths."""

    def __init__(self, program: Program, start_timeout: float, restarts: Restarts, report: Callable[[str], None]):
        self.process: ServerProcess | None = None
        self.ready = False
        self._program, self._start_timeout, self._restarts, self._report = program, start_timeout, restarts, report
        self._deaths = 0
        self._since = 0.0  # when it was started or became ready
        self._again = 0.0  # when it may be started again

    def start(self) -> None:
        self.process, self.ready, self._since = ServerProcess(self._program), False, time.monotonic()

    def look_at_start(self) -> bool:
        """Whether it is ready; ServerError if it never will be."""
        problem = self._problem()
        if problem is not None:
            raise problem
        return self.ready

    def look(self) -> None:
        if self.process is None:
            if time.monotonic() >= self._again:
                self._restart()
            return
        was_ready, problem = self.ready, self._problem()
        if problem is not None:
            self._died(problem)
        elif self.ready and not was_ready:
            self._report(f"server {self._program.url} is back after {self._deaths} death(s)")
        elif self.ready and time.monotonic() - self._since > self._restarts.steady:
            self._deaths = 0

    def _problem(self) -> ServerError | None:
        """Looks at the process: notes that it became ready, or says what is wrong with it."""
        status = self.process.exit_status
        if status is not None:
            return self.process.failure(f"ended with status {status}" + ("" if self.ready else " before it was ready"))
        if self.ready:
            return None
        if self.process.healthy():
            self.ready, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > self._start_timeout:
            return self.process.failure(f"was not ready after {self._start_timeout:g} seconds")
        return None

    def _restart(self) -> None:
        try:
            self.start()
        except ServerError as error:  # its port is still closing, or somebody else's by now
            self._died(error)

    def _died(self, problem: ServerError) -> None:
        if self.process is not None:
            self.process.kill()
        self.process, self.ready = None, False
        self._deaths += 1
        first_line = str(problem).splitlines()[0]
        if self._deaths > self._restarts.limit:
            raise ServerError(f"given up after {self._restarts.limit} restarts: {first_line}")
        delay = min(self._restarts.first_delay * 2 ** (self._deaths - 1), self._restarts.longest_delay)
        self._again = time.monotonic() + delay
        self._report(f"{first_line}; started again in {delay:g} s")
