"""A last-layer Bayesian predictor: logistic regression on fixed features, its belief carried from step to step (ours).

The paper's critic is fitted by gradient steps and forgets what it is not shown. Here the only parameters are the
weights w of a logistic regression on the policy's states (`models.state_features`), with a Gaussian belief
N(mean, precision^-1) about them (Laplace, as in MacKay 1992; step by step, as in Spiegelhalter and Lauritzen 1990):

    prior      P = f precision + (1 - f) P_0,   P mean_P = f precision mean,   f: how much is remembered
    mean'      argmax_w  sum_i n_i [y_i log s(w.x_i) + (1 - y_i) log s(-w.x_i)] - (w - mean_P)' P (w - mean_P) / 2
    precision' P + sum_i n_i s_i (1 - s_i) x_i x_i'   at mean'

with s the sigmoid, y_i the mean outcome of a history and n_i its count times its weight. P_0 is diagonal. What is
forgotten goes back to the prior N(0, P_0^-1), so the belief about what is no longer seen widens.

A state's params, float32, for F features and the constant 1: `mean` [F + 1], `factor` and `spread` [F + 1, F + 1] with
precision = factor factor' and precision^-1 = spread spread'. Factors, since a precision that grows for many steps and
is rounded to float32 each time is soon no longer positive definite.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import threadpoolctl
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy import linalg, special, stats

from trace_jax.models.state_features import Features
from trace_jax.train import rows as rows_lib
from trace_jax.train import sharding
from trace_jax.train.replay import Examples
from trace_jax.train.state import TrainState
from trace_jax.train.state_record import StateRecord
from trace_jax.tree import prefix_rows

_SCORED = ("token", "pos", "end")
_BIAS_PRECISION = 1e-2  # of the constant feature: nothing is known beforehand of how often the policy succeeds
_TOLERANCE = 1e-6  # relative fall of the objective below which Newton's method has arrived
_HALVINGS = 30


class BayesianTrainer:
    """Scores and fits the belief; the interface of `predictor_step.PredictorTrainer`. States that go in are kept."""

    def __init__(
        self,
        features: Features,
        size: int,
        mesh: Mesh,
        *,
        prior_precision: float,
        remembered: float,
        draws: int,
        batch_rows: int,
        row_length: int,
    ):
        """Builds the functions; nothing is compiled yet.

        Args:
          features, size: of a history, as `state_features` makes them; a constant 1 is added.
          prior_precision: of each weight but the constant's, > 0. The logit of a history whose features have length l
            has the prior variance l^2 / prior_precision, and the constant's; `state_features` have l^2 = layers D.
          remembered: f in (0, 1]; 1 keeps everything.
          draws: S >= 1; above 1 a score is S draws of the belief, at the quantiles (s + 1/2) / S of its logit.
          batch_rows: rows per forward pass, a multiple of the mesh's data x fsdp.
          row_length: tokens per row; no history may be longer.

        Raises ValueError for a prior_precision, remembered or draws outside these limits.
        """
        if not prior_precision > 0 or not 0 < remembered <= 1 or draws < 1:
            raise ValueError(
                f"bayes: prior_precision {prior_precision}, remembered {remembered}, draws {draws}; they must be above "
                "0, in (0, 1], and at least 1"
            )
        self.mesh, self.batch_rows, self.row_length = mesh, batch_rows, row_length
        self._size, self._remembered = size + 1, remembered
        self._prior = np.full(self._size, prior_precision)
        self._prior[-1] = _BIAS_PRECISION
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._quantile_S = stats.norm.ppf((np.arange(draws) + 0.5) / draws).astype(np.float32) if draws > 1 else None
        by_row = sharding.row_sharding(mesh)
        self._features = features
        self._states = jax.jit(features, in_shardings=(None, by_row, by_row, by_row), out_shardings=self._whole)
        self._score = jax.jit(self._score_fn, in_shardings=(self._whole, None, by_row), out_shardings=self._whole)

    def init(self, key: jax.Array) -> TrainState:
        """The prior; nothing is drawn from the key."""
        del key
        return self._state(np.zeros(self._size), np.diag(self._prior), 0)

    def abstract_state(self) -> TrainState:
        """The state's shapes, dtypes and shardings: the template of a restore."""
        like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._whole)
        square = like(self._size, self._size)
        params = {"mean": like(self._size), "factor": square, "spread": square}
        return TrainState(params, (), jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole))

    def compiles(self) -> dict[str, int]:
        """Compiled variants of each jitted function; more than 1 means that a shape changed."""
        return {"score": self._score._cache_size(), "update": self._states._cache_size()}

    def score(self, params: Any, policy_params: Any, rows: rows_lib.Rows) -> np.ndarray:
        """float32 [b, T] success probabilities at the posterior mean, or [S, b, T], S draws; as `PredictorTrainer`'s.

        The mean of equally weighted draws is close to the posterior mean of the probability.
        """
        with jax.set_mesh(self.mesh):
            groups = rows_lib.micro_batches({name: rows[name] for name in _SCORED}, self.batch_rows)
            scores = [self._score(params, policy_params, sharding.put_rows(self.mesh, group)) for group in groups]
            return np.concatenate(jax.device_get(scores), axis=-2)[..., : rows["token"].shape[0], :]

    def probability(self, params: Any, features_nF: np.ndarray) -> np.ndarray:
        """float64 [n], or [S, n] of S draws: `score` of histories with these features, on the host."""
        x_nF = np.concatenate([features_nF, np.ones((features_nF.shape[0], 1))], axis=1)
        logit_n = x_nF @ np.asarray(params["mean"], np.float64)
        if self._quantile_S is None:
            return special.expit(logit_n)
        deviation_n = np.linalg.norm(x_nF @ np.asarray(params["spread"], np.float64), axis=1)
        return special.expit(logit_n + self._quantile_S[:, None].astype(np.float64) * deviation_n)

    def fit(
        self, state: TrainState, policy_params: Any, examples: Examples, rng: np.random.Generator, *, epochs: int
    ) -> tuple[TrainState, dict[str, float]]:
        """Takes in examples that were not seen before, by at most `epochs` of Newton's steps, each over all of them.

        `rng` is not used. Returns the new state and metrics under `predictor/`: `loss` (mean nats of an outcome before
        the fit), `grad_norm` (there), `update_norm` (change of the mean), `examples`, `prefix_share`,
        `optimizer_steps`. Without examples or steps nothing happens, and nothing is forgotten. Raises
        FloatingPointError for features or targets that are not finite.
        """
        return self._fit(state, policy_params, examples, epochs)

    def fit_steps(
        self, state: TrainState, policy_params: Any, examples: Examples, rng: np.random.Generator, *, steps: int
    ) -> tuple[TrainState, dict[str, float]]:
        """As `fit`, by at most `steps` of Newton's steps; it ends when it has arrived, after a handful."""
        return self._fit(state, policy_params, examples, steps)

    def _fit(
        self, state: TrainState, policy_params: Any, examples: Examples, steps: int
    ) -> tuple[TrainState, dict[str, float]]:
        report = {"examples": examples.size, "prefix_share": examples.prefix_share, "optimizer_steps": 0}
        if not examples.size or not steps:
            return state, {f"predictor/{name}": value for name, value in report.items()}
        x_nF = self._features_of(policy_params, examples)
        # Matrices of a few hundred rows gain nothing from more threads, and these wait for each other for seconds where
        # another process has one of the cores.
        with _blas().limit(limits=1, user_api="blas"):
            weight_n = (examples.count * examples.weight).astype(np.float64)
            old = {name: np.asarray(jax.device_get(value), np.float64) for name, value in state.params.items()}
            precision = old["factor"] @ old["factor"].T
            target_n = examples.target.astype(np.float64)
            belief = _Step(x_nF, target_n, weight_n, old["mean"], precision, self._prior, self._remembered)
            report |= belief.report(old["mean"])
            if not np.isfinite(report["grad_norm"]):
                raise FloatingPointError(
                    f"predictor update: the gradient's norm is {report['grad_norm']}; the policy's states or the "
                    "outcomes are not finite; resume from the last checkpoint with a smaller optimizer.learning_rate"
                )
            mean, report["optimizer_steps"] = belief.solve(old["mean"], steps)
            report["update_norm"] = float(np.linalg.norm(mean - old["mean"]))
            state = self._state(mean, belief.precision(mean), int(state.step) + 1)
        return state, {f"predictor/{name}": value for name, value in report.items()}

    def _features_of(self, policy_params: Any, examples: Examples) -> np.ndarray:
        """float64 [n, F + 1]: features at the end of each history, and a constant 1.

        From a `StateRecord` in place of the policy's parameters without a forward pass.
        """
        if isinstance(policy_params, StateRecord):
            return np.concatenate([policy_params.of(examples.prefixes), np.ones((examples.size, 1))], axis=1)
        batch, row, col = prefix_rows.pack_shared(examples.prefixes, row_length=self.row_length)
        rows = rows_lib.filled_rows(batch, _SCORED)
        found = np.ones((examples.size, self._size))
        with jax.set_mesh(self.mesh):
            for i, group in enumerate(rows_lib.micro_batches(rows, self.batch_rows)):
                group = sharding.put_rows(self.mesh, group)
                states_bTF = self._states(policy_params, *(group[name] for name in _SCORED))
                here = np.flatnonzero(row // self.batch_rows == i)
                found[here, :-1] = jax.device_get(states_bTF)[row[here] % self.batch_rows, col[here]]
        return found

    def _state(self, mean: np.ndarray, precision: np.ndarray, step: int) -> TrainState:
        """The belief on devices."""
        factor = linalg.cholesky(precision, lower=True)
        spread = linalg.lapack.dtrtri(factor, lower=1)[0].T
        put = lambda value: jax.device_put(np.asarray(value, np.float32), self._whole)
        params = {"mean": put(mean), "factor": put(factor), "spread": put(spread)}
        return TrainState(params, (), jax.device_put(np.asarray(step, np.int32), self._whole))

    def _score_fn(self, params, policy_params, rows):
        states_bTF = self._features(policy_params, rows["token"], rows["pos"], rows["end"])
        logit_bT = states_bTF @ params["mean"][:-1] + params["mean"][-1]
        if self._quantile_S is None:
            return jax.nn.sigmoid(logit_bT)
        turned_bTF = states_bTF @ params["spread"][:-1] + params["spread"][None, None, -1]
        deviation_bT = jnp.sqrt(jnp.sum(jnp.square(turned_bTF), axis=-1))
        return jax.nn.sigmoid(logit_bT[None] + self._quantile_S[:, None, None] * deviation_bT[None])


@functools.cache
def _blas() -> threadpoolctl.ThreadpoolController:
    """Of the libraries that the imports above have loaded; to find them takes as long as a Newton step."""
    return threadpoolctl.ThreadpoolController()


class _Step:
    """The objective of one step, to be minimised: negative log-likelihood plus the prior's square, in float64.

    The square is taken from the old mean, as d' P d / 2 + d' (1 - f) P_0 mean with d = w - mean, which is the same up
    to a constant and needs no mean_P.
    """

    def __init__(
        self,
        x_nF: np.ndarray,
        y_n: np.ndarray,
        n_n: np.ndarray,
        mean_F: np.ndarray,
        precision_FF: np.ndarray,
        prior_F: np.ndarray,
        remembered: float,
    ):
        self._x, self._y, self._n, self._mean = x_nF, y_n, n_n, mean_F
        self._prior = remembered * precision_FF  # P
        self._prior[np.diag_indices_from(self._prior)] += (1 - remembered) * prior_F
        self._pull = (1 - remembered) * prior_F * mean_F

    def objective(self, w: np.ndarray) -> float:
        off = w - self._mean
        return self._nats(w) + float(off @ self._prior @ off) / 2 + float(off @ self._pull)

    def solve(self, w: np.ndarray, steps: int) -> tuple[np.ndarray, int]:
        """(weights, Newton's steps taken): each step is halved until it lowers the objective."""
        best = self.objective(w)
        for taken in range(steps):
            step = linalg.cho_solve(linalg.cho_factor(self.precision(w)), self._gradient(w))
            for halving in range(_HALVINGS):
                tried = w - step * 0.5**halving
                if (lower := self.objective(tried)) < best:
                    break
            else:  # rounding alone is left
                return w, taken
            w, fall, best = tried, best - lower, lower
            if fall < _TOLERANCE * (1 + abs(best)):
                return w, taken + 1
        return w, steps

    def precision(self, w: np.ndarray) -> np.ndarray:
        s = special.expit(self._x @ w)
        weighted_nF = self._x * np.sqrt(self._n * s * (1 - s))[:, None]
        return weighted_nF.T @ weighted_nF + self._prior  # a matrix by its own transpose: half of the products

    def report(self, w: np.ndarray) -> dict[str, float]:
        return {
            "loss": self._nats(w) / float(self._n.sum()),
            "grad_norm": float(np.linalg.norm(self._gradient(w))),
        }

    def _nats(self, w: np.ndarray) -> float:
        z = self._x @ w
        return -float(np.sum(self._n * (self._y * special.log_expit(z) + (1 - self._y) * special.log_expit(-z))))

    def _gradient(self, w: np.ndarray) -> np.ndarray:
        likelihood = self._x.T @ (self._n * (special.expit(self._x @ w) - self._y))
        return likelihood + self._prior @ (w - self._mean) + self._pull
