"""The other side of the speed comparison, in a process of its own: transformers' generate, and a torch AdamW step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from experiments.smollm2_cpu.speed_cases import CLIP, CLIP_NORM, LEARNING_RATE, Case, advantages, tokens
from experiments.smollm2_cpu.speed_worker import serve


def decoder(case: Case, folder: Path, settings: dict[str, int]) -> Callable[[], dict]:
    """A function that decodes the case once by `generate`, and its twin that scores tokens of the other side."""
    model = _load(folder).eval()
    prompts = torch.from_numpy(tokens(case, model.config.vocab_size)).long()

    @torch.no_grad()
    def decode() -> dict:
        started = time.perf_counter()
        result = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            use_cache=True,
            max_new_tokens=case.new,
            min_new_tokens=case.new,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started
        assert result.shape == (case.rows, case.prompt + case.new)
        return {"seconds": seconds}

    @torch.no_grad()
    def score(given: dict) -> dict:
        new = torch.tensor(given["tokens"])
        logits = model(torch.cat([prompts, new], dim=1)).logits[:, case.prompt - 1 : -1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, new[..., None])[..., 0].numpy()
        return {"gap": float(np.abs(logprobs - np.asarray(given["logprobs"])).max())}

    decode.score = score
    return decode


def trainer(case: Case, folder: Path, settings: dict[str, int]) -> Callable[[], dict]:
    """A function that takes one step: log-probs, clipped loss, gradients, AdamW, on all rows at once."""
    model = _load(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    token = torch.from_numpy(tokens(case, model.config.vocab_size)).long()
    advantage = torch.from_numpy(advantages(case))[:, None]

    def logprobs() -> torch.Tensor:
        logits = model(token, use_cache=False).logits[:, case.prompt - 1 : -1]
        chosen = logits.gather(-1, token[:, case.prompt :, None])[..., 0]
        return chosen - torch.logsumexp(logits, dim=-1)

    with torch.no_grad():
        old = logprobs()

    def step() -> dict:
        started = time.perf_counter()
        ratio = torch.exp(logprobs() - old)
        clipped = torch.clamp(ratio, 1 - CLIP[0], 1 + CLIP[1])
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return {"seconds": time.perf_counter() - started, "loss": loss.item(), "grad_norm": norm.item()}

    return step


def _load(folder: Path) -> torch.nn.Module:
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


if __name__ == "__main__":
    serve({"decode": decoder, "train": trainer})
