"""Settings of every test: no silent rank promotion, property tests that draw the same examples in every run."""

from __future__ import annotations

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=50)
hypothesis.settings.load_profile("repeatable")
