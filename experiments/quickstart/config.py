"""The quickstart's policy in the paper's regime: most groups of eight are all right or all wrong.

python -m trace_jax.main --config=experiments/quickstart/config.py:arithmetic,trace --workdir=runs/x --config.seed=0

The predictor and the allocation are the paper's, but for a warm-up. The argument names the task and the strategy: grpo, trace (learned predictor) or trace_oracle.
"""

from configs import quickstart

STRATEGIES = ("grpo", "trace", "trace_oracle")
# Weights of 1, 2, ... operations or hops. The last class is hardly ever solved and the first nearly always, so that
# GRPO's groups of eight are mixed in 25 to 40 % of cases, as in the paper.
DIFFICULTY = {
    "arithmetic": (0.2, 0.05, 0.05, 0.05, 0.05, 0.0, 0.0, 0.6),
    "lookup": (0.1, 0.1, 0.1, 0.1, 0.0, 0.6),
}


def get_config(variant: str = "arithmetic,trace"):
    """`TASK,STRATEGY`. ValueError for an unknown strategy; an unknown task is refused when the run starts."""
    task, strategy = variant.split(",")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is none of {', '.join(STRATEGIES)}")
    config = quickstart.get_config("paper")
    config.predictor.warmup_prompts = 128
    config.task = task
    config.strategy = strategy.removesuffix("_oracle")
    if task in DIFFICULTY:
        config[task].difficulty = DIFFICULTY[task]
    config.steps = 24
    config.eval.every = 8
    config.checkpoint.every = 4
    config.logging.tensorboard = False
    config.predictor.oracle_rollouts = 8
    config.predictor.oracle_continuations = 2
    if strategy == "trace_oracle":
        config.predictor.kind = "oracle"
    return config
