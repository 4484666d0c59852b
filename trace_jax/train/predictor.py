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
from trace_jax.types import NodeKind, Prompt, RolloutTree, Stage

_Histories = Callable[[], list[np.ndarray]]  # made off the event loop: another tokenizer takes its time


class LearnedPredictor:
    """`rollout.collect.Predictor` on a `PredictorTrainer`.

    Calls that wait at the same moment share forward passes. A call's histories are packed into rows of their own, where
    what they have in common is computed once (`tree.prefix_rows`), and every pass has the same number of rows: so a
    score does not depend on what else was asked for, or when.
    """

    def __init__(self, trainer: PredictorTrainer, view: HistoryView):
        """Scores nothing until `set_params` was called. Raises ValueError for views longer than the trainer's rows."""
        if view.max_tokens > trainer.row_length:
            raise ValueError(
                f"the predictor's view has up to {view.max_tokens} tokens, but its rows hold {trainer.row_length}; "
                "lengthen the rows"
            )
        self.view = view
        self._trainer = trainer
        self._params: tuple[Any, Any] | None = None
        self._queue: list[tuple[_Histories, asyncio.Future]] = []
        self._worker: asyncio.Task | None = None

    def set_params(self, params: Any, policy_params: Any) -> None:
        """Takes the predictor's parameters and the policy's (None for a critic).

        No copy is made: call it again after each update that donates the state they came from.
        """
        self._params = (params, policy_params)

    async def score_prompts(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B]: the predicted success rate of each prompt. Raises ValueError as `HistoryView.of_prompts`."""
        return await self._score(len(prompts), lambda: self.view.of_prompts(prompts))

    async def score_anchors(self, tree: RolloutTree, anchors: np.ndarray) -> np.ndarray:
        """float64 [A]: the predicted success rate from each anchor (node ids of `tree`).

        Raises ValueError as `HistoryView.of_nodes`.
        """
        return await self._score(len(anchors), lambda: self.view.of_nodes(tree, anchors))

    async def _score(self, count: int, histories: _Histories) -> np.ndarray:
        if not count:
            return np.zeros(0)
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
            scores = self._forward([answers[i][0] for i in packed])
        except Exception as error:  # every caller of this pass must hear of it, or it would wait for ever
            for i in packed:
                answers[i] = RuntimeError(f"the predictor could not score: {error!r}")
            return answers
        for i, score in zip(packed, scores, strict=True):
            _, row, col = answers[i]
            answers[i] = score[row, col].astype(np.float64)
        return answers

    def _forward(self, calls: list[rows_lib.Rows]) -> list[np.ndarray]:
        if not calls:
            return []
        if self._params is None:
            raise RuntimeError("no parameters; call set_params first")
        joined = {name: np.concatenate([rows[name] for rows in calls]) for name in calls[0]}
        ends = np.cumsum([rows["token"].shape[0] for rows in calls])
        return np.split(self._trainer.score(*self._params, joined), ends[:-1])


def allocation_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """How good the scores were that the allocator saw (`tree.value`), under `predictor/`. NaN where none was asked for.

    `spearman_prompt`, `spearman_prefix`: rank correlation (Eq. 22) of score and backed-up success (Eq. 18), over the
    roots of active prompts and over their anchors. `brier`, `ece`: scores of roots against the 0/1 success of each of
    their bare rollouts; continuations are left out, since they start where the allocator expected a surprise.
    """
    prompt, prefix, outcome = [], [], []
    for tree in trees:
        target = backup.leaf_mean(tree, tree.success)
        scored = np.isfinite(tree.value)
        anchors = query.anchors(tree)
        anchors = anchors[scored[anchors]]
        prefix.append(np.stack([tree.value[anchors], target[anchors]]))
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
    }
