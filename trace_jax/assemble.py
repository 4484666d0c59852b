"""Puts a run together: model and tokenizer, trainer, predictor, engine; warm-starts the policy where asked for."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from trace_jax import config as config_lib
from trace_jax import saving, setup_run
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_tasks import DATA_TASKS
from trace_jax.engines.base import Engine
from trace_jax.loop import Run
from trace_jax.models import folder as model_folder
from trace_jax.models.config import DecoderConfig
from trace_jax.objectives.policy import policy_loss
from trace_jax.report import console
from trace_jax.rollout.agent import Limits
from trace_jax.rollout.environment import Environment
from trace_jax.setup_predictor import make_learned, recorded_features
from trace_jax.tasks.base import Task
from trace_jax.tasks.tokenizer import save_tokenizer, vocabulary_size
from trace_jax.train import sharding, warm_start
from trace_jax.train.checkpoint import Checkpointer
from trace_jax.train.policy_step import PolicyTrainer


@dataclasses.dataclass(frozen=True)
class PolicyParts:
    """What stands before a policy has parameters: enough to read and write them."""

    config: RunConfig  # its paths are model folders
    tokenizer: Any
    trainer: PolicyTrainer


@dataclasses.dataclass(frozen=True)
class Parts(PolicyParts):
    """The same with what the policy acts in: enough to sample."""

    environment: Environment


def prepare_policy(config: RunConfig) -> PolicyParts:
    """Tokenizer and the policy's functions; no data are read and no tools start.

    ConfigError for settings that do not fit the model or the machine.
    """
    config = setup_run.with_model_folders(config)
    tokenizer = setup_run.make_tokenizer(config, None if config.task in DATA_TASKS else setup_run.make_task(config))
    model = setup_run.make_model(config, vocabulary_size(tokenizer))
    return PolicyParts(config, tokenizer, policy_trainer(config, model, _mesh(config)))


def prepare(config: RunConfig, *, training: bool = True) -> Parts:
    """`prepare_policy` and the task. Without `training` no training records are needed.

    ConfigError for settings that do not fit the data, the model or the machine.
    """
    policy = prepare_policy(config)
    config, tokenizer = policy.config, policy.tokenizer
    task = _task(config, tokenizer, training)
    ends = setup_run.end_ids(config, tokenizer)
    environment = setup_run.environment_of(task, tokenizer, ends, stop_texts=config.engine == "sglang")
    setup_run.check_trunk(config, environment)
    return Parts(config, tokenizer, policy.trainer, environment)


def _task(config: RunConfig, tokenizer: Any, training: bool) -> Task:
    if config.task not in DATA_TASKS:
        return setup_run.make_task(config)
    try:
        from trace_jax import setup_data_tasks  # its libraries are extras
    except ImportError as error:
        raise ConfigError(
            f"config.task is {config.task!r}, but {error.name} is not installed; pip install 'trace_jax[tasks]'"
        ) from error
    return setup_data_tasks.make_chat(config, tokenizer, training=training)


def assemble(config: RunConfig, workdir: Path, *, may_train: bool = True) -> Run:
    """The parts of a run at step 0.

    Without `may_train` no warm start is trained: where none is cached, the parameters are random, for a checkpoint to
    replace. Raises ConfigError for settings that do not fit the model or the machine.
    """
    _name_bias(config)
    parts = prepare(config, training=may_train)
    config, environment, trainer = parts.config, parts.environment, parts.trainer
    params = _first_params(parts, workdir, may_train)
    policy = trainer.adopt(params, config.seed)
    skip = environment.trunk.size
    features = recorded_features(config, trainer.model)
    engine = setup_run.make_engine(config, trainer.model, environment, workdir, features)
    learned = make_learned(config, trainer.model, trainer.mesh, parts.tokenizer, skip=skip, engine=engine)
    if learned is not None and config.predictor.frozen_states:
        learned.frozen = trainer.full_params(trainer.adopt(params).params)
    return Run(
        config=config,
        environment=environment,
        limits=setup_run.make_limits(config, environment.task),
        engine=engine,
        trainer=trainer,
        reference=trainer.adopt(params).params if config.loss.kl_coef else None,
        policy=policy,
        learned=learned,
        base=_base(config, workdir),
    )


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What samples episodes of one policy that does not train: without optimiser and predictor."""

    engine: Engine
    limits: Limits
    params: Any  # of the whole policy, adapters merged
    step: int  # training steps behind them


def assemble_sampler(
    parts: Parts, home: Path, workdir: Path | None = None, checkpoints: Checkpointer | None = None
) -> Sampler:
    """The policy before its first step, or that of the newest of `checkpoints` (of the run in `workdir`).

    `home`: where the engine writes weights; the warm start is cached there too, unless the config or `workdir` say
    otherwise. Raises ConfigError as `assemble`, and for a run without a checkpoint; CheckpointError.
    """
    config, workdir = parts.config, workdir or home
    if checkpoints is None:
        params, step = _first_params(parts, workdir, may_train=True), 0
    else:
        params, step = restored_policy(parts, workdir, checkpoints)
    engine = setup_run.make_engine(config, parts.trainer.model, parts.environment, home)
    return Sampler(engine, setup_run.make_limits(config, parts.environment.task), params, step)


def restored_policy(parts: PolicyParts, workdir: Path, checkpoints: Checkpointer) -> tuple[Any, int]:
    """(parameters of the whole policy, adapters merged; step) of the newest of `checkpoints`, of the run in `workdir`.

    Raises ConfigError for a run without a checkpoint, and where the weights below the adapters are gone;
    CheckpointError.
    """
    config, trainer = parts.config, parts.trainer
    if config.lora.rank:  # what the adapters are merged into
        trainer.adopt(_first_params(parts, workdir, may_train=False))
    found = saving.restore_policy(config, trainer, _base(config, workdir), checkpoints)
    if found is None:
        raise ConfigError(f"--workdir: {workdir} holds no checkpoint yet; train first")
    return trainer.full_params(found[0]), found[1]


def _name_bias(config: RunConfig) -> None:
    sampling = config.sampling
    if sampling.accept_truncation_bias and (sampling.top_p < 1 or sampling.top_k > 0):
        print(
            f"sampling: top_p {sampling.top_p} and top_k {sampling.top_k} cut the distribution that is drawn from, the "
            "loss scores the full softmax: the gradient is biased"
        )


def _base(config: RunConfig, workdir: Path) -> str:
    """Which parameters the adapters belong to; "" without adapters."""
    if not config.lora.rank:
        return ""
    if config.model.path is None or config.warm_start.pretrained:
        return model_folder.identity(setup_run.warm_start_folder(config, workdir))
    return model_folder.identity(config.model.path)


def policy_trainer(config: RunConfig, model: DecoderConfig, mesh: Mesh) -> PolicyTrainer:
    """The policy's jitted update with the config's optimiser and loss."""
    settings, corrects = config.loss, config_lib.corrects(config)
    loss = functools.partial(
        policy_loss,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl_coef=settings.kl_coef,
        tis_cap=settings.tis_cap if corrects else None,
    )
    return PolicyTrainer(
        model,
        setup_run.make_optimizer(config),
        loss,
        mesh,
        temperature=config.sampling.temperature,
        chunk=settings.logit_chunk,
        micro_rows=settings.micro_rows,
        rescore=settings.rescore or corrects,
        lora=setup_run.make_lora(config),
    )


def _mesh(config: RunConfig) -> Mesh:
    sizes = dataclasses.asdict(config.mesh)
    count = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    if count > jax.device_count():
        raise ConfigError(
            f"config.mesh needs {count} devices, but this machine has {jax.device_count()}; make it smaller"
        )
    return sharding.make_mesh(**sizes, devices=jax.devices()[:count])


def _first_params(parts: PolicyParts, workdir: Path, may_train: bool) -> Any:
    """Parameters of the model folder, or of a warm start, from them or from nothing."""
    path = parts.config.model.path
    if path is None:
        return _warm_started(parts, workdir, may_train, None)
    try:
        start = model_folder.load_params(path, parts.trainer.model, shardings=parts.trainer.param_shardings)
    except ValueError as error:
        raise ConfigError(f"config.model.path: {error}") from error
    return _warm_started(parts, workdir, may_train, start) if parts.config.warm_start.pretrained else start


def _warm_started(parts: PolicyParts, workdir: Path, may_train: bool, start: Any) -> Any:
    """What the cache holds, or what demonstrations make now of `start` (None: of random parameters).

    `may_train` needs `Parts`, whose task demonstrates.
    """
    config, trainer = parts.config, parts.trainer
    model = trainer.model
    folder = setup_run.warm_start_folder(config, workdir)
    record = _warm_start_record(config, model)
    if warm_start.cached(folder, record):
        print(f"warm start: found in {folder}")
        try:
            return model_folder.load_params(folder, model, shardings=trainer.param_shardings)
        except ValueError as error:
            raise ConfigError(f"warm start: {error}, or delete that folder") from error
    if not may_train:
        if config.lora.rank:
            raise ConfigError(f"warm start: {folder} no longer holds the model that the adapters belong to; restore it")
        return trainer.init(jax.random.key(0)).params if start is None else start
    try:
        warm_start.begin(folder)
    except OSError as error:
        raise ConfigError(f"config.warm_start.cache: {error}; choose a folder that can be written") from error
    params = _warm_start(config, trainer, parts.environment, start)
    token_ids = model_folder.load_token_ids(config.model.path) if config.model.path else None
    model_folder.save(folder, model, jax.device_get(params), token_ids=token_ids)
    save_tokenizer(parts.tokenizer, folder)
    warm_start.mark(folder, record)
    return params


def _warm_start_record(config: RunConfig, model: DecoderConfig) -> dict[str, Any]:
    """What decides a warm start's parameters."""
    settings = config_lib.fingerprint(config)
    settings[config.task].pop("difficulty", None)  # of rollouts; demonstrations have their own
    record = {
        "task": config.task,
        "task_settings": settings[config.task],
        "model": dataclasses.asdict(model),
        "warm_start": settings["warm_start"],
        "row_length": config.loss.row_length,
    }
    if config.task in DATA_TASKS:
        record["chat"] = settings["chat"]
        record["max_observation_tokens"] = config.sampling.max_observation_tokens
    if config.model.path is not None:
        record["start"] = model_folder.identity(config.model.path)
    return record


def _warm_start(config: RunConfig, trainer: PolicyTrainer, environment: Environment, start: Any) -> Any:
    settings = config.warm_start
    bar = console.Bar("warm start", settings.steps, "step")
    try:
        params = warm_start.train(
            trainer.model,
            trainer.mesh,
            environment.task if config.task in DATA_TASKS else setup_run.make_task(config, demonstrations=True),
            environment.encode,
            warm_start.WarmStart(
                steps=settings.steps,
                demonstrations=settings.demonstrations,
                distinct=settings.distinct,
                slip_rate=settings.slip_rate,
                learning_rate=settings.learning_rate,
                row_length=config.loss.row_length,
                micro_rows=settings.micro_rows,
                seed=settings.seed,
            ),
            lambda step, nll: bar.to(step + 1, nats=f"{nll:.3f}"),
            observe=lambda text: environment.observation(text, config.sampling.max_observation_tokens),
            start=start,
        )
    except ValueError as error:
        raise ConfigError(f"config.warm_start: {error}") from error
    finally:
        bar.close()
    return params
