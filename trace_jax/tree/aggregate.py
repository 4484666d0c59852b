"""Token weights: how the loss averages over tokens, sequences and prompts.

The policy loss is a weighted sum over tokens, so the whole choice of averages is in the weights. A mode gives each
sequence s, of n_s action tokens, a weight a_s for each of its tokens and a share b_s of the denominator:

    weight of a token of s = a_s / sum_{s' in scope} b_s'     ( * 1 / number of trees, if the scope is a tree )

Where `prompt_weight` is "equal" the scope is the tree: every tree weighs 1 / num_trees whatever its size, and a tree
without contrast (no rows) still counts in num_trees, so it neither trains nor lends its share to others. Where it is
"sequences" the scope is the batch: every sequence weighs the same, so a prompt with more rollouts weighs more.
"equal" is our choice; the paper does not weigh prompts with trees of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trace_jax.tree.credit import Credit
from trace_jax.types import RolloutTree

# (n_s float64 [S], max_tokens) -> (a_s, b_s), float64 [S] each. A sequence without tokens keeps its share b_s of a
# mean over sequences.
Mode = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]

AGGREGATIONS: dict[str, Mode] = {
    # mean over sequences of the mean over tokens: a = 1 / n_s, b = 1 (paper Eq. 43, 47, 49)
    "sequence_mean_token_mean": lambda n, _: (1.0 / np.maximum(n, 1.0), np.ones_like(n)),
    # mean over sequences of the sum over tokens: a = 1, b = 1
    "sequence_mean_token_sum": lambda n, _: (np.ones_like(n), np.ones_like(n)),
    # the same with a constant length in the place of n_s: a = 1 / max_tokens, b = 1 (Dr. GRPO, arXiv 2503.20783)
    "sequence_mean_token_scale": lambda n, max_tokens: (np.full_like(n, 1.0 / max_tokens), np.ones_like(n)),
    # mean over all tokens: a = 1, b = n_s
    "token_mean": lambda n, _: (np.ones_like(n), n),
}
PROMPT_WEIGHTS = ("equal", "sequences")


def token_weights(
    trees: Sequence[RolloutTree],
    credits: Sequence[Credit],
    *,
    mode: str,
    prompt_weight: str,
    max_tokens: int,
) -> list[np.ndarray]:
    """The weight of each action token of each credit row.

    Args:
      trees: the step's active trees, those without contrast included.
      credits: one `Credit` per tree.
      mode: a key of `AGGREGATIONS`.
      prompt_weight: one of `PROMPT_WEIGHTS`, see the module.
      max_tokens: the constant length of "sequence_mean_token_scale", >= 1 (tokens a rollout may hold).

    Returns:
      one float32 [P] per tree, aligned with its credit's rows.

    Raises:
      ValueError: for an unknown name, `max_tokens` < 1, or lists that do not match.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation {mode!r} is unknown; use one of {', '.join(AGGREGATIONS)}")
    if prompt_weight not in PROMPT_WEIGHTS:
        raise ValueError(f"prompt_weight {prompt_weight!r} is unknown; use one of {', '.join(PROMPT_WEIGHTS)}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    if len(trees) != len(credits):
        raise ValueError(f"{len(trees)} trees but {len(credits)} credits; pass one credit per tree")
    per_token, shares = [], []
    for tree, credit in zip(trees, credits, strict=True):
        tokens = np.bincount(credit.sequence, tree.action_counts()[credit.node], minlength=credit.num_sequences)
        weight, share = AGGREGATIONS[mode](tokens, max_tokens)
        per_token.append(weight[credit.sequence])
        shares.append(float(share.sum()))
    if prompt_weight == "equal":
        denominators = [share * len(trees) for share in shares]
    else:
        denominators = [sum(shares)] * len(trees)
    # A denominator of 0 belongs to rows without a single token; any positive number will do.
    return [(w / (d or 1.0)).astype(np.float32) for w, d in zip(per_token, denominators, strict=True)]
