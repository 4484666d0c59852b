"""How long a warm call of the sandbox takes: `python -m experiments.real_tasks_cpu.sandbox_speed`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time

from trace_jax.sandbox.pool import PythonPool


def warm_call_ms(pool: PythonPool, calls: int = 300, pause: float = 0.02) -> list[float]:
    """Milliseconds of `print(1)`, one call after the other, sorted; a pause, as of a model that writes, lies between."""
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        execution = pool.run("print(1)", 10.0)
        taken.append((time.perf_counter() - started) * 1e3)
        if execution.stdout != "1\n":
            raise RuntimeError(f"print(1) gave {execution}")
        time.sleep(pause)
    return sorted(taken)


def calls_per_second(pool: PythonPool, threads: int, calls: int = 400) -> float:
    """Of `print(1)`, from several threads without a pause."""
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as executor:
        list(executor.map(lambda _: pool.run("print(1)", 10.0), range(calls)))
    return calls / (time.perf_counter() - started)


def main() -> None:
    """Prints median and 99th percentile of a warm call, and calls a second with two workers."""
    with contextlib.closing(PythonPool(workers=2)) as pool:
        warm_call_ms(pool, calls=10)
        taken = warm_call_ms(pool)
        median, high = taken[len(taken) // 2], taken[int(len(taken) * 0.99)]
        print(f"warm call: median {median:.1f} ms, 99th percentile {high:.1f} ms, of {len(taken)}")
        print(f"two workers: {calls_per_second(pool, threads=4):.0f} calls a second")


if __name__ == "__main__":
    main()
