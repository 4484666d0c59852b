"""TRACE end to end on a laptop: two CPU cores, minutes, nothing to download.

python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/lookup --config.task=lookup
python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/grpo --config.strategy=grpo

What differs from the defaults was chosen on seeds 100-102, see experiments/quickstart/README.md. A predictor that starts
from nothing blurs the allocation for the first steps, so it is fitted to rollouts of the warm-started policy first; the
paper's recipe is `--config.predictor.warmup_prompts=0`.
"""

from trace_jax import config as config_lib


def get_config():
    """A locked ConfigDict; trace_jax/config.py lists every field."""
    config = config_lib.default_config()
    config.steps = 100
    config.arithmetic.difficulty = (1.0, 2.0, 2.0, 2.0, 1.0)  # 1 to 5 operations
    config.warm_start.steps = 600
    config.warm_start.demonstrations = 36
    config.optimizer.learning_rate = 2e-4
    config.optimizer.b2 = 0.95
    config.predictor.learning_rate = 1e-3
    config.predictor.warmup_prompts = 128
    return config
