"""Grades answers: cheap comparisons inline, algebra in a pool of worker processes with hard deadlines."""

from __future__ import annotations

import collections
import functools
import logging
import multiprocessing
import threading
import time
import weakref
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool

import pebble

from trace_jax.tasks.math import answers, checker

MAX_TEXT = 4000  # characters at a reply's end in which math-verify looks for an answer without a box
RECYCLE = 2000  # comparisons after which a worker is replaced: sympy's caches grow
GRACE = 15.0  # seconds beyond the deadline after which the pool itself counts as broken
GIVEN_UP = ("timeout", "died", "error")
CACHED = 8192  # latest pairs whose comparison is remembered
_WARM = "trace_jax.tasks.math.warm"


class GraderError(Exception):
    """The worker processes cannot be started."""


class Grader:
    """Says whether answers are right. Thread-safe.

    Its processes end by `close`, with its last reference, or with this process, whichever comes first.

    A comparison that takes longer than its deadline, more memory than its limit, or kills its worker makes the answer
    wrong and is counted. Workers are children of multiprocessing's fork server, so a process that holds jax is never
    forked, and they start ready because the server has already warmed up.

    Args:
      workers: processes, and comparisons at the same time; further callers wait.
      deadline: seconds that one comparison may take (our choice).
      memory: bytes of address space of a worker (our choice).

    Raises:
      GraderError: the workers do not start, or do not compare two known answers.
    """

    def __init__(self, *, workers: int = 2, deadline: float = 5.0, memory: int = 2 << 30):
        if workers < 1 or not deadline > 0:
            raise ValueError(f"grader: {workers} workers, a deadline of {deadline} s; use at least 1 and more than 0")
        self.counts: collections.Counter[str] = collections.Counter()  # how comparisons ended: see `_compare`
        self._workers, self._deadline, self._memory = workers, deadline, memory
        self._slots = threading.BoundedSemaphore(workers)  # no queue within the pool: a task's wait is its own time
        self._lock = threading.Lock()
        self._remembered: collections.OrderedDict[tuple[str, str, bool], bool] = collections.OrderedDict()
        self._use(self._start())

    def equal(self, answer: str, truth: str) -> bool:
        """Whether `answer`, what stands in a box, has the value of `truth`; a very long one has not."""
        if len(answer) > answers.MAX_ANSWER:
            return self._count("oversized")
        answer, truth = answers.plain(answer), answers.plain(truth)
        known = answers.quick(answer, truth)
        if known is not None:
            self._count("quick")
            return known
        return bool(answer and truth) and self._compare(answer, truth, True)

    def stated(self, text: str, truth: str) -> bool:
        """Whether the answer that math-verify finds at the end of `text`, a reply without a box, is `truth`."""
        text = text[-MAX_TEXT:]
        return bool(text.strip()) and self._compare(text, answers.plain(truth), False)

    def close(self) -> None:
        """Ends the workers. Idempotent."""
        self._end()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, what: str) -> bool:
        """Warns of the 1st, 10th, 100th, ... comparison that was given up: right answers may be among them."""
        with self._lock:
            self.counts[what] += 1
            count = self.counts[what]
        if what in GIVEN_UP and str(count).strip("0") == "1":
            logging.warning("grader: %d answers count as wrong because their comparison ended so: %s", count, what)
        return False

    def _compare(self, answer: str, truth: str, bare: bool) -> bool:
        """Counted as "cached", "compared", "timeout", "died", "error" or "restarted" (then tried once more)."""
        pair = (answer, truth, bare)
        with self._lock:
            if pair in self._remembered:
                self.counts["cached"] += 1
                self._remembered.move_to_end(pair)
                return self._remembered[pair]
        with self._slots:
            result = self._ask(pair)
            if result is None:
                result = self._ask(pair)
        if result is None:
            raise GraderError("grader: the pool of worker processes broke twice in a row; is memory short?")
        return result

    def _ask(self, pair: tuple[str, str, bool]) -> bool | None:
        """One comparison in the pool; None if the pool broke and was replaced."""
        pool = self._pool
        try:
            task = functools.partial(checker.equal, *pair, self._deadline)
            future = pool.schedule(task, timeout=self._deadline)
        except RuntimeError:  # pebble's word for a pool that is not active
            return self._replace(pool)
        try:
            result = future.result(timeout=self._deadline + GRACE)
        except TimeoutError:
            return self._count("timeout") if future.done() else self._replace(pool)
        except pebble.ProcessExpired:
            return self._count("died")
        except (BrokenProcessPool, CancelledError):
            return self._replace(pool)
        except Exception:  # what the comparison raised: RecursionError, MemoryError, anything of sympy's
            return self._count("error")
        with self._lock:
            self.counts["compared"] += 1
            self._remembered[pair] = result
            while len(self._remembered) > CACHED:
                self._remembered.popitem(last=False)
        return result

    def _replace(self, broken: pebble.ProcessPool) -> None:
        """Puts a new pool in the place of `broken`, unless another thread did."""
        with self._lock:
            if self._pool is broken:
                self.counts["restarted"] += 1
                logging.warning("grader: its worker processes broke; they are replaced")
                self._end.detach()
                broken.stop()
                threading.Thread(target=broken.join, name="grader-end", daemon=True).start()
                self._use(self._start())

    def _use(self, pool: pebble.ProcessPool) -> None:
        self._pool = pool
        self._end = weakref.finalize(self, _stop, pool)

    def _start(self) -> pebble.ProcessPool:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_WARM])
        pool = pebble.ProcessPool(
            max_workers=self._workers,
            max_tasks=RECYCLE,
            initializer=checker.start,
            initargs=(self._memory,),
            context=context,
        )
        wait = 30.0 + 10.0 * self._workers
        truth, answer, _ = checker.KNOWN[0]
        try:
            end = time.monotonic() + wait
            compare = functools.partial(checker.compare, answer, truth, True)
            started = [pool.schedule(compare, timeout=wait) for _ in range(self._workers)]
            if not all(future.result(timeout=max(end - time.monotonic(), 0.1)) for future in started):
                raise RuntimeError(f"{answer} was judged not to be {truth}")
        except Exception as error:
            pool.stop()
            raise GraderError(
                f"grader: its {self._workers} worker processes do not start ({type(error).__name__}: {error}); they "
                f"need the package math-verify and {self._memory >> 20} MiB of address space each, and a script that "
                'starts them must guard its own code with `if __name__ == "__main__"`'
            ) from error
        return pool


def _stop(pool: pebble.ProcessPool) -> None:
    pool.stop()
    pool.join()
