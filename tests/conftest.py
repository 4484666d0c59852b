"""Settings of every test: no silent rank promotion, property tests that draw the same examples in every run.

What one test compiled, the next one and the processes that it starts find in a folder of this session.
"""

from __future__ import annotations

import os
import tempfile

_COMPILED = tempfile.TemporaryDirectory(prefix="trace_jax_compiled_")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import hypothesis  # noqa: E402
import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=50)
hypothesis.settings.load_profile("repeatable")

from tests.adapted_run import adapted_run  # noqa: E402, F401
from tests.sglang_server import sglang_model, sglang_server, start_server  # noqa: E402, F401
