"""TRACE end to end on a laptop.

python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
python -m trace_jax.main --config=configs/quickstart.py --workdir=runs/lookup --config.task=lookup
"""

from trace_jax import config as config_lib


def get_config():
    """The defaults of trace_jax/config.py with what was chosen by measurement for the small policy."""
    config = config_lib.default_config()
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 1.0
    config.optimizer.max_update_norm = 0.03
    return config
