"""Read-outs of the success predictors: from hidden states to one logit per token, or to one of each member.

The paper names no read-out; all of this is our choice. The last layer starts at zero, so that one read-out says 0.5 to
everything before it is trained.

Members are an ensemble that shares one backbone. Each has a trained head of its own and a fixed random one beside it:

    logit_s = trained_s(h) + PRIOR_SCALE * prior_s(stop_gradient(h))

("randomised prior functions", Osband, Aslanides and Cassirer 2018, arXiv 1806.03335; their networks share nothing).
Where there are data the trained parts cancel what the priors say; elsewhere the members keep their differences. The
priors read the shared hidden states, which do change with training, and leave no gradient in them. There is no
bootstrap: all members are fitted to the same examples.

Shape letters as in `decoder`; S members, F hidden units of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Params = Any

PRIOR_SCALE = 1.0  # a prior's logits then have a standard deviation of about 0.65 over keys (see `read_out`)


@dataclasses.dataclass(frozen=True)
class ReadOut:
    """Pure functions from hidden states to logits.

    `logits(params, *hidden)`: one float array [B, T, D_i] per input -> float32 [B, T], with members [S, B, T].
    `param_axes()`: a tree like the params whose leaves are PartitionSpecs of logical axis names; members are not split.
    """

    init: Callable[[jax.Array], Params]  # key -> float32 params
    logits: Callable[..., jax.Array]
    param_axes: Callable[[], Params]


def read_out(
    sizes: Sequence[int], *, mlp_size: int | None, members: int = 1, norms: Sequence[str] = ("norm",)
) -> ReadOut:
    """score(gelu(hidden(concatenated RMSNorms of the inputs))), or a linear score of the inputs, in float32.

    One member: params with D = sum(sizes), F = mlp_size: {NORM: {"scale" [D_i]} for each of `norms`,
    "hidden": {"kernel" [D, F], "bias" [F]}, "score": {"kernel" [F, 1], "bias" [1]}}; a linear score has only "score",
    with kernel [D, 1].

    S > 1 members: {"trained": ..., "prior": ...}, both as above with a leading axis [S]. The gradient in "prior" is
    exactly zero, so an optimiser without weight decay leaves it as it was drawn. The prior's kernels are N(0, 1/fan_in)
    (truncated), so for any history its logit over keys has mean 0 and a variance of about E gelu(N(0, 1))^2 = 0.43
    times PRIOR_SCALE^2. Untrained members say sigmoid of that, 0.5 +- 0.15: their mean is 0.5 in expectation over keys
    and, for S members, about 0.15 / sqrt(S) away from it.

    Args:
      sizes: D_i of each input.
      mlp_size: hidden units of each head; None for a linear score.
      norms: names of the inputs' norms, as many as `sizes`.

    Raises ValueError for mlp_size < 1, members < 1, and members of a linear score, which could not undo their priors.
    """
    if mlp_size is not None and mlp_size < 1:
        raise ValueError(f"predictor head: mlp_size={mlp_size} must be >= 1")
    if members < 1:
        raise ValueError(f"predictor head: members={members} must be >= 1")
    if members == 1:
        return _single(_Head(mlp_size, tuple(norms), nn.initializers.zeros), sizes)
    if mlp_size is None:
        raise ValueError(f"predictor head: members={members} need an mlp_size; only one member can be linear")
    trained = _stacked(_Head(mlp_size, tuple(norms), nn.initializers.zeros), sizes, members)
    prior = _stacked(_Head(mlp_size, tuple(norms), nn.initializers.lecun_normal()), sizes, members)

    def init(key: jax.Array) -> Params:
        trained_key, prior_key = jax.random.split(key)
        return {"trained": trained.init(trained_key), "prior": prior.init(prior_key)}

    def logits(params, *hidden):
        fixed = jax.lax.stop_gradient(prior.logits(params["prior"], *hidden))
        return trained.logits(params["trained"], *hidden) + PRIOR_SCALE * fixed

    return ReadOut(init, logits, lambda: {"trained": trained.param_axes(), "prior": prior.param_axes()})


def _single(head: _Head, sizes: Sequence[int]) -> ReadOut:
    inputs = [jnp.zeros((1, 1, size)) for size in sizes]
    axes = lambda: nn.get_partition_spec(jax.eval_shape(head.init, jax.random.key(0), *inputs))["params"]
    return ReadOut(
        lambda key: nn.meta.unbox(head.init(key, *inputs)["params"]),
        lambda params, *hidden: head.apply({"params": params}, *hidden),
        axes,
    )


def _stacked(head: _Head, sizes: Sequence[int], members: int) -> ReadOut:
    """`members` heads of independent keys, their params stacked; all read the same hidden states."""
    one = _single(head, sizes)
    return ReadOut(
        lambda key: jax.vmap(one.init)(jax.random.split(key, members)),
        lambda params, *hidden: jax.vmap(lambda member: one.logits(member, *hidden))(params),
        lambda: jax.tree.map(
            lambda spec: PartitionSpec(None, *spec), one.param_axes(), is_leaf=lambda x: isinstance(x, PartitionSpec)
        ),
    )


class _Head(nn.Module):
    """Inputs [.., D_i] -> [..]: an RMS-normed hidden layer of `mlp_size` units, or none; a scalar output."""

    mlp_size: int | None
    norms: tuple[str, ...]
    score_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, *inputs):
        inputs, axis = [x.astype(jnp.float32) for x in inputs], "embed"
        if self.mlp_size is not None:
            scale = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
            inputs = [
                nn.RMSNorm(scale_init=scale, name=name)(x) for name, x in zip(self.norms, inputs, strict=True)
            ]
        x = jnp.concatenate(inputs, axis=-1)
        if self.mlp_size is not None:
            kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            bias = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
            x, axis = nn.gelu(nn.Dense(self.mlp_size, kernel_init=kernel, bias_init=bias, name="hidden")(x)), "mlp"
        kernel = nn.with_logical_partitioning(self.score_init, (axis, None))
        bias = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
        return nn.Dense(1, kernel_init=kernel, bias_init=bias, name="score")(x)[..., 0]
