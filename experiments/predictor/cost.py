"""Seconds that each form of the predictor takes of a step, and how they grow with the length of histories.

    python -m experiments.predictor.cost

One process warms up a quickstart run, records one step of it (its pool and its trees) and lets every form score and fit
that step, in rounds: each round also trains one real step, whose seconds are what the shares are of, and starts with
another form than the round before. Writes cost.json and cost.png. Numbers are medians over rounds beside mean, least
and greatest:

    cost/FORM/score_seconds          the pool, then all anchors of all trees; nothing else runs beside it
    cost/FORM/update_seconds         the fit after the step
    cost/FORM/share_of_step          both, of the real step of the same round (which holds the default form's own)
    cost/bayes/share_not_reused      the same without the prompts of the pool that were opened: the default form has the
                                     engine prefill them, and their rollouts find it in its cache
    cost/growth/FORM/tokens=N/...    HISTORIES histories of N tokens: score_seconds, update_seconds (one pass),
                                     score_ms_per_1000_tokens

What keeping states adds to decoding is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import quickstart
from experiments import results as results_lib
from experiments.predictor import cost_figure
from trace_jax import assemble, config_checks, loop, setup_run
from trace_jax import config as config_lib
from trace_jax.config_allocation import PAPER_PREDICTOR
from trace_jax.learned import Learned
from trace_jax.setup_predictor import make_learned
from trace_jax.train.replay import Examples
from trace_jax.train.state_record import StateRecord
from trace_jax.tree import query
from trace_jax.types import Prompt, RolloutTree

HERE = Path(__file__).resolve().parent
# Settings of config.predictor beside configs/quickstart.py: forms of the model, then of what a critic is fitted to. The
# default's states are on the engine's record; with frozen states they take forward passes, as on a server's rollouts.
MODELS: dict[str, dict[str, Any]] = {
    "bayes": {},
    "bayes_forward": {"frozen_states": True},
    "critic": PAPER_PREDICTOR,
    "critic_small": PAPER_PREDICTOR | {"hidden_size": 32, "mlp_size": 96},
    "policy_head": PAPER_PREDICTOR | {"kind": "policy_head"},
    "both": PAPER_PREDICTOR | {"kind": "both"},
    "members_8": PAPER_PREDICTOR | {"members": 8},
}
FITS: dict[str, dict[str, Any]] = {
    f"{targets}_{share}": PAPER_PREDICTOR
    | {"loss": "bce", "weighting": "count", "targets": targets, "prefix_share": share}
    for targets in ("bare", "direct")
    for share in (0.06, 0.5, 0.9)
}
FORMS = MODELS | FITS
DEFAULT = "bayes"
LENGTHS = (16, 32, 64, 120)  # the engine asks for one token more, in a context of 128
HISTORIES = 64
GROUPS = 12  # of trees whose anchors are scored in one pass; real steps make 10 to 15
EARLIER_STEPS = 3  # before the recorded one; the first ones compile
Seconds = dict[str, list[float]]  # of each round, by name of what was measured


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A step as the predictor sees it."""

    prompts: list[Prompt]  # the pool
    trees: list[RolloutTree]
    policy: Any  # its parameters in that step
    record: StateRecord  # the engine's, of the histories in that step

    @property
    def skipped(self) -> Recorded:
        """Without the prompts that were opened."""
        opened = {tree.prompt_uid for tree in self.trees}
        return dataclasses.replace(self, prompts=[prompt for prompt in self.prompts if prompt.uid not in opened])


def run_config(overrides: dict[str, Any], cache: Path) -> config_lib.RunConfig:
    """The quickstart's config with other settings of the predictor."""
    config = quickstart.get_config()
    config.strategy = "trace"
    config.warm_start.cache = str(cache)
    config.predictor.update(overrides)
    return config_checks.check(config_lib.parse(config))


async def record(run: loop.Run) -> Recorded:
    """A few steps of the run, then one more of which only the rollouts are made."""
    await loop.publish(run)
    if run.config.predictor.warmup_prompts:
        await loop.warm_up_predictor(run)
    for _ in range(EARLIER_STEPS):
        await loop.train_step(run)
    await loop.publish(run)
    prompts = run.training_prompts(run.config.budget.pool, run.cursor)
    gathered = await loop.gather(run, run.step, run.cursor)
    return Recorded(prompts, gathered.trees, jax.tree.map(jnp.copy, run.served), gathered.record)


class Form:
    """One form of the predictor with a state of its own."""

    def __init__(self, overrides: dict[str, Any], run: loop.Run):
        """Built as `assemble` builds that of `run`, for the same policy; nothing is compiled yet."""
        config = run_config(overrides, Path(run.config.warm_start.cache))
        tokenizer = setup_run.make_tokenizer(config, setup_run.make_task(config))
        model, mesh = run.trainer.model, run.trainer.mesh
        self.settings = config.predictor
        skip, self._engine = run.environment.trunk.size, run.engine
        self.learned: Learned = make_learned(config, model, mesh, tokenizer, skip=skip, engine=run.engine)

    async def score(self, step: Recorded) -> float:
        """Seconds for the pool's prompts and then for all anchors, a group of trees after the other.

        In a real step the trees' rollouts end one after the other and the trees that wait meanwhile share a pass.
        """
        scorer = self.learned.scorer
        await self._publish(step)
        begin = time.perf_counter()
        await scorer.score_prompts(step.prompts)
        if self.learned.recorded:  # the rollouts would have put the anchors there
            self._engine.state_record.update(step.record.features)
        for group in np.array_split(np.arange(len(step.trees)), min(GROUPS, len(step.trees))):
            trees = [step.trees[i] for i in group]
            await asyncio.gather(*(scorer.score_anchors(tree, query.anchors(tree)) for tree in trees))
        return time.perf_counter() - begin

    async def update(self, step: Recorded, rng: np.random.Generator) -> float:
        """Seconds of the fit after a step."""
        begin = time.perf_counter()
        self.learned.update(self.settings, self._states(step), step.trees, rng)
        jax.block_until_ready(self.learned.state)
        return time.perf_counter() - begin

    async def score_histories(self, step: Recorded, histories: Sequence[np.ndarray]) -> float:
        """Seconds for histories that have nothing in common."""
        prompts = [Prompt(str(i), tokens, None) for i, tokens in enumerate(histories)]
        await self._publish(step)
        begin = time.perf_counter()
        await self.learned.scorer.score_prompts(prompts)
        return time.perf_counter() - begin

    async def fit_histories(self, step: Recorded, histories: Sequence[np.ndarray], rng: np.random.Generator) -> float:
        """Seconds of one pass over them."""
        ones = np.ones(len(histories))
        examples = Examples(tuple(histories), ones.astype(np.float32) / 2, ones.astype(np.int32), ones.astype(bool))
        begin = time.perf_counter()
        trainer, state = self.learned.trainer, self.learned.state
        states = StateRecord(self._engine.state_record) if self.learned.recorded else step.policy
        self.learned.state, _ = trainer.fit(state, states, examples, rng, epochs=1)
        jax.block_until_ready(self.learned.state)
        return time.perf_counter() - begin

    async def _publish(self, step: Recorded) -> None:
        """The scorer sees what it would in that step; an engine that keeps states has none of them yet."""
        if self.learned.recorded:
            await self._engine.set_weights(step.policy, self._engine.weight_version)
        self.learned.publish(step.policy, self.learned.state.params)

    def _states(self, step: Recorded) -> Any:
        return step.record if self.learned.recorded else step.policy


async def measure(run: loop.Run, rounds: int) -> Seconds:
    """All seconds of all rounds, behind one round of each that is not kept: it compiles."""
    seconds: Seconds = {}
    step = await record(run)
    forms = {name: Form(overrides, run) for name, overrides in FORMS.items()}
    lengths = histories(run.trainer.model.vocab_size)
    for form in forms.values():
        for earlier in range(form.settings.replay_steps):  # until its window is full
            await form.update(step, np.random.default_rng(earlier))
    for number in range(-1, rounds):
        run.served = None  # the engine may have been given other weights
        kept: Seconds = {"step": [(await loop.train_step(run))["time/step"]]}
        for name in _rotated(list(FORMS), number):
            rng = np.random.default_rng(number + 1)
            kept[f"{name}/score_seconds"] = [await forms[name].score(step)]
            kept[f"{name}/update_seconds"] = [await forms[name].update(step, rng)]
        kept[f"{DEFAULT}/not_reused_seconds"] = [await forms[DEFAULT].score(step.skipped)]
        for name in _rotated(list(MODELS), number):
            for length, some in lengths.items():
                where, rng = f"growth/{name}/tokens={length}", np.random.default_rng(number + 1)
                kept[f"{where}/score_seconds"] = [await forms[name].score_histories(step, some)]
                kept[f"{where}/update_seconds"] = [await forms[name].fit_histories(step, some, rng)]
        if number >= 0:
            for name, taken in kept.items():
                seconds.setdefault(name, []).extend(taken)
            print(f"round {number + 1} of {rounds}", flush=True)
    await run.engine.close()
    return seconds


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def histories(vocab_size: int) -> dict[int, list[np.ndarray]]:
    """HISTORIES random ones of each length."""
    rng = np.random.default_rng(0)
    return {n: list(rng.integers(0, vocab_size, (HISTORIES, n), dtype=np.int32)) for n in LENGTHS}


def summaries(seconds: Seconds) -> dict[str, results_lib.Summary]:
    """`cost/...` of all rounds."""
    found = dict(seconds)
    for name in FORMS:
        parts = zip(seconds[f"{name}/score_seconds"], seconds[f"{name}/update_seconds"], seconds["step"], strict=True)
        found[f"{name}/share_of_step"] = [(score + update) / step for score, update, step in parts]
    own = (seconds[f"{DEFAULT}/{part}_seconds"] for part in ("not_reused", "update"))
    found[f"{DEFAULT}/share_not_reused"] = [(a + b) / step for a, b, step in zip(*own, seconds["step"], strict=True)]
    for name in MODELS:
        for length in LENGTHS:
            where = f"growth/{name}/tokens={length}"
            taken = seconds[f"{where}/score_seconds"]
            found[f"{where}/score_ms_per_1000_tokens"] = [1e6 * s / (HISTORIES * length) for s in taken]
    found["step_seconds"] = found.pop("step")
    return {
        f"cost/{name}": results_lib.summarise(values) | {"median": statistics.median(values)}
        for name, values in found.items()
    }


def main() -> None:
    """Parses the command line, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", default=7, type=int)
    parser.add_argument("--workdir", default=Path("runs/experiments/predictor"), type=Path)
    parser.add_argument("--folder", default=HERE, type=Path, help="of cost.json and cost.png")
    arguments = parser.parse_args()
    workdir = arguments.workdir.absolute()
    run = assemble.assemble(run_config({}, workdir / "warm_start"), workdir / "cost")
    results = summaries(asyncio.run(measure(run, arguments.rounds)))
    results_lib.write(arguments.folder / "cost.json", results)
    cost_figure.draw(results, arguments.folder / "cost.png", tuple(FORMS), tuple(MODELS), LENGTHS, default=DEFAULT)


if __name__ == "__main__":
    main()
