"""How well does a step's gradient point to more success, by what the budget bought and by what the loss makes of it?

    python -m experiments.predictor.signal --seeds 100

After 8 steps of TRACE every variant below spends a step's budget from the same pools, `--batches` times, and nothing is
learnt. A batch's gradient g is compared with J, the gradient of the success of held-out prompts, by its cosine in
Adam's metric,

    <g, D J> / sqrt(<g, D g> <J, D J>),   D = 1 / (sqrt(v) + eps) of Adam's second moments v

which is what a step gains to first order, as a share of what one of the same length along the true gradient would.
Alignment is its mean over batches. Where the noise is most of a gradient its square is proportional to the number of
rollouts, so alignment^2 per 1,000 tokens compares batches of different costs.
J is a mean over `--reference` prompts x 16 rollouts, <J, D J> the product of its halves, which share no noise. Held-out
success itself has a standard error of a point after a run; this sees differences that many runs would not.

signal.json keeps the cosines and the tokens of every batch of each task and seed; signal.md is a table of their means,
with each variant's difference to the default, batch by batch: the same prompts, and for losses the same trees.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from tabulate import tabulate

from experiments.predictor import config as experiment
from trace_jax import config as config_lib
from trace_jax import config_checks, loop
from trace_jax.assemble import assemble
from trace_jax.config import PAPER_LOSS, RunConfig
from trace_jax.objectives.policy import policy_loss
from trace_jax.report.console import Bar
from trace_jax.rollout import keys
from trace_jax.rollout.scheduler import sample_batch
from trace_jax.setup_run import take_devices
from trace_jax.train.policy_step import Plan, PolicyTrainer
from trace_jax.types import RolloutTree

HERE = Path(__file__).resolve().parent
TRAINED_STEPS = 8
REFERENCE_ROLLOUTS = 16
REFERENCE_BATCH = 128  # prompts
_PROMPTS = 5_700_000  # of the seed's stretch: past the run's own and its warm-up's
_STEP = 1000  # of the noise
DEFAULT = "trace/tree_rloo"
PER_SEQUENCE = {"aggregation": "sequence_mean_token_sum", "prompt_weight": "sequences"}
LOSSES: dict[str, dict[str, Any]] = {
    "paper": PAPER_LOSS,
    "tree_rpo": {"advantage": "tree_rpo"} | PER_SEQUENCE,
    "tree_grpo": {"advantage": "tree_grpo"} | PER_SEQUENCE,
    "grpo": {"advantage": "grpo"} | PER_SEQUENCE,
    "tree_rloo_unscored": {"advantage": "tree_rloo", "value_prior": 0.0} | PER_SEQUENCE,
    "tree_rloo": {"advantage": "tree_rloo", "value_prior": 2.0} | PER_SEQUENCE,
}
# (strategy of config.py, settings of the budget, losses)
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "trace": ("trace", {}, tuple(LOSSES)),
    "pcl": ("pcl", {}, ("grpo", "tree_rloo")),
    "grpo": ("grpo", {}, ("grpo",)),
    "trace_min2": ("trace", {"min_per_prompt": 2}, ("tree_rloo",)),
    "trace_mass": ("trace", {"objective": "advantage_mass"}, ("tree_rloo",)),
    "trace_pairs8": ("trace", {"objective": "pairs", "max_per_prompt": 8}, ("tree_rloo",)),
    "trace_N0": ("trace", {"roots": 256, "continuations_per_root": 0}, ("tree_rloo",)),
    "trace_N1": ("trace", {"roots": 170, "continuations_per_root": 1}, ("tree_rloo",)),
}


def settings(task: str, seed: int, cache: Path, strategy: str = "trace", **budget: Any) -> RunConfig:
    """The experiment's config."""
    config = experiment.get_config(f"{task},{strategy}")
    config.seed, config.warm_start.cache = seed, str(cache)
    config.budget.update(budget)
    return config_checks.check(config_lib.parse(config))


class Gradients:
    """Flat float64 gradients of success, one for each batch of trees, at one policy."""

    def __init__(self, run: loop.Run):
        """An optimiser that subtracts the gradient as it is shows it as the change of the parameters."""
        loss = functools.partial(policy_loss, clip_low=1e3, clip_high=1e3, kl_coef=0.0, tis_cap=None)
        model, mesh, config = run.trainer.model, run.trainer.mesh, run.config
        self._trainer = PolicyTrainer(
            model,
            optax.sgd(1.0),
            loss,
            mesh,
            temperature=config.sampling.temperature,
            chunk=config.loss.logit_chunk,
            micro_rows=config.loss.micro_rows,
            rescore=False,
        )
        self._run = run
        self._before = ravel_pytree(run.policy.params)[0]

    def of(self, trees: list[RolloutTree], loss: dict[str, Any]) -> np.ndarray:
        """Of the loss with these settings; a flat strategy's trees may have any advantage too."""
        config = self._run.config
        config = dataclasses.replace(config, strategy="trace", loss=dataclasses.replace(config.loss, **loss))
        batch = loop.make_batch(config, trees, self._run.environment.trunk)
        state = self._trainer.adopt(self._run.policy.params)
        state, _ = self._trainer.update(state, batch, Plan(), np.random.default_rng(0))
        return np.asarray(ravel_pytree(state.params)[0] - self._before, np.float64)


async def reference(run: loop.Run, gradients: Gradients, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Two independent estimates of J, each from half of the prompts."""
    loss = {"advantage": "dr_grpo", "aggregation": "sequence_mean_token_sum", "prompt_weight": "equal"}
    halves: list[list[np.ndarray]] = [[], []]
    bar = Bar("reference", prompts // REFERENCE_BATCH, "batch")
    for batch in range(prompts // REFERENCE_BATCH):
        drawn = run.prompts("eval", run.config.eval.prompts + batch * REFERENCE_BATCH, REFERENCE_BATCH)
        collected = await sample_batch(
            run.engine,
            run.environment,
            drawn,
            REFERENCE_ROLLOUTS,
            sampling=run.sampling(keys.Stream.ORACLE, step=_STEP + batch),
            concurrency=run.config.sampling.concurrency,
        )
        halves[batch % 2].append(gradients.of([c.tree for c in collected], loss))
        bar.to(batch + 1)
    bar.close()
    return np.mean(halves[0], axis=0), np.mean(halves[1], axis=0)


def cosines(gradients: np.ndarray, scale: np.ndarray, true: np.ndarray, true_square: float) -> np.ndarray:
    """Of [n, parameters] with J in the metric `scale`, [n]; 0 for a gradient that is 0, which gains nothing.

    Raises ValueError where <J, D J> is not above 0: the halves that it was estimated from are noise.
    """
    if not true_square > 0:
        raise ValueError(f"the square of the true gradient is estimated as {true_square:.3g}; raise --reference")
    inner, square = gradients @ (scale * true), np.sum(scale * gradients**2, axis=1)
    return np.where(square > 0, inner / np.sqrt(np.where(square > 0, square, 1.0) * true_square), 0.0)


async def measure(task: str, seed: int, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """`VARIANT/LOSS`: `cosines` and `tokens` of each batch, for one task and seed."""
    cache = arguments.workdir.absolute() / "warm_start"
    run = assemble(settings(task, seed, cache), arguments.workdir.absolute() / f"{task}-signal-{seed}")
    await loop.publish(run)
    await loop.warm_up_predictor(run)
    for _ in range(TRAINED_STEPS):
        await loop.train_step(run)
    await loop.publish(run)
    moments = ravel_pytree(optax.tree.get(run.policy.opt_state, "nu"))[0]
    optimizer = run.config.optimizer
    corrected = np.asarray(moments, np.float64) / (1 - optimizer.b2**TRAINED_STEPS)
    scale = 1 / (np.sqrt(corrected) + optimizer.eps)
    gradients = Gradients(run)
    halves = await reference(run, gradients, arguments.reference)
    true, true_square = (halves[0] + halves[1]) / 2, float(halves[0] @ (scale * halves[1]))
    result = {}
    bar = Bar(f"{task}, seed {seed}", len(VARIANTS) * arguments.batches, "batch")
    for index, (name, (strategy, budget, losses)) in enumerate(VARIANTS.items()):
        own = dataclasses.replace(run, config=settings(task, seed, cache, strategy, **budget))
        found: dict[str, list[np.ndarray]] = {loss: [] for loss in losses}
        tokens = []
        for i in range(arguments.batches):
            gathered = await loop.gather(own, _STEP + i, _PROMPTS + i * own.config.budget.pool)
            tokens.append(gathered.metrics["rollout/generated_tokens"])
            for loss in losses:
                found[loss].append(gradients.of(gathered.trees, LOSSES[loss]))
            bar.to(index * arguments.batches + i + 1)
        for loss in losses:
            found_cosines = cosines(np.array(found[loss]), scale, true, true_square)
            result[f"{name}/{loss}"] = {"cosines": found_cosines.round(5).tolist(), "tokens": tokens}
    bar.close()
    await run.engine.close()
    return result


def mean_and_error(seeds: list[np.ndarray]) -> tuple[float, float]:
    """Mean of the seeds' means over batches; its standard error over batches, these seeds as given."""
    squares = [np.var(batches, ddof=1) / batches.size for batches in seeds]
    return float(np.mean([batches.mean() for batches in seeds])), float(np.sqrt(np.sum(squares)) / len(seeds))


def report(folder: Path) -> None:
    """Writes signal.md of signal.json."""
    kept = json.loads((folder / "signal.json").read_text())["seeds"]
    lines = []
    for task in sorted({name.split("-")[0] for name in kept}):
        runs = [run for name, run in sorted(kept.items()) if name.split("-")[0] == task]
        default = [np.array(run[DEFAULT]["cosines"]) for run in runs]
        for variant in runs[0]:
            own = [np.array(run[variant]["cosines"]) for run in runs]
            mean, error = mean_and_error(own)
            shift, of_shift = mean_and_error([a - b for a, b in zip(own, default, strict=True)])
            tokens = float(np.mean([np.mean(run[variant]["tokens"]) for run in runs]))
            cells = [f"{mean:.3f} +- {error:.3f}", "-" if variant == DEFAULT else f"{shift:+.3f} +- {of_shift:.3f}"]
            cells += [f"{tokens:.0f}", f"{1000 * mean**2 / tokens:.4f}", str(sum(map(len, own)))]
            lines.append([task, *variant.split("/"), *cells])
    headers = ["task", "budget", "loss", "alignment", "minus default", "tokens", "alignment^2 per 1,000 tokens"]
    headers += ["batches"]
    table = tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
    (folder / "signal.md").write_text(table + "\n")
    print(table)


def main() -> None:
    """Measures what is missing of the tasks and seeds that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default="arithmetic,lookup")
    parser.add_argument("--seeds", default="100")
    parser.add_argument("--batches", default=32, type=int, help="of each variant; what signal.json has stays")
    parser.add_argument("--reference", default=1024, type=int, help=f"prompts, a multiple of {2 * REFERENCE_BATCH}")
    parser.add_argument("--workdir", default="runs/experiments/predictor", type=Path)
    parser.add_argument("--only-report", action="store_true")
    arguments = parser.parse_args()
    if arguments.batches < 2 or arguments.reference < 1 or arguments.reference % (2 * REFERENCE_BATCH):
        parser.error(f"--batches is at least 2, --reference a multiple of {2 * REFERENCE_BATCH}")
    path = HERE / "signal.json"
    kept = json.loads(path.read_text())["seeds"] if path.exists() else {}
    for task in arguments.tasks.split(","):
        for seed in arguments.seeds.split(","):
            if not arguments.only_report and f"{task}-{seed}" not in kept:
                take_devices(settings(task, int(seed), arguments.workdir / "warm_start"))
                kept[f"{task}-{seed}"] = asyncio.run(measure(task, int(seed), arguments))
                path.write_text(json.dumps({"seeds": kept}, indent=1) + "\n")
    report(HERE)


if __name__ == "__main__":
    main()
