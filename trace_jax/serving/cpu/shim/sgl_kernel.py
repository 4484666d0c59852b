"""Stands in for SGLang's CUDA kernels on a CPU: names that are imported but not called, and one that is called.

On x86 without AMX, SGLang computes attention and sampling with torch's own operators; of its kernel library it calls
the copy of cache slots below. Any other name can be imported and says what it is when it is called.
"""

from __future__ import annotations

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(rows, table, begins, ends, slots, row_length):
    """Writes request i's new cache slots into `table[rows[i], begins[i]:ends[i]]`; `slots` holds them in this order.

    `row_length` is the second size of `table`, which a kernel needs and an array knows.
    """
    del row_length
    taken = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
        count = end - begin
        table[row, begin:end] = slots[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)  # what Python itself asks a module for

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} is a GPU kernel; the CPU server for tests does not have it")

    return missing
