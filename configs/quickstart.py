"""TRACE end to end on a laptop: two CPU cores, minutes, nothing to download.

python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/lookup --config.task=lookup
python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/grpo --config.strategy=grpo
python -m trace_jax.main --config=configs/quickstart.py:paper --workdir=runs/paper

What differs from the defaults was chosen on seeds 100-102, see experiments/quickstart/README.md. The last command has the
paper's predictor, allocation and loss in place of those that did best here (experiments/predictor).
"""

from trace_jax import config as config_lib
from trace_jax.config import PAPER_LOSS, ConfigError
from trace_jax.config_allocation import PAPER_BUDGET, PAPER_PREDICTOR


def get_config(recipe: str = ""):
    """A locked ConfigDict; trace_jax/config.py lists every field. `recipe`: "paper", or nothing for ours."""
    if recipe not in ("", "paper"):
        raise ConfigError(f"configs/quickstart.py:{recipe} is none of its recipes; take :paper, or no argument for ours")
    config = config_lib.default_config()
    config.steps = 100
    config.arithmetic.difficulty = (1.0, 2.0, 2.0, 2.0, 1.0)  # 1 to 5 operations
    config.warm_start.steps = 600
    config.warm_start.demonstrations = 36
    config.optimizer.learning_rate = 2e-4
    config.optimizer.b2 = 0.95
    config.predictor.learning_rate = 1e-3  # of predictors that are fitted by gradient steps
    if recipe == "paper":
        config.loss.update(PAPER_LOSS)
        config.budget.update(PAPER_BUDGET)
        config.predictor.update(PAPER_PREDICTOR)
    return config
