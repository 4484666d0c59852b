"""A finished run of one step with adapters, made once for all tests that read it."""

from __future__ import annotations

import pytest

from tests.tiny_run import Done, go, settings

CHANGES = {
    "steps": 1,
    "eval.every": 0,
    "lora.rank": 2,
    "model.fuse_projections": False,
    "optimizer.learning_rate": 0.002,  # so that one step changes what is sampled
}


@pytest.fixture(scope="session")
def adapted_run(tmp_path_factory) -> Done:
    """Evaluated before and after its step; the warm start lies in `warm` beside its workdir. To be read only."""
    folder = tmp_path_factory.mktemp("adapted")
    return go(settings(CHANGES | {"warm_start.cache": str(folder / "warm")}), folder / "run")
