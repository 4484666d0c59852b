"""The clipped policy loss over tokens, with two-sided advantage weights.

Derivation of the two-sided form. Let r = pi(a) / pi_old(a), lo = 1 - clip_low, hi = 1 + clip_high. The usual clipped
surrogate of a token with advantage A (paper Eq. 43) is min(r A, clip(r, lo, hi) A):

    A >= 0:  = A min(r, clip(r, lo, hi)) = A min(r, hi)    (below lo the clipped ratio is the larger one: never chosen)
    A <  0:  = A max(r, clip(r, lo, hi)) = A max(r, lo)    (above hi the clipped ratio is the smaller one: never chosen)

so that min(r A, clip(r) A) = max(A, 0) min(r, hi) + min(A, 0) max(r, lo) for every A. A token that several paths k
share has one r, but a weight w_k and an advantage A_k per path; r does not depend on k and comes out of the sum:

    sum_k w_k min(r A_k, clip(r) A_k) = adv_pos min(r, hi) + adv_neg max(r, lo),
    adv_pos = sum_k w_k max(A_k, 0) >= 0,   adv_neg = sum_k w_k min(A_k, 0) <= 0.

Exact, because each side of zero is linear in A. One summed advantage is not: A = (+1, -1) sums to 0, but at r = 2 the
surrogate is hi - 2 = -0.72.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# exp(20) = 4.9e8 stays finite in f32 after a product and a sum. Beyond it the gradient of a token is zero, and the
# metric `ratio_max` sits at the bound: such a ratio is a fault in the log-probs, not a step to take.
MAX_LOG_RATIO = 20.0


def policy_loss(
    logprob: jax.Array,
    old_logprob: jax.Array,
    adv_pos: jax.Array,
    adv_neg: jax.Array,
    weight: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    kl_coef: float = 0.0,
    ref_logprob: jax.Array | None = None,
    tis_cap: float | None = None,
    behaviour_logprob: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Clipped policy loss (paper Eq. 43, clip range of E.3), summed over tokens.

        loss = sum_tokens -c (adv_pos min(r, 1 + clip_high) + adv_neg max(r, 1 - clip_low))
                          + kl_coef weight (exp(d) - 1 - d)
        r = exp(logprob - old_logprob)                                  (f32, like all of it)
        c = min(exp(old_logprob - behaviour_logprob), tis_cap), or 1    (no gradient; our option)
        d = ref_logprob - logprob                                       (our option: the paper has no KL)

    Each of the three log-ratios is clamped to +-MAX_LOG_RATIO.

    The result is a SUM. Aggregation modes are per-token weights that the host has already multiplied in
    (`trace_jax.tree.aggregate`), since their normalisers need the whole step; the weights of a step sum to one over all
    its micro-batches, so the losses and gradients of micro-batches add up to those of the step.

    A token is trained where `weight != 0`. Every other position (padding, prompts, observations) is masked before any
    arithmetic: it adds exactly zero to loss, metrics and gradient, even where its entries are NaN or infinite.
    Only `logprob` carries a gradient, so `old_logprob` may be the same array on an on-policy pass (r = 1, gradient
    -(adv_pos + adv_neg)). At r exactly on a bound the gradient is that of the unclipped side.

    Args (arrays of one and the same shape, any rank; scalars are Python floats):
        logprob: log-prob of the sampled token under the policy that is trained.
        old_logprob: the same under the policy that the ratio is taken against.
        adv_pos: weighted positive part of the advantage, >= 0.
        adv_neg: weighted negative part of the advantage, <= 0.
        weight: aggregation weight of the token; 0 where it is not trained.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        kl_coef: coefficient of the k3 penalty; it needs `ref_logprob`.
        ref_logprob: log-prob under the reference policy; k3 estimates KL(policy || reference) on the policy's tokens.
        tis_cap: upper bound of the truncated importance weight c; it needs `behaviour_logprob`.
        behaviour_logprob: log-prob that the engine recorded for the token.

    Returns:
        The scalar loss, and metrics as pairs (sum, weight) over trained tokens, to be added over micro-batches and then
        divided:
            clip_low, clip_high: share of tokens that lose a gradient to that bound.
            approx_kl: k3 estimate of KL(old || policy), nats a token.
            ratio_max: (largest r, 1), or (0, 0) where nothing is trained; over micro-batches the mean of their maxima.
            kl_ref: mean k3 to the reference, nats a token; only with `ref_logprob`.
            behaviour_gap: mean |old_logprob - behaviour_logprob|, nats; only with `behaviour_logprob`.
            tis_weight, tis_capped: mean of c, and share of tokens whose c is `tis_cap`; only with `tis_cap`.

    Raises:
        ValueError: shapes differ, or an option lacks the log-probs that it needs.
    """
    _check_shapes(logprob, old_logprob=old_logprob, adv_pos=adv_pos, adv_neg=adv_neg, weight=weight)
    _check_shapes(logprob, ref_logprob=ref_logprob, behaviour_logprob=behaviour_logprob)
    if kl_coef and ref_logprob is None:
        raise ValueError(f"policy_loss: kl_coef={kl_coef} needs ref_logprob; pass it or set kl_coef to 0")
    if tis_cap is not None and behaviour_logprob is None:
        raise ValueError(f"policy_loss: tis_cap={tis_cap} needs behaviour_logprob; pass it or set tis_cap to None")
    trained = weight != 0
    count = _count(trained)

    def masked(x: jax.Array) -> jax.Array:
        return jnp.where(trained, x.astype(jnp.float32), 0.0)

    def constant(x: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(masked(x))

    logprob, old_logprob = masked(logprob), constant(old_logprob)
    adv_pos, adv_neg = constant(adv_pos), constant(adv_neg)
    log_ratio = _clamp(logprob - old_logprob)
    ratio = jnp.exp(log_ratio)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    over, under = ratio > high, ratio < low
    surrogate = adv_pos * jnp.where(over, high, ratio) + adv_neg * jnp.where(under, low, ratio)
    metrics = {
        "clip_low": (_count(under & (adv_neg < 0)), count),
        "clip_high": (_count(over & (adv_pos > 0)), count),
        "approx_kl": (jnp.sum(_k3(log_ratio)), count),
        "ratio_max": (jnp.max(masked(ratio), initial=0.0), jnp.minimum(count, 1.0)),
    }
    if behaviour_logprob is not None:
        gap = old_logprob - constant(behaviour_logprob)
        metrics["behaviour_gap"] = (jnp.sum(jnp.abs(gap)), count)
        if tis_cap is not None:
            importance = jnp.minimum(jnp.exp(_clamp(gap)), tis_cap)
            surrogate = surrogate * importance
            metrics["tis_weight"] = (jnp.sum(masked(importance)), count)
            metrics["tis_capped"] = (_count(trained & (importance >= tis_cap)), count)
    loss = -jnp.sum(surrogate)
    if ref_logprob is not None:
        kl = _k3(_clamp(constant(ref_logprob) - logprob))
        metrics["kl_ref"] = (jnp.sum(kl), count)
        loss = loss + kl_coef * jnp.sum(constant(weight) * kl)
    return loss, jax.lax.stop_gradient(metrics)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)


def _clamp(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(log_ratio: jax.Array) -> jax.Array:
    """exp(x) - 1 - x >= 0 for x = log(p / q): its mean under q is KL(q || p). expm1 keeps small x exact."""
    return jnp.expm1(log_ratio) - log_ratio


def _check_shapes(logprob: jax.Array, **others: jax.Array | None) -> None:
    for name, array in others.items():
        if array is not None and array.shape != logprob.shape:
            raise ValueError(
                f"policy_loss: {name} has shape {array.shape} but logprob has {logprob.shape}; make them equal"
            )
