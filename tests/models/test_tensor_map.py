"""Views of Hugging Face's tensors: shapes are the decoder's, blocks are what slicing the whole leaf gives."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.models import decoder, tensor_map
from trace_jax.models.config import DecoderConfig
from trace_jax.models.tensor_map import Concat, Stack, Tensor

CFG = DecoderConfig(
    vocab_size=7,
    hidden_size=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_size=10,
    tie_embeddings=False,
)
OPTIONS = ("scan_layers", "fuse_projections", "tie_embeddings", "qk_norm", "qkv_bias", "o_bias")


def is_view(node):
    return isinstance(node, tensor_map.View)


def test_every_layout_has_the_decoders_tree():
    for values in itertools.product((False, True), repeat=len(OPTIONS)):
        if sum(values) not in (1, 2, 5):  # 27 of 64
            continue
        cfg = dataclasses.replace(CFG, **dict(zip(OPTIONS, values)))
        shapes = jax.eval_shape(lambda cfg=cfg: decoder.init_params(cfg, jax.random.key(0)))
        ours = jax.tree.map(lambda view: view.shape, tensor_map.tensor_map(cfg), is_leaf=is_view)
        assert ours == jax.tree.map(lambda leaf: leaf.shape, shapes), cfg


def test_without_a_head():
    assert "lm_head" in tensor_map.tensor_map(CFG) and "lm_head" not in tensor_map.tensor_map(CFG, with_head=False)


def content(tensor):
    """Numbers that tell tensors and places apart."""
    seed = sum(map(ord, tensor.name))
    return 1000.0 * seed + np.arange(np.prod(tensor.stored)).reshape(tensor.stored)


def whole(view):
    """The leaf by numpy's own joins."""
    if isinstance(view, Tensor):
        return content(view).reshape([n for group in view.groups for n in group]).transpose(view.order)
    join = np.stack if isinstance(view, Stack) else np.concatenate
    return join([whole(part) for part in view.parts], axis=view.axis)


LEAVES = [
    view
    for values in itertools.product((False, True), repeat=2)
    for view in tensor_map.leaves(
        tensor_map.tensor_map(dataclasses.replace(CFG, qkv_bias=True, **dict(zip(OPTIONS, values))))
    )
]


@given(st.data())
def test_blocks(data):
    view = data.draw(st.sampled_from(LEAVES))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in view.shape]
    block = tuple(slice(low, high) for low, high in bounds)
    asked = []

    def read(tensor, wanted):
        asked.append((tensor.name, tuple((part.start, part.stop, part.step) for part in wanted)))
        return content(tensor)[wanted]

    out = np.full([high - low for low, high in bounds], np.nan)
    tensor_map.fill(view, block, out, read)
    np.testing.assert_array_equal(out, whole(view)[block])
    assert len({name for name, _ in asked}) == len(asked)  # no tensor twice
    if isinstance(view, Stack) and not isinstance(view.parts[0], Concat):
        low, high = bounds[view.axis]
        names = [tensor.name for part in view.parts[low:high] for tensor in tensor_map.tensors(part)]
        assert {name for name, _ in asked} <= set(names)


@pytest.mark.parametrize("view", LEAVES, ids=lambda view: next(tensor_map.tensors(view)).name)
def test_pieces_are_the_way_back(view):
    names = []
    for tensor, piece in tensor_map.pieces(view, whole(view)):
        np.testing.assert_array_equal(piece(), content(tensor))
        names.append(tensor.name)
    assert names == [tensor.name for tensor in tensor_map.tensors(view)] and len(set(names)) == len(names)


def test_rows_of_a_sharded_tensor_by_hand():
    """Heads 1..2 of a q kernel [D, N, H] = [8, 4, 6] are rows 6..17 of the file's [24, 8]."""
    q = tensor_map.tensor_map(CFG)["layer_0"]["attention"]["q"]["kernel"]
    assert (q.shape, q.stored) == ((8, 4, 6), (24, 8))
    asked = []
    out = np.empty((3, 2, 6))
    tensor_map.fill(
        q, (slice(2, 5), slice(1, 3), slice(0, 6)), out, lambda _, wanted: asked.append(wanted) or content(q)[wanted]
    )
    assert asked == [(slice(6, 18), slice(2, 5))]
    assert out[0, 1, 5] == content(q)[17, 2]
