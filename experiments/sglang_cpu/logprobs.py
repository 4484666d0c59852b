"""Whether the server's log-probs are those of the trainer's own forward, while the weights change.

    python -m experiments.sglang_cpu.logprobs

Ten steps of the quickstart's training through one server, in float32, at temperature 1 and 0.7. Before each update all
sampled tokens of the step's complete rollouts are scored by the trainer. Beside them 48 fixed histories are sent twice,
into an emptied and into a filled cache. What the server draws is random, so each answer is compared with the trainer's
forward of its own tokens.

Two controls say what a fault would look like: the trainer's forward with the weights of one update before, and answers
of a server whose weights were changed behind a filled cache.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.sglang_cpu import common, report
from experiments.sglang_cpu.raw_files import Kept
from trace_jax import loop
from trace_jax.config import split_urls
from trace_jax.loop import Run
from trace_jax.setup_run import make_advantage
from trace_jax.tree import aggregate, pack, query
from trace_jax.types import GenerateRequest, Generation, PackedBatch, RolloutTree

TEMPERATURES, UPDATES = (1.0, 0.7), 10
_PROBES = 48
_NO_WEIGHT = np.zeros(1)


def main() -> None:
    """Measures the temperatures that are missing and reports."""
    arguments = common.parse(__doc__)
    kept = Kept(arguments.raw / "logprobs.jsonl")
    for temperature in TEMPERATURES:
        if kept.has(temperature=temperature, version=UPDATES):
            continue
        with common.serve(arguments.workdir) as urls:
            name = f"logprobs-{temperature}"
            run = common.make_run(arguments.workdir, name, urls, sampling__temperature=temperature)
            rows = asyncio.run(_measure(run, common.ROOT / arguments.workdir / name / "weights"))
        kept.add([{"temperature": temperature} | row for row in rows])
    report.write(arguments.raw, arguments.raw.parent)


async def _measure(run: Run, weights: Path) -> list[dict[str, Any]]:
    """A row for each version of the weights, and one for the server that was made stale."""
    rows, histories, before = [], None, None
    try:
        while True:
            await loop.publish(run)
            if histories is not None:
                probes = await _probe_twice(run, histories)
            gathered = await loop.gather(run, run.step, run.cursor)
            if histories is None:
                histories = [longest_history(tree) for tree in gathered.trees[:_PROBES]]
                probes = await _probe_twice(run, histories)
            batch = complete_rollouts(run, gathered.trees)
            row = {"version": run.step} | _spread(batch, run.trainer.logprobs(run.policy.params, batch)) | probes
            if before is not None:
                row["one_update_late_max_gap"] = _spread(batch, run.trainer.logprobs(before, batch))["max_gap"]
            rows.append(row)
            if run.step == UPDATES:
                break
            before = jax.device_get(run.policy.params)
            loop.learn(run, gathered)
        rows.append(await _stale(run, histories, before, weights))
    finally:
        await run.engine.close()
    return rows


async def _probe_twice(run: Run, histories: list[np.ndarray]) -> dict[str, Any]:
    """Each history into an empty cache and into the one that this leaves."""
    if run.step == 0:  # later the update must have emptied it
        await run.engine.set_weights(run.served, run.version)
    found = {}
    for state in ("cold", "warm"):
        probe = await _probe(run, histories, run.policy.params)
        found |= {f"{state}_{name}": value for name, value in probe.items()}
    return found


async def _probe(run: Run, histories: list[np.ndarray], params: Any) -> dict[str, Any]:
    """Answers to `histories` against the trainer's forward with `params`."""
    generations = await asyncio.gather(*(run.engine.generate(_request(run, i, h)) for i, h in enumerate(histories)))
    gap = max(np.max(_answer_gaps(run, params, h, g)) for h, g in zip(histories, generations, strict=True))
    return {
        "max_gap": float(gap),
        "cached_tokens": sum(g.cached_tokens for g in generations),
        "prompt_tokens": sum(h.size for h in histories),
    }


def _request(run: Run, index: int, history: np.ndarray) -> GenerateRequest:
    """A turn after `history`. Its name space is always the same: what empties the cache is the update alone."""
    return GenerateRequest(
        tokens=history,
        max_new_tokens=min(run.limits.max_turn_tokens, run.limits.context_length - history.size),
        temperature=run.config.sampling.temperature,
        stop_ids=run.environment.stop_ids,
        key=(index,),
        salt=f"probe/{index}",
        stop_texts=run.environment.stop_texts,
    )


def _answer_gaps(run: Run, params: Any, history: np.ndarray, generation: Generation) -> np.ndarray:
    whole = np.concatenate([history, generation.tokens])
    batch, _, _ = pack.pack_prefixes(
        [whole], _NO_WEIGHT, _NO_WEIGHT, row_length=run.config.loss.row_length, rows_multiple=run.config.loss.micro_rows
    )
    found = run.trainer.logprobs(params, batch)[0, history.size : whole.size]
    return np.abs(found - generation.logprobs)


def longest_history(tree: RolloutTree) -> np.ndarray:
    """int32 [n]; what the last turn of the tree's longest rollout was sampled from."""
    leaves = query.leaves(tree)
    histories = [query.prefix_tokens(tree, tree.parent[leaf]) for leaf in leaves.tolist()]
    return max(histories, key=len)


def complete_rollouts(run: Run, trees: list[RolloutTree]) -> PackedBatch:
    """Every rollout of the trees, prompt to answer, also those that train nothing."""
    estimate, settings = make_advantage(run.config), run.config.loss
    credits = [estimate(tree) for tree in trees]
    mode, share = settings.aggregation, settings.prompt_weight
    weights = aggregate.token_weights(
        trees, credits, mode=mode, prompt_weight=share, max_tokens=run.limits.context_length
    )
    return pack.pack_paths(
        trees,
        credits,
        weights,
        row_length=settings.row_length,
        rows_multiple=settings.micro_rows,
        skip_untrained=False,
    )


def _spread(batch: PackedBatch, logprob_BT: np.ndarray) -> dict[str, float]:
    """Of |trainer - server| in nats over the batch's sampled tokens."""
    gap = np.abs(logprob_BT - batch.behaviour_logprob)[batch.is_action]
    quantiles = {"p99_gap": float(np.quantile(gap, 0.99)), "max_gap": float(gap.max())}
    return {"tokens": int(gap.size), "mean_gap": float(gap.mean())} | quantiles


async def _stale(run: Run, histories: list[np.ndarray], before: Any, weights: Path) -> dict[str, Any]:
    """The server is given the last but one weights again, under the last one's name and behind a filled cache."""
    await run.engine.set_weights(run.served, run.version)
    await _probe(run, histories, run.policy.params)
    document = {"model_path": str(weights / f"version-{run.step - 1}"), "weight_version": str(run.step)}
    for url in split_urls(run.config.sglang.urls):
        await asyncio.to_thread(_post, f"{url}/update_weights_from_disk", document | {"flush_cache": False})
    return {"control": "weights changed behind a filled cache"} | await _probe(run, histories, before)


def _post(url: str, document: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(document).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300.0) as reply:
        if not json.loads(reply.read())["success"]:
            raise RuntimeError(f"{url} refused the weights of {document['model_path']}")


if __name__ == "__main__":
    main()
