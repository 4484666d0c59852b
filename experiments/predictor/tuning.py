"""The variants that were tried on seeds 100 and 101 before the settings were frozen, as a table.

    python -m experiments.predictor.tuning

tuning/TASK-VARIANT-SEED.jsonl keep the chosen metrics of each run; `flags` gives those of `trace_jax.main` that made it.
Writes tuning/table.md.
"""

from __future__ import annotations

from pathlib import Path

from tabulate import tabulate

from experiments.predictor import report
from experiments.quickstart.report import load
from trace_jax.config import PAPER_LOSS

FOLDER = Path(__file__).resolve().parent / "tuning"
_COMMON = "loss=bce weighting=count targets=direct warmup_prompts=128"
_CRITIC = f"kind=critic {_COMMON} replay_steps=32 replay_decay=1.0 update_steps=4 prefix_share=0.5 learning_rate=1e-3"
_BAYES = f"kind=bayes {_COMMON} prefix_share=0.9 replay_decay=0.99 prior_precision=3.0 update_steps=4"
_PAIRS = "objective=pairs max_per_prompt=8"
# (fields of config.predictor, fields of config.budget, the strategy)
VARIANTS = {
    "grpo": ("", "", "grpo"),
    "pcl_critic": (_CRITIC, "", "pcl"),
    "pcl_bayes": (_BAYES, "", "pcl"),
    "critic_any": (_CRITIC, "", "trace"),
    "critic_min6": (_CRITIC, "min_per_prompt=6", "trace"),
    "critic_pairs8": (_CRITIC, _PAIRS, "trace"),
    "critic_N0_pairs8": (_CRITIC, f"roots=256 continuations_per_root=0 {_PAIRS}", "trace"),
    "critic_N6": (_CRITIC, "roots=64 continuations_per_root=6", "trace"),
    "bayes": (_BAYES, "", "trace"),
    "bayes_precision1": (f"{_BAYES} prior_precision=1.0", "", "trace"),
    "bayes_precision1_pairs8": (f"{_BAYES} prior_precision=1.0", _PAIRS, "trace"),
    "bayes_precision1_pool128": (f"{_BAYES} prior_precision=1.0", "pool=128", "trace"),
    "bayes_decay95": (f"{_BAYES} replay_decay=0.95", "", "trace"),
    "bayes_min4": (_BAYES, "min_per_prompt=4", "trace"),
    "bayes_min6": (_BAYES, "min_per_prompt=6", "trace"),
    "bayes_pool128": (_BAYES, "pool=128", "trace"),
    "bayes_N0": (_BAYES, "roots=256 continuations_per_root=0", "trace"),
    "oracle": ("kind=oracle oracle_rollouts=8 oracle_continuations=2", "", "trace"),
    "critic_calibrated": (f"{_CRITIC} calibration=isotonic held_share=0.25", "min_per_prompt=6", "trace"),
    "pcl_sum": ("", "min_per_prompt=6", "pcl"),
    "rloo": ("", "min_per_prompt=6", "trace"),
    "rloo_warmup256x4": ("warmup_prompts=256 warmup_rollouts=4", "min_per_prompt=6", "trace"),
    "rloo_no_warmup": ("warmup_prompts=0", "min_per_prompt=6", "trace"),
    "rloo_precision10": ("prior_precision=10.0", "min_per_prompt=6", "trace"),
    "rloo_decay1": ("replay_decay=1.0", "min_per_prompt=6", "trace"),
    "rloo_all_turns": ("prefix_share=0.99", "min_per_prompt=6", "trace"),
    "rloo_expected": ("members=8 expected=True", "min_per_prompt=6", "trace"),
    "rloo_explore": ("", "min_per_prompt=6 explore_share=0.125", "trace"),
    "rloo_mass": ("", "min_per_prompt=2 objective=advantage_mass", "trace"),
    "rloo_N1": ("", "min_per_prompt=6 roots=170 continuations_per_root=1", "trace"),
    "rloo_N6": ("", "min_per_prompt=6 roots=64 continuations_per_root=6", "trace"),
    "rloo_oracle_32x8": ("kind=oracle oracle_rollouts=32 oracle_continuations=8", "min_per_prompt=6", "trace"),
}
COLUMNS = ("effective_ratio", "useful_groups_per_unit", "active_success", "brier", "success_gain")
COLUMNS += ("generated_tokens", "gain_per_100k_tokens")


def flags(task: str, variant: str, seed: int) -> list[str]:
    """Of `trace_jax.main`, beside a workdir. Budgets that are not named are 128 roots, N = 2, at least 2 of a prompt.

    The loss is the paper's, but for variants "rloo...", which have the present default, and "pcl_sum", which has its
    sums over tokens with GRPO's advantages.
    """
    predictor, budget, strategy = VARIANTS[variant]
    config = f"--config=experiments/predictor/config.py:{task},trace"
    fields = [f"--config.predictor.{field}" for field in predictor.split()]
    fields += [f"--config.budget.{field}" for field in f"min_per_prompt=2 {budget}".split()]
    if not variant.startswith(("rloo", "pcl_sum")):
        fields += [f"--config.loss.{name}={value}" for name, value in PAPER_LOSS.items()]
    fields += ["--config.eval.samples=4"]
    return [config, f"--config.strategy={strategy}", f"--config.seed={seed}", *fields]


def table(folder: Path) -> str:
    """Markdown: a row for each task and variant, means over its seeds."""
    runs = load(folder)
    lines = []
    for task in sorted({task for task, _ in runs}):
        for variant in VARIANTS:
            seeds = runs.get((task, variant), {})
            if seeds:
                values = [[report.METRICS[name](rows) for rows in seeds.values()] for name in COLUMNS]
                means = [sum(some) / len(some) if None not in some else None for some in values]
                cells = ["-" if mean is None else f"{mean:.3f}" if mean < 100 else f"{mean:.0f}" for mean in means]
                lines.append([task, variant, ", ".join(map(str, seeds)), *cells])
    headers = ["task", "variant", "seeds", *(name.replace("_", " ") for name in COLUMNS)]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True) + "\n"


def main() -> None:
    """Writes the table."""
    (FOLDER / "table.md").write_text(table(FOLDER))


if __name__ == "__main__":
    main()
