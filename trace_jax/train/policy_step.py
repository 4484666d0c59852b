"""The policy's update: gradients summed over micro-batches of a static shape, then one optimiser step.

Default: one on-policy pass, that is one optimiser step per rollout batch. With more epochs or mini-batches, the
log-probs that the ratio is taken against stay those from before the first of these steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trace_jax.models import decoder
from trace_jax.models import lora as adapters
from trace_jax.models.config import DecoderConfig
from trace_jax.models.lora import LoraConfig
from trace_jax.objectives.logprob import token_logprobs
from trace_jax.train import rows as rows_lib
from trace_jax.train import sharding
from trace_jax.train import state as state_lib
from trace_jax.train.state import TrainState
from trace_jax.tree import pack
from trace_jax.types import PackedBatch

# (logprob, old_logprob, adv_pos, adv_neg, weight, *, ref_logprob=..., behaviour_logprob=...)
#   -> scalar SUM over tokens, {name: (sum, weight)}; see `objectives.policy.policy_loss`
Loss = Callable[..., tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]]

_FIELDS = (
    "token", "pos", "prev", "end", "weight", "adv_pos", "adv_neg", "old_logprob", "behaviour_logprob",
)  # fmt: skip


def row_logprobs(
    model: DecoderConfig,
    params: Any,
    rows: dict[str, jax.Array],
    *,
    temperature: float,
    chunk: int,
    lora: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """(log-prob [B, T], entropy [B, T]) of each token of packed rows under softmax(logits / temperature).

    `lora` as in `decoder.hidden_states`.

    Token i is predicted by the hidden state at `prev[i]`. Where `prev` is -1 nothing predicts it and the two numbers
    mean nothing; such tokens have weight 0.
    """
    hidden_BTD = decoder.hidden_states(model, params, rows["token"], rows["pos"], rows["end"], lora)
    predictor_BTD = jnp.take_along_axis(hidden_BTD, jnp.maximum(rows["prev"], 0)[:, :, None], axis=1)
    kernel_DV = decoder.unembed(model, params)
    return token_logprobs(predictor_BTD, kernel_DV, rows["token"], temperature=temperature, chunk=chunk)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one rollout batch becomes optimiser steps: epochs * mini_batches of them."""

    epochs: int = 1
    mini_batches: int = 1  # random sets of rows; the loss of each is multiplied by their number
    measure_kl: bool = False  # one more forward pass over the batch after the last step

    def validate(self) -> Plan:
        """Raises ValueError for counts below 1."""
        if self.epochs < 1 or self.mini_batches < 1:
            raise ValueError(
                f"policy update: epochs {self.epochs} and mini_batches {self.mini_batches} must be at least 1"
            )
        return self


class PolicyTrainer:
    """The jitted parts of the policy's update for one model, optimiser, loss and mesh.

    What trains is all parameters, or with `lora` the adapters alone: then the state, its optimiser and its checkpoint
    hold adapters, and the parameters of `adopt` stay here as they are. `full_params` is the policy that either makes.

    States that go in are donated: use the returned one only. Arrays outside a state are never donated.
    """

    def __init__(
        self,
        model: DecoderConfig,
        optimizer: optax.GradientTransformation,
        loss: Loss,
        mesh: Mesh,
        *,
        temperature: float,
        chunk: int,
        micro_rows: int,
        rescore: bool,
        lora: LoraConfig | None = None,
    ):
        """Builds the functions; nothing is compiled yet.

        Args:
          loss: see `Loss`; bind its constants with functools.partial.
          temperature: that the rollouts were sampled at.
          chunk: positions of a row whose logits exist at once.
          micro_rows: rows of a micro-batch, a multiple of the mesh's data x fsdp.
          rescore: the ratio is taken against the trainer's own log-probs from before the update, and the loss also gets
            the engine's as `behaviour_logprob`; otherwise the engine's recorded log-probs are the old ones.
          lora: adapters to train instead of the parameters.
        """
        self.mesh = mesh
        self.model = model
        self._optimizer, self._loss, self._lora = optimizer, loss, lora
        self._temperature, self._chunk = temperature, chunk
        self._micro_rows, self._rescore = micro_rows, rescore
        init_params = functools.partial(decoder.init_params, model)
        init, axes = init_params, decoder.param_axes(model)
        self.param_shardings = sharding.param_shardings(mesh, jax.eval_shape(init, jax.random.key(0)), axes)
        if lora is not None:
            init, axes = functools.partial(adapters.init_adapters, model, lora), adapters.adapter_axes(model)
        shapes = jax.eval_shape(init, jax.random.key(0))
        self.shardings = sharding.state_shardings(mesh, optimizer, shapes, axes)
        params, by_row = self.shardings.params, sharding.row_sharding(mesh)
        whole = NamedSharding(mesh, PartitionSpec())
        frozen = None if lora is None else self.param_shardings
        self._frozen = None  # the parameters under the adapters
        self._zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=params)
        self._init_params = jax.jit(init_params, out_shardings=self.param_shardings)
        self._init = jax.jit(init, out_shardings=params)
        self._create = jax.jit(lambda params: state_lib.create(params, optimizer), out_shardings=self.shardings)
        self._accumulate = jax.jit(
            self._accumulate_fn,
            in_shardings=(params, frozen, params, by_row, whole),
            out_shardings=(params, whole, whole),
            donate_argnums=2,
        )
        # The gradients are not donated here: no output has room for them, jax would only warn.
        self._apply = jax.jit(
            self._apply_fn,
            in_shardings=(self.shardings, params),
            out_shardings=(self.shardings, whole),
            donate_argnums=0,
        )
        self._score = jax.jit(self._score_fn, in_shardings=(params, frozen, by_row), out_shardings=whole)
        self._merge = jax.jit(self._merge_fn, in_shardings=(params, frozen), out_shardings=self.param_shardings)

    def init(self, key: jax.Array) -> TrainState:
        """A fresh state from a random key; equal keys give equal parameters on every mesh."""
        with jax.set_mesh(self.mesh):
            return self.adopt(self._init_params(key))

    def adopt(self, params: Any, seed: int = 0) -> TrainState:
        """A fresh state around `params` (host or device arrays): around a copy, or with LoRA new adapters on top.

        `seed` draws the adapters.
        """
        with jax.set_mesh(self.mesh):
            params = jax.device_put(params, self.param_shardings)
            if self._lora is None:
                return self._create(params)
            self._frozen = params
            return self._create(self._init(jax.random.key(seed)))

    def full_params(self, params: Any) -> Any:
        """The parameters of the whole policy that a state's `params` stand for; with LoRA its adapters are merged."""
        if self._lora is None:
            return params
        with jax.set_mesh(self.mesh):
            return self._merge(params, self._frozen)

    def abstract_state(self) -> TrainState:
        """The state's shapes, dtypes and shardings: the template of a restore."""
        shapes = jax.eval_shape(self._create, jax.eval_shape(self._init, jax.random.key(0)))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    def compiles(self) -> dict[str, int]:
        """Compiled variants of each jitted function; more than 1 means that a shape changed."""
        jitted = {"accumulate": self._accumulate, "apply": self._apply, "score": self._score}
        return {name: function._cache_size() for name, function in jitted.items()}

    def logprobs(self, params: Any, batch: PackedBatch) -> np.ndarray:
        """float32 [B, T]; the trainer's log-prob of each token of the batch; 0 where nothing predicts a token."""
        with jax.set_mesh(self.mesh):
            return self._score_rows(params, {name: getattr(batch, name) for name in _FIELDS})

    def update(
        self,
        state: TrainState,
        batch: PackedBatch,
        plan: Plan,
        rng: np.random.Generator,
        *,
        ref_params: Any = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Takes the batch's optimiser steps. A batch without a token of non-zero weight takes none.

        Args:
          state: donated.
          plan: how many steps.
          rng: draws the mini-batches; untouched with one.
          ref_params: parameters of the reference policy, for losses with a KL term.

        Returns:
          The new state and metrics under `train/`: `loss`, `grad_norm`, `update_norm` (means over optimiser steps),
          `param_norm`, `entropy`, `logprob_gap_mean`, `_p99` (99th percentile) and `_max` (|trainer - engine| in nats
          before the first step changes anything, over that step's trained tokens), what the loss reports, `kl_after`
          if the plan asks for it, `tokens`, `rows`, `fill_ratio`, `optimizer_steps`. Means are over trained tokens
          (weight != 0).

        Raises FloatingPointError if the gradient is not finite; the state is lost then.
        """
        plan.validate()
        rows = rows_lib.filled_rows(batch, _FIELDS)
        tokens, count = int(np.count_nonzero(rows["weight"])), rows["token"].shape[0]
        fixed = {"train/tokens": tokens, "train/rows": count, "train/fill_ratio": pack.fill_ratio(batch)}
        if tokens == 0:
            return state, fixed | {"train/optimizer_steps": 0}
        steps, first_gaps = [], []
        with jax.set_mesh(self.mesh):
            if self._rescore:
                rows["old_logprob"] = self._score_rows(state.params, rows)
            if ref_params is not None:
                rows["ref_logprob"] = self._score_rows(ref_params, rows)
            for _ in range(plan.epochs):
                parts = rows_lib.mini_batches(count, plan.mini_batches, rng)
                for part in parts:
                    state, report, gaps = self._step(state, rows_lib.take(rows, part), scale=len(parts))
                    first_gaps = first_gaps or gaps
                    steps.append(report)
            measured = _summary(jax.device_get(steps)) | _gap_statistics(jax.device_get(first_gaps))
            if plan.measure_kl:
                measured["kl_after"] = _mean_k3(self._score_rows(state.params, rows), rows)
        return state, fixed | {f"train/{name}": value for name, value in measured.items()}

    def _step(
        self, state: TrainState, rows: rows_lib.Rows, *, scale: int
    ) -> tuple[TrainState, dict[str, Any], list[tuple[np.ndarray, jax.Array]]]:
        grads, micro, gaps = self._zeros(), [], []
        for group in rows_lib.micro_batches(rows, self._micro_rows):
            placed = sharding.put_rows(self.mesh, group)
            grads, sums, gap_BT = self._accumulate(state.params, self._frozen, grads, placed, np.float32(scale))
            micro.append(sums)
            gaps.append((group["weight"] != 0, gap_BT))
        state, norms = self._apply(state, grads)
        return state, {"micro": micro, "norms": norms}, gaps

    def _score_rows(self, params: Any, rows: rows_lib.Rows) -> np.ndarray:
        needed = {name: rows[name] for name in ("token", "pos", "prev", "end")}
        groups = rows_lib.micro_batches(needed, self._micro_rows)
        scores = [self._score(params, self._frozen, sharding.put_rows(self.mesh, group)) for group in groups]
        return np.concatenate(jax.device_get(scores))[: rows["token"].shape[0]]

    def _forward(self, params: Any, frozen: Any, rows: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lora = None
        if self._lora is not None:
            params, lora = frozen, adapters.collection(self._lora, params)
        return row_logprobs(self.model, params, rows, temperature=self._temperature, chunk=self._chunk, lora=lora)

    def _merge_fn(self, params, frozen):
        return adapters.merge(self.model, self._lora, frozen, params)

    def _score_fn(self, params, frozen, rows):
        logprob_BT, _ = self._forward(params, frozen, rows)
        return jnp.where(rows["prev"] >= 0, logprob_BT, 0.0)

    def _accumulate_fn(self, params, frozen, grads, rows, scale):
        names = [name for name in ("ref_logprob",) if name in rows] + ["behaviour_logprob"] * self._rescore
        trained_BT = rows["weight"] != 0

        def scaled_loss(params):
            logprob_BT, entropy_BT = self._forward(params, frozen, rows)
            old = (rows["old_logprob"], rows["adv_pos"], rows["adv_neg"], rows["weight"])
            loss, pairs = self._loss(logprob_BT, *old, **{name: rows[name] for name in names})
            count = jnp.sum(trained_BT, dtype=jnp.float32)
            pairs = pairs | {"entropy": (jnp.sum(jnp.where(trained_BT, entropy_BT, 0.0)), count)}
            return loss * scale, (pairs, jnp.abs(logprob_BT - rows["behaviour_logprob"]))

        (loss, (pairs, gap_BT)), fresh = jax.value_and_grad(scaled_loss, has_aux=True)(params)
        return jax.tree.map(jnp.add, grads, fresh), {"pairs": pairs, "loss": loss}, gap_BT

    def _apply_fn(self, state, grads):
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        trees = {"grad_norm": grads, "update_norm": updates, "param_norm": params}
        norms = {name: optax.tree.norm(tree) for name, tree in trees.items()}
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), norms


def _summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Means over optimiser steps and over the tokens of all micro-batches. Raises FloatingPointError: see `update`."""
    norms = [step["norms"] for step in steps]
    for i, norm in enumerate(norms):
        if not np.isfinite(norm["grad_norm"]):
            raise FloatingPointError(
                f"policy update: the gradient's norm is {norm['grad_norm']} at step {i + 1} of {len(steps)} of this "
                "batch; resume from the last checkpoint with a smaller learning rate"
            )
    micro = [sums for step in steps for sums in step["micro"]]
    result = {
        "loss": sum(float(sums["loss"]) for sums in micro) / len(steps),
        "grad_norm": float(np.mean([norm["grad_norm"] for norm in norms])),
        "update_norm": float(np.mean([norm["update_norm"] for norm in norms])),
        "param_norm": float(norms[-1]["param_norm"]),
        "optimizer_steps": len(steps),
    }
    return result | {name: _ratio([sums["pairs"][name] for sums in micro]) for name in micro[0]["pairs"]}


def _gap_statistics(gaps: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Mean, 99th percentile (linear between neighbours) and maximum of the gaps [B, T] at the tokens of their masks."""
    gap = np.concatenate([gap_BT[trained_BT] for trained_BT, gap_BT in gaps]).astype(np.float64)
    if not gap.size:  # a mini-batch of rows without a trained token
        return {"logprob_gap_mean": 0.0, "logprob_gap_p99": 0.0, "logprob_gap_max": 0.0}
    statistics = {"mean": np.mean(gap), "p99": np.percentile(gap, 99), "max": np.max(gap)}
    return {f"logprob_gap_{name}": float(value) for name, value in statistics.items()}


def _ratio(pairs: list[tuple[Any, Any]]) -> float:
    return float(sum(float(total) for total, _ in pairs) / max(sum(float(weight) for _, weight in pairs), 1.0))


def _mean_k3(logprob_BT: np.ndarray, rows: rows_lib.Rows) -> float:
    """k3 estimate of KL(old || new) over trained tokens, in nats: mean of exp(d) - 1 - d with d = new - old."""
    trained = rows["weight"] != 0
    d = (logprob_BT - rows["old_logprob"])[trained].astype(np.float64)
    return float(np.mean(np.expm1(d) - d))
