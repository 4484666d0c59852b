"""The learned predictor as the rollout layer calls it, and how good its scores turned out to be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trace_jax.objectives import calibration
from trace_jax.train import rows as rows_lib
from trace_jax.train.history_view import HistoryView
from trace_jax.train.predictor_step import PredictorTrainer
from trace_jax.tree import backup, prefix_rows, query
from trace_jax.tree.failed import without_failed
from trace_jax.types import NodeKind, Prompt, RolloutTree, Stage

_Histories = Callable[[], list[np.ndarray]]  # made off the event loop: another tokenizer takes its time
_Packed = tuple[rows_lib.Rows, np.ndarray, np.ndarray]  # rows, and where in them each history ends: row [n], column [n]
_Map = Callable[[np.ndarray], np.ndarray]
_DEEPEST = 4  # metrics by depth: this depth and all below it are one


class LearnedPredictor:
    """`rollout.collect.Predictor` on a `PredictorTrainer`.

    Calls that wait at the same moment share forward passes. A call's histories are packed into rows of their own, where
    what they have in common is computed once (`tree.prefix_rows`), and every pass has the same number of rows: so a
    score does not depend on what else was asked for, or when.

    A predictor of S members (or S draws of its parameters) is one whose `trainer.score` returns [S, b, T].
    """

    def __init__(self, trainer: PredictorTrainer, view: HistoryView, *, draws: bool = False):
        """Scores nothing until `set_params` was called.

        Args:
          trainer: scores rows.
          view: what the predictor reads of a history.
          draws: whether each member's score is returned, [S, n] (S is 1 for a predictor without members, and where
            nothing is asked for), instead of their mean, [n].

        Raises ValueError for views longer than the trainer's rows.
        """
        if view.max_tokens > trainer.row_length:
            raise ValueError(
                f"the predictor's view has up to {view.max_tokens} tokens, but its rows hold {trainer.row_length}; "
                "lengthen the rows"
            )
        self.view = view
        self._trainer = trainer
        self._draws = draws
        self._params: tuple[Any, Any, _Map | None] | None = None  # one value: a pass reads it on another thread
        self._queue: list[tuple[_Histories, asyncio.Future]] = []
        self._worker: asyncio.Task | None = None

    def set_params(self, params: Any, policy_params: Any, recalibrate: _Map | None = None) -> None:
        """Takes the predictor's parameters, the policy's (None for a critic), and a map of the scores.

        No copy is made: call it again after each update that donates the state they came from.

        Args:
          params, policy_params: as `trainer.score` takes them.
          recalibrate: from raw to calibrated probabilities, float64 of any shape (`objectives.recalibration`); None
            leaves scores as they are. It is applied to the mean of the members, or with `draws` to each of them.
        """
        self._params = (params, policy_params, recalibrate)

    def raw(self, params: Any, policy_params: Any, histories: Sequence[np.ndarray]) -> np.ndarray:
        """float64 [n]: the mean over members, not recalibrated, at the end of each history (a view of it)."""
        if not histories:
            return np.zeros(0)
        batch, row, col = prefix_rows.pack_shared(histories, row_length=self._trainer.row_length)
        score = self._trainer.score(params, policy_params, rows_lib.filled_rows(batch, ("token", "pos", "end")))
        return np.atleast_2d(score[..., row, col].astype(np.float64)).mean(axis=0)

    async def score_prompts(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B], or with `draws` [S, B]: the predicted success rate of each prompt.

        Raises ValueError as `HistoryView.of_prompts`.
        """
        return await self._score(len(prompts), lambda: self.view.of_prompts(prompts))

    async def score_anchors(self, tree: RolloutTree, anchors: np.ndarray) -> np.ndarray:
        """float64 [A], or with `draws` [S, A]: the predicted success rate from each anchor (node ids of `tree`).

        Raises ValueError as `HistoryView.of_nodes`.
        """
        return await self._score(len(anchors), lambda: self.view.of_nodes(tree, anchors))

    async def _score(self, count: int, histories: _Histories) -> np.ndarray:
        if not count:
            return np.zeros((1, 0) if self._draws else 0)
        future = asyncio.get_running_loop().create_future()
        self._queue.append((histories, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        """Takes all that waits, scores it off the event loop, hands it out; until nothing waits."""
        while self._queue:
            await asyncio.sleep(0)  # the calls of this moment arrive first
            calls, self._queue = self._queue, []
            answers = await asyncio.to_thread(self._answers, [histories for histories, _ in calls])
            for (_, future), answer in zip(calls, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _answers(self, calls: list[_Histories]) -> list[np.ndarray | Exception]:
        """The scores that each call asked for, or what is wrong with its histories, or with the pass."""
        answers: list[Any] = []
        for histories in calls:
            try:
                batch, row, col = prefix_rows.pack_shared(histories(), row_length=self._trainer.row_length)
                answers.append((rows_lib.filled_rows(batch, ("token", "pos", "end")), row, col))
            except Exception as error:  # concerns this call alone; raised where it was made
                answers.append(error)
        packed = [i for i, answer in enumerate(answers) if not isinstance(answer, Exception)]
        try:
            scores = self._forward([answers[i] for i in packed])
        except Exception as error:  # every caller of this pass must hear of it, or it would wait for ever
            for i in packed:
                answers[i] = RuntimeError(f"the predictor could not score: {error!r}")
            return answers
        for i, score in zip(packed, scores, strict=True):
            answers[i] = score
        return answers

    def _forward(self, calls: list[_Packed]) -> list[np.ndarray]:
        """The finished scores of each call, all from one pass."""
        if not calls:
            return []
        if self._params is None:
            raise RuntimeError("no parameters; call set_params first")
        params, policy_params, recalibrate = self._params
        joined = {name: np.concatenate([rows[name] for rows, _, _ in calls]) for name in calls[0][0]}
        ends = np.cumsum([rows["token"].shape[0] for rows, _, _ in calls])
        score_bT = np.split(self._trainer.score(params, policy_params, joined), ends[:-1], axis=-2)
        picked = [score[..., row, col] for score, (_, row, col) in zip(score_bT, calls, strict=True)]
        finished = [self._members(score.astype(np.float64)) for score in picked]
        return finished if recalibrate is None else [recalibrate(score) for score in finished]

    def _members(self, score: np.ndarray) -> np.ndarray:
        """[n] or [S, n] to what was asked for: [S, n] with `draws`, else [n]."""
        if self._draws:
            return np.atleast_2d(score)
        return score if score.ndim == 1 else score.mean(axis=0)


def allocation_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """How good the scores were that the allocator saw (`tree.value`), under `predictor/`. NaN where none was asked for.

    `spearman_prompt`, `spearman_prefix`: rank correlation (Eq. 22) of score and backed-up success (Eq. 18), over the
    roots of active prompts and over their anchors. `brier`, `ece`: scores of roots against the 0/1 success of each of
    their bare rollouts; continuations are left out, since they start where the allocator expected a surprise. Rollouts
    that the engine gave up on are left out everywhere.

    The rest is ours and knows fresh outcomes only: of bare rollouts for a root, for an anchor of the continuations that
    start exactly there. Given the anchor they do not depend on why it was chosen (which anchors were, does: these are
    figures of the chosen ones). `brier_prefix`: anchors' scores against each such outcome. `bias_depth_D` = mean score
    - mean outcome and `mse_depth_D` = mean squared distance, for D = 0 (roots) to 4 (anchors after four turns or more);
    every outcome weighs the same.
    """
    prompt, prefix, outcome, fresh = [], [], [], []
    for tree in map(without_failed, trees):
        if tree.num_nodes == 1:
            continue
        target = backup.leaf_mean(tree, tree.success)
        scored = np.isfinite(tree.value)
        anchors = query.anchors(tree)
        anchors = anchors[scored[anchors]]
        prefix.append(np.stack([tree.value[anchors], target[anchors]]))
        fresh.append(_fresh(tree))
        if scored[0]:
            bare = tree.success[(tree.kind == NodeKind.LEAF) & (tree.stage == Stage.ROOT_ROLLOUT)]
            prompt.append(np.array([[tree.value[0]], [target[0]]]))
            outcome.append(np.stack([np.full(bare.shape, tree.value[0]), bare]))
    empty = np.zeros((2, 0))
    prompt, prefix, outcome = (np.concatenate([empty, *pairs], axis=1) for pairs in (prompt, prefix, outcome))
    return {
        "predictor/spearman_prompt": calibration.spearman(*prompt),
        "predictor/spearman_prefix": calibration.spearman(*prefix),
        "predictor/brier": calibration.brier(*outcome),
        "predictor/ece": calibration.ece(*outcome),
        **_by_depth(*np.concatenate([np.zeros((3, 0)), *fresh], axis=1)),
    }


def _fresh(tree: RolloutTree) -> np.ndarray:
    """float64 [3, n]: depth, score, 0/1 success, for each rollout that starts at a scored root or anchor."""
    start = tree.parent.tolist()  # of the rollout that each node belongs to; a bare one starts at the root
    for node in range(1, tree.num_nodes):
        if tree.stage[node] == tree.stage[start[node]]:  # not the rollout's first turn
            start[node] = start[start[node]]
    leaf = query.leaves(tree)
    at = np.array(start)[leaf]
    rollouts = np.stack([query.depth(tree)[at], tree.value[at], tree.success[leaf]]).astype(np.float64)
    return rollouts[:, np.isfinite(rollouts[1])]


def _by_depth(depth: np.ndarray, score: np.ndarray, success: np.ndarray) -> dict[str, float]:
    report = {"predictor/brier_prefix": calibration.brier(score[depth > 0], success[depth > 0])}
    pooled = np.minimum(depth, _DEEPEST)
    for d in range(_DEEPEST + 1):
        p, y = score[pooled == d], success[pooled == d]
        report[f"predictor/bias_depth_{d}"] = float(np.mean(p - y)) if p.size else float("nan")
        report[f"predictor/mse_depth_{d}"] = calibration.brier(p, y)
    return report
