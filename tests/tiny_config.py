"""A run that takes seconds: one-operation arithmetic and one-hop lookup for a policy of a few thousand parameters.

The warm start goes far enough that some rollouts of a prompt succeed and others do not: without contrast there would be
no update, and equal results would prove nothing.
"""

from trace_jax import config as config_lib
from trace_jax.config import PAPER_LOSS
from trace_jax.config_allocation import PAPER_BUDGET, PAPER_PREDICTOR


def get_config():
    """The tiny run."""
    config = config_lib.default_config()
    config.steps = 4
    config.arithmetic.update(difficulty=(1.0,), demo_difficulty=(1.0,), max_number=9)
    config.lookup.update(difficulty=(1.0,), demo_difficulty=(1.0,))
    config.budget.update(pool=8, roots=8, rollouts_per_prompt=4)
    config.sampling.update(max_turn_tokens=8, concurrency=64)
    config.model.update(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=48)
    config.model.context_length = config.loss.row_length = 32
    config.loss.update(logit_chunk=32, micro_rows=8)
    config.local.update(slots=16, cache_rows=192)
    config.warm_start.update(steps=200, demonstrations=16, distinct=256, learning_rate=1e-2)
    config.optimizer.update(name="adamw", learning_rate=1e-3)
    config.loss.update(PAPER_LOSS)
    config.budget.update(PAPER_BUDGET)
    config.predictor.update(PAPER_PREDICTOR)
    config.predictor.update(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, learning_rate=1e-3)
    config.predictor.update(oracle_rollouts=2, oracle_continuations=2)
    config.eval.update(prompts=8, samples=2, every=2)
    config.checkpoint.every = 2
    config.logging.tensorboard = False
    return config
