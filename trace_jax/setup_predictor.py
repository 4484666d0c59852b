"""From settings to the learned predictor of a run: its model, what it reads of a history, its trainer and its state."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from trace_jax.config import ConfigError, RunConfig
from trace_jax.engines.base import Engine
from trace_jax.learned import Learned
from trace_jax.models import folder as model_folder
from trace_jax.models import predictor as predictors
from trace_jax.models import state_features
from trace_jax.models.config import DecoderConfig
from trace_jax.models.state_features import StateFeatures
from trace_jax.objectives import recalibration
from trace_jax.objectives import value as value_losses
from trace_jax.setup_run import make_strategy
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.train import optimizer as optimizers
from trace_jax.train import replay
from trace_jax.train.bayes_step import BayesianTrainer
from trace_jax.train.history_view import HistoryView, recoder
from trace_jax.train.predictor import LearnedPredictor
from trace_jax.train.predictor_step import PredictorTrainer
from trace_jax.train.state_record import RecordedPredictor
from trace_jax.tree import targets


def recorded_features(config: RunConfig, model: DecoderConfig) -> StateFeatures | None:
    """What the in-process engine is to keep of each history for the predictor; None where that reads no record."""
    settings = config.predictor
    reads = settings.kind == "bayes" and not settings.frozen_states and config.engine == "local"
    return _features(config, model) if reads and make_strategy(config, config.budget).needs_predictor else None


def make_learned(
    config: RunConfig, model: DecoderConfig, mesh: Mesh, tokenizer: Any, *, skip: int, engine: Engine | None = None
) -> Learned | None:
    """The predictor that the config asks for; None for a strategy without one, and for the oracle.

    Args:
      model, tokenizer: the policy's.
      skip: leading tokens of every prompt that a critic need not read; a head on the policy's states reads all.
      engine: of the run, needed where there are `recorded_features`, which it keeps.

    Raises ConfigError for a critic's folder that cannot be used.
    """
    settings = config.predictor
    if not make_strategy(config, config.budget).needs_predictor or settings.kind == "oracle":
        return None
    key, view = jax.random.key(config.seed), HistoryView(_limit(config), skip=skip)
    if settings.kind == "policy_head":
        head = predictors.policy_head(model, mlp_size=settings.mlp_size, members=settings.members)
        trainer = _trainer(config, head, mesh)
        return _learned(config, trainer, trainer.init(key), HistoryView(_limit(config)))
    if settings.kind == "bayes":
        trainer = _bayesian(config, model, mesh)
        if recorded_features(config, model) is None:
            return _learned(config, trainer, trainer.init(key), HistoryView(_limit(config)))
        view = HistoryView(config.model.context_length)
        scorer = RecordedPredictor(engine, view, trainer.probability, draws=settings.expected)
        return _learned(config, trainer, trainer.init(key), scorer.view, scorer)
    if settings.kind == "both":
        view = HistoryView(_limit(config))
    if settings.path is None:
        trainer = _trainer(config, _with_decoder(config, _small_decoder(config, model), model), mesh)
        return _learned(config, trainer, trainer.init(key), view)
    try:
        recode, size = _tokens_of(settings.path, tokenizer)
        cfg = _pretrained_decoder(config, model, size)
        if recode is not None and settings.kind == "both":
            raise ValueError("the folder's tokenizer is not the policy's, but kind 'both' reads the same tokens twice")
        trainer = _trainer(config, _with_decoder(config, cfg, model), mesh)
        backbone = model_folder.load_params(
            settings.path, cfg, dtype="float32", shardings=trainer.shardings.params["decoder"], with_head=False
        )
    except ValueError as error:
        raise ConfigError(f"config.predictor.path: {error}") from error
    view = HistoryView(_limit(config), recode, skip)
    return _learned(config, trainer, trainer.adopt(backbone, key), view)


def _with_decoder(config: RunConfig, cfg: DecoderConfig, policy: DecoderConfig) -> predictors.PredictorModel:
    """A predictor with a decoder of its own, which reads the policy's states too or not."""
    settings = config.predictor
    if settings.kind == "both":
        return predictors.both(cfg, policy, mlp_size=settings.mlp_size, members=settings.members)
    return predictors.critic(cfg, mlp_size=settings.mlp_size, members=settings.members)


def _limit(config: RunConfig) -> int:
    """Tokens of a history that the predictor reads at most, and of its rows."""
    return config.predictor.max_tokens or config.loss.row_length


def _learned(
    config: RunConfig,
    trainer: PredictorTrainer | BayesianTrainer,
    state: Any,
    view: HistoryView,
    recorded: RecordedPredictor | None = None,
) -> Learned:
    settings = config.predictor
    kinds = {"backed_up": targets.backed_up, "bare": targets.bare, "direct": targets.direct}
    maps = {
        "none": None,
        "temperature": recalibration.fit_temperature,
        "isotonic": recalibration.fit_isotonic,
    }
    window = replay.ReplayWindow(settings.replay_steps, decay=settings.replay_decay)
    return Learned(
        trainer=trainer,
        state=state,
        scorer=recorded or LearnedPredictor(trainer, view, draws=settings.expected),
        targets=kinds[settings.targets],
        window=window,
        held=window,
        calibrate=maps[settings.calibration],
        recorded=recorded is not None,
    )


def _features(config: RunConfig, model: DecoderConfig) -> StateFeatures:
    settings = config.predictor
    return state_features.of_policy(model, layers=settings.state_layers, max_size=settings.feature_size)


def _bayesian(config: RunConfig, model: DecoderConfig, mesh: Mesh) -> BayesianTrainer:
    settings = config.predictor
    features = _features(config, model)
    return BayesianTrainer(
        features.of_rows,
        features.size,
        mesh,
        prior_precision=settings.prior_precision,
        remembered=settings.replay_decay,
        draws=settings.members,
        batch_rows=settings.batch_rows,
        row_length=_limit(config),
    )


def _trainer(config: RunConfig, model: predictors.PredictorModel, mesh: Mesh) -> PredictorTrainer:
    settings = config.predictor
    adamw = optimizers.adamw(
        optimizers.constant(settings.learning_rate), b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0
    )
    losses = {"mse": value_losses.squared_error, "bce": value_losses.binary_cross_entropy}
    weightings = {"equal": replay.equal_weight, "count": replay.count_weight}
    return PredictorTrainer(
        model,
        optimizers.build(adamw, clip_norm=1.0, max_update_norm=None),
        losses[settings.loss],
        weightings[settings.weighting],
        mesh,
        batch_rows=settings.batch_rows,
        row_length=_limit(config),
    )


def _small_decoder(config: RunConfig, model: DecoderConfig) -> DecoderConfig:
    """A critic from scratch, in the policy's tokens."""
    settings = config.predictor
    return DecoderConfig(
        vocab_size=model.vocab_size,
        hidden_size=settings.hidden_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_heads,
        head_dim=max(settings.hidden_size // settings.num_heads // 2 * 2, 2),
        mlp_size=settings.mlp_size,
        max_positions=model.max_positions,
        fuse_projections=model.fuse_projections,
        dtype=model.dtype,
    )


def _pretrained_decoder(config: RunConfig, model: DecoderConfig, tokenizer_size: int) -> DecoderConfig:
    """The decoder of the critic's folder, computed as the policy's is."""
    path, limit = config.predictor.path, _limit(config)
    execution = {name: getattr(model, name) for name in ("scan_layers", "remat", "fuse_projections", "dtype")}
    cfg = model_folder.load_config(path, **execution)
    model_folder.check_vocabulary(cfg, tokenizer_size)  # padding rows are of no interest: nothing is sampled here
    if limit > cfg.max_positions:
        name = "predictor.max_tokens" if config.predictor.max_tokens else "loss.row_length"
        raise ValueError(
            f"the critic reads up to {limit} tokens (config.{name}), but model folder {path} was made for "
            f"{cfg.max_positions}; set config.predictor.max_tokens to no more than that"
        )
    return cfg


def _tokens_of(path: str | Path, tokenizer: Any) -> tuple[Any, int]:
    """(from the policy's tokens to those of the folder's tokenizer, None where they are the same; its size)."""
    own = tokenizers.load_tokenizer(path)
    if own.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str():
        return None, len(own)
    decode, encode = functools.partial(tokenizers.decode, tokenizer), functools.partial(tokenizers.encode, own)
    return recoder(decode, encode), len(own)
