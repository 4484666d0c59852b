"""The settings of a run: frozen dataclasses, the one place where each default lives.

`default_config()` is the same tree as a locked ConfigDict, which `configs/*.py` change and command-line flags override;
`parse(config_dict)` turns it back and checks the type of every field; `config_checks.check` then checks values and
combinations. Nothing below the entry points ever sees a ConfigDict. Defaults are the paper's where it states one, at
the scale of a small model.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

from ml_collections import config_dict

from trace_jax.config_allocation import BudgetConfig, PredictorConfig
from trace_jax.config_tasks import (
    DATA_TASKS,
    SMALL_TASKS,
    ArithmeticConfig,
    BfclConfig,
    ChatConfig,
    DataConfig,
    LookupConfig,
    MathConfig,
    MultihopQaConfig,
)


class ConfigError(ValueError):
    """A setting that cannot work: one line that names the field, its value, the limit and the remedy."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How episodes are sampled, in training and evaluation."""

    temperature: float = 1.0
    max_turn_tokens: int = 12
    max_observation_tokens: int = 48
    max_response_tokens: int | None = None  # of an episode, all behind its prompt; None: up to the context's end
    concurrency: int = 256  # episodes in flight
    deadline: float | None = None  # wall-clock seconds of an episode; a run with one is not reproducible
    top_p: float = 1.0  # below 1: draw from the likeliest tokens that hold this much probability; engine="sglang" only
    top_k: int = 0  # draw from the k likeliest tokens, 0: from all; engine="sglang" only
    accept_truncation_bias: bool = False  # train though top_p or top_k cut the distribution that the loss scores whole


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The policy: a pretrained model, or the shape of a small one that is warm-started from demonstrations."""

    path: str | None = None  # a model folder, a .gguf file, or "package:NAME" of a Python package that holds one
    gguf_cache: str | None = None  # where a .gguf file is converted, once; ~/.cache/trace_jax if not given
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_size: int = 384
    rope_theta: float = 1e4
    scan_layers: bool = False
    remat: bool = False
    fuse_projections: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"  # bfloat16 needs LoRA: what an optimiser moves is float32
    context_length: int = 128  # tokens of an episode, prompt included


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Adapters on every linear map of every layer, trained instead of the parameters (models/lora.py)."""

    rank: int = 0  # 0: no adapters, all parameters train
    alpha: float = 32.0  # an adapter counts alpha / rank times


@dataclasses.dataclass(frozen=True)
class LocalConfig:
    """The in-process engine (engines/local.py), for engine="local"."""

    slots: int = 64
    cache_rows: int = 640
    prefill_rows: int = 16
    prefill_chunk: int = 8
    decode_steps: int = 4


@dataclasses.dataclass(frozen=True)
class SglangConfig:
    """SGLang servers (engines/sglang.py), for engine="sglang"; `python -m trace_jax.launch_sglang` starts some."""

    urls: str = ""  # of every server, with commas between: http://127.0.0.1:30000,http://127.0.0.1:30001
    router: str | None = None  # URL of an sglang-router before them; requests go through it, weights past it
    weights_folder: str | None = None  # that trainer and servers share, e.g. on tmpfs; WORKDIR/weights if not given
    release_memory: bool = False  # servers give their GPU memory back while the policy trains on the same device
    request_timeout: float = 600.0  # seconds of one try of one turn
    attempts: int = 6  # tries of one turn before its episode ends with ENGINE_ERROR
    update_timeout: float = 600.0  # seconds in which a server must take new weights
    outage_timeout: float = 900.0  # seconds without any server after which the run ends, with a checkpoint


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised training on scripted demonstrations; its result is cached as a model folder."""

    pretrained: bool = False  # also of a pretrained model (model.path), before anything else
    steps: int = 450
    demonstrations: int = 64  # per step
    distinct: int = 8192  # demonstrations that are generated
    slip_rate: float = 0.1  # share of demonstrated actions that are wrong
    learning_rate: float = 2e-3
    micro_rows: int = 8  # rows of one gradient call
    seed: int = 0  # of parameters and demonstrations; the run's own seed does not change it
    cache: str | None = None  # folder of the cache; the workdir if not given


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The policy's optimiser (train/optimizer.py). Paper E.3: Adam, 1e-6 for 8B models, clip 1.0."""

    name: str = "adamw"
    schedule: str = "constant"
    learning_rate: float = 1e-6
    warmup_steps: int = 0  # of schedule="warmup_cosine"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0  # of name="sgd"
    clip_norm: float = 1.0
    max_update_norm: float | None = None  # ours: limit on the change of the parameters in one optimiser step


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The tree-aware objective. Default: one on-policy pass, no KL (paper E.3).

    The advantage and the weights are ours (experiments/predictor compares some); PAPER_LOSS has the paper's.
    """

    # "grpo", "dr_grpo", "tree_rpo" (Eq. 45-47), "tree_grpo" (Eq. 48-49), "tree_rloo" (ours); GRPO always uses its own
    advantage: str = "tree_rloo"
    value_prior: float = 2.0  # of "tree_rloo": outcomes that the predictor's score of a group counts as
    std_ddof: int = 0  # 0: population std; 1: sample std. The paper does not say
    aggregation: str = "sequence_mean_token_sum"  # or _token_mean (Eq. 43), _token_scale, "token_mean"
    prompt_weight: str = "sequences"  # every sequence weighs the same; "equal": every tree does
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0  # of a k3 penalty to the warm-started policy
    tis: str = "auto"  # truncated importance weights against the sampler: "on", "off", "auto" (see `corrects`)
    tis_cap: float = 2.0  # the largest of these weights
    rescore: bool = False  # old log-probs from the trainer's forward instead of the engine's; implied by weights
    max_logprob_gap: float = 0.05  # nats: a step whose mean gap to the sampler is above is called out (our choice)
    measure_kl: bool = True  # KL of each update, by one more forward pass over its rows
    epochs: int = 1
    mini_batches: int = 1
    row_length: int = 128  # T of packed rows; at least the context
    micro_rows: int = 16  # b: rows of one gradient call
    logit_chunk: int = 128  # positions of a row whose logits exist at once


PAPER_LOSS = {
    "advantage": "tree_rpo",  # E.4, of math and QA
    "aggregation": "sequence_mean_token_mean",  # Eq. 43
    "prompt_weight": "equal",  # our reading
}


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation, before and after training and every `every` steps (0: never between)."""

    prompts: int = 512
    samples: int = 4
    every: int = 0
    seed: int = 0  # of the sampling noise: the same before and after


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Where numbers go beside metrics.jsonl."""

    tensorboard: bool = True
    wandb_project: str | None = None


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints under WORKDIR/checkpoints."""

    every: int = 10  # steps; 0: only at the end and on SIGTERM or Ctrl-C
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Device mesh of the training steps; the product is the number of devices used."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class DevicesConfig:
    """Which accelerators the trainer takes; servers get theirs from `python -m trace_jax.launch_sglang`."""

    visible: str | None = None  # numbers of the GPUs, e.g. "0,1"; all if not given
    memory_fraction: float | None = None  # of each GPU's memory that is reserved; jax takes 0.75 if not given
    on_demand: bool = False  # nothing is reserved: memory is taken while it is needed and given back, slower


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes."""

    task: str = "arithmetic"  # or "lookup", "math", "multihop_qa", "bfcl"
    strategy: str = "trace"  # or "grpo", "pcl", "treepo"
    engine: str = "local"  # or "sglang": what samples the rollouts
    seed: int = 0
    steps: int = 20
    overlap: bool = False  # sample the next step's rollouts while this one trains: they are one step stale then
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    lookup: LookupConfig = LookupConfig()
    data: DataConfig = DataConfig()
    chat: ChatConfig = ChatConfig()
    math: MathConfig = MathConfig()
    multihop_qa: MultihopQaConfig = MultihopQaConfig()
    bfcl: BfclConfig = BfclConfig()
    budget: BudgetConfig = BudgetConfig()
    sampling: SamplingConfig = SamplingConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraSettings = LoraSettings()
    local: LocalConfig = LocalConfig()
    sglang: SglangConfig = SglangConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    predictor: PredictorConfig = PredictorConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    mesh: MeshConfig = MeshConfig()
    devices: DevicesConfig = DevicesConfig()


FLAT = ("grpo", "pcl")  # strategies without forks

# Settings that a resumed run may change: they do not alter what a step computes.
RESUMABLE = ("steps", "eval", "checkpoint", "logging", "sglang", "devices")


def default_config() -> config_dict.ConfigDict:
    """The defaults as a locked ConfigDict; a field that may be None is a placeholder, so that flags can set it."""
    return _to_config_dict(RunConfig()).lock()


def parse(config: config_dict.ConfigDict) -> RunConfig:
    """The dataclasses of a ConfigDict. Raises ConfigError for a name or a type that does not fit."""
    return _from_mapping(RunConfig, config.to_dict(), "config")


def to_json(config: RunConfig) -> str:
    """The resolved config as an indented JSON object, every field in it."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(text: str) -> RunConfig:
    """The config that `to_json` wrote. Raises ConfigError for a name or a type that does not fit, ValueError for text
    that is no JSON object."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("config.json holds no object")
    return _from_mapping(RunConfig, document, "config")


def split_urls(urls: str) -> tuple[str, ...]:
    """The URLs of a text with commas between them, without blanks and closing slashes."""
    return tuple(url.strip().rstrip("/") for url in urls.split(",") if url.strip())


def corrects(config: RunConfig) -> bool:
    """Whether the loss weighs tokens by min(pi_trainer_old / pi_sampler, tis_cap): our option, see `objectives.policy`.

    "auto": where the two differ by more than rounding, in another process (engine="sglang") or in stale rollouts
    (overlap).
    """
    return config.loss.tis == "on" or (config.loss.tis == "auto" and (config.engine == "sglang" or config.overlap))


def fingerprint(config: RunConfig) -> dict[str, Any]:
    """The settings that a checkpoint must share with the run that resumes it."""
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in RESUMABLE}
    del settings["warm_start"]["cache"], settings["model"]["gguf_cache"]  # where it lies does not change what it is
    del settings["loss"]["max_logprob_gap"]  # a warning changes no step
    del settings["data"]["folder"], settings["multihop_qa"]["search_url"]
    for name in ("python_workers", "python_url", "check_workers"):
        del settings["math"][name]
    idle = {*SMALL_TASKS, *DATA_TASKS, *(("data", "chat") if config.task in SMALL_TASKS else ())} - {config.task}
    for name in idle:  # nothing reads them
        del settings[name]
    if config.optimizer.schedule == "warmup_cosine":
        settings["steps"] = config.steps  # the schedule ends with the run
    return settings


def _to_config_dict(value: Any) -> config_dict.ConfigDict:
    result = config_dict.ConfigDict()
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            result[field.name] = _to_config_dict(item)
        elif item is None:
            result[field.name] = config_dict.placeholder(_plain_type(hints[field.name]))
        else:
            result[field.name] = item
    return result


def _from_mapping(cls: type, mapping: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(mapping) - set(hints))
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]} is not a setting; {where} has {', '.join(hints)}")
    missing = sorted(set(hints) - set(mapping))
    if missing:
        raise ConfigError(f"{where}.{missing[0]} is missing; start from trace_jax.config.default_config()")
    return cls(**{name: _convert(hints[name], mapping[name], f"{where}.{name}") for name in hints})


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _from_mapping(hint, value, where)
    if value is None and _optional(hint):
        return None
    plain = _plain_type(hint)
    if plain is tuple:
        return _convert_tuple(typing.get_args(hint)[0], value, where)
    if plain is float and _is_number(value):
        return float(value)
    if not isinstance(value, plain) or (plain is int and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}, must be of type {plain.__name__}")
    return value


def _convert_tuple(kind: type, value: Any, where: str) -> tuple:
    """A tuple of numbers, which become floats, or of names."""
    fits, what = (_is_number, "numbers") if kind is float else (lambda item: isinstance(item, str), "names")
    if not isinstance(value, (tuple, list)) or not all(fits(item) for item in value):
        raise ConfigError(f"{where} is {value!r}, must be a tuple of {what}")
    return tuple(kind(item) for item in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)


def _plain_type(hint: Any) -> type:
    """int of `int | None`, tuple of `tuple[float, ...]`."""
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.get_origin(hint) or hint
