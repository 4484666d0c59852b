"""The quickstart's policy under seven ways to spend the same budget.

python -m trace_jax.main --config=experiments/predictor/config.py:arithmetic,trace --workdir=runs/x --config.seed=0

The argument names the task and one of STRATEGIES: GRPO, PCL, TreePO (uniform roots, random forks), and TRACE with the
learned predictor, with measured success in its place (oracle), with its scores handed to other prompts and anchors
(shuffled), and with the paper's recipe. What was chosen on seeds 100 and 101 is the default of configs/quickstart.py;
PCL has the same predictor as TRACE.
"""

from configs import quickstart
from trace_jax.config import PAPER_LOSS
from trace_jax.config_allocation import PAPER_BUDGET, PAPER_PREDICTOR

STRATEGIES = ("grpo", "pcl", "treepo", "trace", "trace_oracle", "trace_shuffled", "trace_paper")
STEPS = 32
# Weights of 1, 2, ... operations or hops. Six questions in ten are out of reach; of the others enough can be learnt that
# a difference between strategies shows (experiments/quickstart has half as many of those on arithmetic).
REGIME = {
    "arithmetic": (0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.6),
    "lookup": (0.1, 0.1, 0.1, 0.1, 0.0, 0.6),
}
EVALUATION = {"prompts": 512, "samples": 8, "every": 0}
ORACLE = {"kind": "oracle", "oracle_rollouts": 8, "oracle_continuations": 2}


def get_config(variant: str = "arithmetic,trace"):
    """`TASK,STRATEGY`. ValueError for an unknown strategy; an unknown task is refused when the run starts."""
    task, strategy = variant.split(",")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is none of {', '.join(STRATEGIES)}")
    config = quickstart.get_config()
    config.task, config.strategy = task, strategy.split("_")[0]
    if task in REGIME:
        config[task].difficulty = REGIME[task]
    config.steps = STEPS
    config.eval.update(EVALUATION)
    config.checkpoint.every = 4
    config.logging.tensorboard = False
    adapt = {"trace_oracle": _oracle, "trace_shuffled": _shuffled, "trace_paper": _paper}.get(strategy)
    if adapt is not None:
        adapt(config)
    return config


def _oracle(config) -> None:
    """Many extra rollouts, outside the budget, in place of a model."""
    no_model = ("members", "expected", "frozen_states", "calibration", "held_share")
    config.predictor.update(ORACLE | {name: PAPER_PREDICTOR[name] for name in no_model})


def _shuffled(config) -> None:
    """The lower control: the learned scores, each handed to another prompt or anchor."""
    config.predictor.shuffle = True


def _paper(config) -> None:
    """The learned predictor, the allocation and the loss as in the paper, at the same budget."""
    config.loss.update(PAPER_LOSS)
    config.predictor.update(PAPER_PREDICTOR)
    config.budget.update(PAPER_BUDGET)
