"""The settings of what the budget is, and of the predictor that says where it goes.

Their defaults are what did best of ours and the paper's on the small tasks (experiments/predictor); `PAPER_BUDGET` and
`PAPER_PREDICTOR` are the paper's choices where the two differ, for `config.budget.update(PAPER_BUDGET)`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BudgetConfig:
    """The rollout budget of a step. Units: a root rollout is 1, a continuation 1/2 (paper E.5)."""

    pool: int = 64  # B: candidate prompts drawn each step
    roots: int = 128  # M: root rollouts of TRACE; every strategy spends M (1 + N / 2) units
    continuations_per_root: int = 2  # N
    rollouts_per_prompt: int = 8  # G of the flat strategies
    roots_per_prompt: int = 4  # bare rollouts of a prompt of TreePO
    max_per_prompt: int | None = None  # cap on m_i; the paper has none
    min_per_prompt: int = 6  # least m_i of a prompt that is opened (ours); the paper has 2
    objective: str = "any_contrast"  # of stage 1 (budget/contrast.py): paper Eq. 12; "advantage_mass", "pairs" (ours)
    explore_share: float = 0.0  # of M, in pairs to prompts that the allocator would skip (ours; budget/explore.py)
    unit: str = "rollouts"  # or "tokens": M shrinks or grows so that the expected tokens of a step are `tokens`
    tokens: int = 0  # generated tokens of a step, for unit="tokens"


def explored_roots(budget: BudgetConfig) -> int:
    """How many of the M root rollouts explore: the nearest even number to M `explore_share` that leaves a group."""
    pairs = min(round(budget.roots * budget.explore_share / 2), (budget.roots - budget.min_per_prompt) // 2)
    return 2 * max(pairs, 0)


@dataclasses.dataclass(frozen=True)
class PredictorConfig:
    """The success predictor (paper section 4.3, E.6)."""

    # "critic": a model of its own (paper); "policy_head": on the policy's states (ours); "both": on the states of the
    # critic and the policy (ours); "bayes": a Bayesian read-out of the policy's layers (ours; train/bayes_step.py);
    # "oracle": many extra rollouts in place of a model, the upper control.
    kind: str = "bayes"
    state_layers: int = 3  # of kind="bayes": layers of the policy that it reads
    feature_size: int = 384  # of kind="bayes": at most so many numbers of them (models/state_features.py)
    prior_precision: float = 3.0  # of kind="bayes"
    frozen_states: bool = False  # read the states of the policy before training, not the present one's (ours)
    members: int = 1  # of an ensemble of read-outs (ours; models/predictor.py); draws of the belief of kind="bayes"
    expected: bool = False  # allocate by the mean of V_root over the members, not by V_root of their mean (ours)
    shuffle: bool = False  # the lower control: every score goes to another prompt or anchor
    path: str | None = None  # folder of the critic's weights and tokenizer (paper: Qwen3-0.6B); None: from scratch
    max_tokens: int | None = None  # that it reads of a history (train/history_view.py); None: loss.row_length
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    mlp_size: int = 192  # also the hidden layer of kind="policy_head"
    learning_rate: float = 3e-5
    epochs: int = 2  # passes over the examples; Newton's steps of kind="bayes"
    batch_rows: int = 4  # packed rows of one optimiser step
    prefix_share: float = 0.9  # of the examples; the others are roots. The paper's is 0.06
    loss: str = "bce"  # or "mse" (paper Eq. 19)
    weighting: str = "count"  # or "equal" (paper): an example weighs as many as its outcomes, or as any other
    targets: str = "direct"  # or "bare" (ours), "backed_up" (paper Eq. 18; tree/targets.py)
    replay_steps: int = 1  # steps whose examples are fitted, the warm-up is one of them; 1 is the current step only
    replay_decay: float = 0.99  # what is k steps old weighs decay^k, also in the belief of kind="bayes"
    update_steps: int | None = None  # optimiser steps after each step; None: `epochs` passes over the window
    calibration: str = "none"  # "temperature", "isotonic": a map of a critic's scores, fitted to roots held back
    held_share: float = 0.0  # of a step's prompts, held back from the fit for the calibration
    warmup_prompts: int = 128  # rolled out before the first step, outside the budget; the paper has none
    warmup_rollouts: int = 8  # rollouts of each of them
    warmup_steps: int = 200  # optimiser steps on them
    oracle_rollouts: int = 16  # extra rollouts per prompt of kind="oracle", outside the budget
    oracle_continuations: int = 4  # extra continuations per anchor


PAPER_BUDGET = {"max_per_prompt": None, "min_per_prompt": 2, "objective": "any_contrast", "explore_share": 0.0}
# A critic, fitted to backed-up success of the step's roots and a few prefixes, by squared error, without a warm-up.
PAPER_PREDICTOR = {
    "kind": "critic",
    "frozen_states": False,
    "members": 1,
    "expected": False,
    "epochs": 2,
    "prefix_share": 0.06,
    "loss": "mse",
    "weighting": "equal",
    "targets": "backed_up",
    "replay_steps": 1,
    "replay_decay": 1.0,
    "update_steps": None,
    "calibration": "none",
    "held_share": 0.0,
    "warmup_prompts": 0,
}
