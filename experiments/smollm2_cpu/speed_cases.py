"""What the speed comparison measures: sizes and inputs, the same for both sides."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement."""

    model: str  # quickstart or smollm2
    kind: str  # decode or train
    rows: int  # requests in flight, or rows of the batch
    prompt: int  # tokens of a row that are given
    new: int  # tokens of a row that are sampled, or trained
    # Static shapes of our engine: all requests arrive and end together, so it need not look at its queue often.
    engine: tuple[tuple[str, int], ...] = (("prefill_rows", 32), ("prefill_chunk", 8), ("decode_steps", 16))


CASES = {
    "decode_quickstart": Case(
        "quickstart", "decode", rows=32, prompt=24, new=96,
        engine=(("prefill_rows", 32), ("prefill_chunk", 24), ("decode_steps", 96)),
    ),  # fmt: skip
    "decode_smollm2": Case("smollm2", "decode", rows=32, prompt=48, new=32),
    "train_quickstart": Case("quickstart", "train", rows=64, prompt=24, new=104),
    "train_smollm2": Case("smollm2", "train", rows=8, prompt=48, new=208),
}
CLIP = (0.2, 0.28)  # of the probability ratio
LEARNING_RATE, CLIP_NORM = 1e-6, 1.0  # of AdamW without decay (paper E.3)


def tokens(case: Case, vocabulary: int, *, seed: int = 0) -> np.ndarray:
    """int32 [rows, prompt] for decoding, [rows, prompt + new] for training; ids that no model treats specially."""
    length = case.prompt + (case.new if case.kind == "train" else 0)
    low = min(20, vocabulary // 4)
    return np.random.default_rng(seed).integers(low, vocabulary, (case.rows, length)).astype(np.int32)


def advantages(case: Case) -> np.ndarray:
    """float32 [rows]: +-1 in turn, so half the rows are pushed up and half down."""
    return np.where(np.arange(case.rows) % 2 == 0, 1.0, -1.0).astype(np.float32)
