"""The predictor's jitted functions: scores of packed histories, and its fit (paper Eq. 19)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trace_jax.models.predictor import PredictorModel
from trace_jax.train import rows as rows_lib
from trace_jax.train import sharding
from trace_jax.train import state as state_lib
from trace_jax.train.replay import Examples
from trace_jax.train.state import TrainState
from trace_jax.tree import prefix_rows

# (logit, target, weight) -> (weighted sum, total weight); see `objectives.value`
Loss = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
Weighting = Callable[[np.ndarray], np.ndarray]  # leaf counts [n] -> weights [n]; see `train.replay`

_SCORED = ("token", "pos", "end")
_FITTED = (*_SCORED, "value_target", "value_weight")


class PredictorTrainer:
    """Scores and fits one predictor with rows of one static shape. States that go in are donated."""

    def __init__(
        self,
        model: PredictorModel,
        optimizer: optax.GradientTransformation,
        loss: Loss,
        weighting: Weighting,
        mesh: Mesh,
        *,
        batch_rows: int,
        row_length: int,
    ):
        """Builds the functions; nothing is compiled yet.

        Args:
          loss, weighting: see above. The paper: squared error, equal weights.
          batch_rows: rows per forward pass and per optimiser step, a multiple of the mesh's data x fsdp.
          row_length: tokens per row; no history may be longer.
        """
        self.mesh, self.batch_rows, self.row_length = mesh, batch_rows, row_length
        self._model, self._optimizer, self._loss, self._weighting = model, optimizer, loss, weighting
        self.shardings = sharding.state_shardings(
            mesh, optimizer, jax.eval_shape(model.init, jax.random.key(0)), model.param_axes()
        )
        params, by_row = self.shardings.params, sharding.row_sharding(mesh)
        whole = NamedSharding(mesh, PartitionSpec())
        create = lambda params: state_lib.create(params, optimizer)
        self._init_params = jax.jit(model.init, out_shardings=params)
        self._init_optimizer = jax.jit(optimizer.init, out_shardings=self.shardings.opt_state)
        self._create = jax.jit(create, out_shardings=self.shardings)
        # None: the policy's parameters stay where the policy's trainer put them.
        self._score = jax.jit(self._score_fn, in_shardings=(params, None, by_row), out_shardings=whole)
        self._update = jax.jit(
            self._update_fn,
            in_shardings=(self.shardings, None, by_row),
            out_shardings=(self.shardings, whole),
            donate_argnums=0,
        )

    def init(self, key: jax.Array) -> TrainState:
        """A fresh state from a random key."""
        with jax.set_mesh(self.mesh):
            return self._create(self._init_params(key))

    def adopt(self, backbone: Any, key: jax.Array) -> TrainState:
        """A fresh state around the parameters of a pretrained decoder, with an untrained read-out.

        No random backbone is made and none is copied: arrays that already lie where `shardings.params` says become part
        of the state, so the next update donates them.

        Args:
          backbone: float32 parameters as the model's decoder has them; arrays of the host or of devices.
          key: of the read-out.

        Raises ValueError for a model without a backbone of its own, and for parameters of another form.
        """
        if self._model.around is None:
            raise ValueError("this predictor reads the policy's states and has no backbone that could adopt parameters")
        params = self._model.around(backbone, key)
        found, expected = _forms(params), _forms(jax.eval_shape(self._model.init, key))
        for name in sorted(set(found) | set(expected)):
            if found.get(name) != expected.get(name):
                raise ValueError(
                    f"predictor: parameter {name} is {found.get(name, 'absent')} in the pretrained backbone, "
                    f"{expected.get(name, 'absent')} in the model; config and weights must belong together"
                )
        with jax.set_mesh(self.mesh):
            params = jax.device_put(params, self.shardings.params)
            step = jax.device_put(np.zeros((), np.int32), self.shardings.step)
            return TrainState(params=params, opt_state=self._init_optimizer(params), step=step)

    def abstract_state(self) -> TrainState:
        """The state's shapes, dtypes and shardings: the template of a restore."""
        shapes = jax.eval_shape(self._create, jax.eval_shape(self._init_params, jax.random.key(0)))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    def compiles(self) -> dict[str, int]:
        """Compiled variants of each jitted function; more than 1 means that a shape changed."""
        return {"score": self._score._cache_size(), "update": self._update._cache_size()}

    def score(self, params: Any, policy_params: Any, rows: rows_lib.Rows) -> np.ndarray:
        """float32 [b, T], of S members [S, b, T]: success probabilities of the history that ends at each token.

        Every forward pass has `batch_rows` rows, so the bits of a row depend on that row alone.

        Args:
          rows: `token`, `pos`, `end`, int32 [b, row_length].
        """
        with jax.set_mesh(self.mesh):
            groups = rows_lib.micro_batches({name: rows[name] for name in _SCORED}, self.batch_rows)
            scores = [self._score(params, policy_params, sharding.put_rows(self.mesh, group)) for group in groups]
            return np.concatenate(jax.device_get(scores), axis=-2)[..., : rows["token"].shape[0], :]

    def fit(
        self, state: TrainState, policy_params: Any, examples: Examples, rng: np.random.Generator, *, epochs: int
    ) -> tuple[TrainState, dict[str, float]]:
        """`epochs` passes over the examples, shuffled and packed anew each time; one optimiser step per batch of rows.

        A step's loss is the mean over the batch's examples, each of weight `weighting(count)` x `Examples.weight`. What
        histories have in common is computed once per row (`tree.prefix_rows`): all turns of a rollout cost no more than
        its longest history. Equal histories in a row count as one, with their mean target and their weights' sum,
        which changes no gradient. With members it is the mean of their losses, each on all the examples.

        Args:
          state: donated.
          rng: what is packed together, and in which order.

        Returns:
          The new state and metrics under `predictor/`: `loss` (over all batches, each before its own step),
          `grad_norm`, `update_norm` (means), `examples`, `prefix_share`, `optimizer_steps`. Without examples nothing
          happens.
        """
        batches = itertools.chain.from_iterable(self._epoch(examples, rng) for _ in range(epochs))
        return self._run(state, policy_params, examples, batches)

    def fit_steps(
        self, state: TrainState, policy_params: Any, examples: Examples, rng: np.random.Generator, *, steps: int
    ) -> tuple[TrainState, dict[str, float]]:
        """As `fit`, for `steps` optimiser steps, over the examples as often as that takes: a warm-up (our option)."""
        passes = itertools.repeat(None) if examples.size else ()
        batches = itertools.chain.from_iterable(self._epoch(examples, rng) for _ in passes)
        return self._run(state, policy_params, examples, itertools.islice(batches, steps))

    def _epoch(self, examples: Examples, rng: np.random.Generator) -> Iterator[rows_lib.Rows]:
        """Batches of at most `batch_rows` rows that cover the examples once; their sizes differ by at most one row.

        Nested histories share a row's tokens, so a row holds more examples, and weight, the more of them are nested.
        """
        if not examples.size:
            return
        packed = prefix_rows.pack_shared(examples.prefixes, row_length=self.row_length, rng=rng)
        weight = self._weighting(examples.count) * examples.weight
        batch = prefix_rows.with_targets(*packed, examples.target, weight)
        rows = rows_lib.filled_rows(batch, _FITTED)
        count = rows["token"].shape[0]
        for part in np.array_split(rng.permutation(count), -(-count // self.batch_rows)):
            yield rows_lib.pad_rows(rows_lib.take(rows, part), self.batch_rows)

    def _run(
        self, state: TrainState, policy_params: Any, examples: Examples, batches: Iterator[rows_lib.Rows]
    ) -> tuple[TrainState, dict[str, float]]:
        reports = []
        with jax.set_mesh(self.mesh):
            for rows in batches:
                state, report = self._update(state, policy_params, sharding.put_rows(self.mesh, rows))
                reports.append(report)
        reports = jax.device_get(reports)
        fixed = {"examples": examples.size, "prefix_share": examples.prefix_share, "optimizer_steps": len(reports)}
        if reports:
            total = sum(float(report["loss_sum"]) for report in reports)
            fixed["loss"] = total / sum(float(report["weight"]) for report in reports)
            for name in ("grad_norm", "update_norm"):
                fixed[name] = float(np.mean([report[name] for report in reports]))
            if not np.isfinite(fixed["grad_norm"]):
                raise FloatingPointError(
                    f"predictor update: the gradient's norm is {fixed['grad_norm']} within {len(reports)} steps; "
                    "resume from the last checkpoint with a smaller learning rate"
                )
        return state, {f"predictor/{name}": value for name, value in fixed.items()}

    def _score_fn(self, params, policy_params, rows):
        return jax.nn.sigmoid(self._model.logits(params, policy_params, rows["token"], rows["pos"], rows["end"]))

    def _loss_sum(self, logit, target_BT, weight_BT):
        """(weighted sum, total weight) of logits [B, T]; of S members, [S, B, T], the mean of their sums."""
        if logit.ndim == target_BT.ndim:
            return self._loss(logit, target_BT, weight_BT)
        total_S, weight_S = jax.vmap(self._loss, in_axes=(0, None, None))(logit, target_BT, weight_BT)
        return total_S.mean(), weight_S[0]

    def _update_fn(self, state, policy_params, rows):
        def mean_loss(params):
            logit = self._model.logits(params, policy_params, rows["token"], rows["pos"], rows["end"])
            total, weight = self._loss_sum(logit, rows["value_target"], rows["value_weight"])
            return total / weight, (total, weight)

        (_, (total, weight)), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        report = {
            "loss_sum": total,
            "weight": weight,
            "grad_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), report


def _forms(params: Any) -> dict[str, str]:
    """Name of each parameter -> its dtype and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): f"{leaf.dtype} {tuple(leaf.shape)}" for path, leaf in leaves}
