"""Which parameters were evaluated."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np


def params_digest(params: Any) -> str:
    """16 hex digits that tell parameters from others, wherever they were read from.

    A blake2b digest of each leaf's path, shape, dtype, and first and last row (our choice: a training step moves these
    too, and whole leaves of a large model would take minutes).
    """
    result = hashlib.blake2b(digest_size=8)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        ends = [leaf[(place,) * (leaf.ndim - 1)] for place in (0, -1)]
        result.update(f"{jax.tree_util.keystr(path)}\n{leaf.shape}\n{leaf.dtype}\n".encode())
        for row in jax.device_get(ends):
            result.update(np.ascontiguousarray(row).tobytes())
    return result.hexdigest()
