"""Loading straight to the shards of a mesh: right blocks on right devices, and no more read than they hold."""

from __future__ import annotations

import os
import subprocess
import sys

_SCRIPT = """
import os
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from trace_jax.models import decoder, folder, weights
from trace_jax.models.config import DecoderConfig
from trace_jax.train import sharding

path, scan, fuse = sys.argv[1], sys.argv[2] == "scan", sys.argv[3] == "fuse"
cfg = DecoderConfig(vocab_size=48, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, mlp_size=24,
                    qk_norm=False, qkv_bias=True, tie_embeddings=False, scan_layers=scan, fuse_projections=fuse)
shapes = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
rng = np.random.default_rng(0)
params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
folder.save(path, cfg, params, max_shard_bytes=4000)
total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

reads = []
read = weights.Reader.read
def counted(self, name, block):
    array = read(self, name, block)
    reads.append((name, array.nbytes))
    return array
weights.Reader.read = counted

def load(data, fsdp, tensor, **options):
    mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: data * fsdp * tensor])
    wanted = sharding.param_shardings(mesh, shapes, decoder.param_axes(cfg))
    reads.clear()
    got = folder.load_params(path, cfg, shardings=wanted, **options)
    for leaf, there, full in zip(*map(jax.tree.leaves, (got, wanted, params)), strict=True):
        assert leaf.sharding == there
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data, np.float32), full[shard.index].astype(leaf.dtype))
    return got

# every byte once, though two devices hold a copy of each block
for sizes in ((1, 1, 1), (1, 2, 1), (2, 2, 2), (1, 1, 8), (8, 1, 1)):
    load(*sizes)
    assert sum(n for _, n in reads) == total, (sizes, sum(n for _, n in reads), total)
load(2, 2, 2, dtype="bfloat16")

# and back from the shards
folder.save(path + "_again", cfg, load(2, 2, 2), max_shard_bytes=4000)
names = sorted(os.listdir(path))
assert names == sorted(os.listdir(path + "_again")) and len(names) > 5
for name in names:
    with open(os.path.join(path, name), "rb") as a, open(os.path.join(path + "_again", name), "rb") as b:
        assert a.read() == b.read(), name

# one block of a kernel split in two is one half of the file's tensor, whichever of its axes is split
for fsdp, tensor, name in ((2, 1, "mlp.gate_proj"), (1, 2, "mlp.gate_proj"), (2, 1, "mlp.down_proj"),
                           (1, 2, "mlp.down_proj"), (2, 1, "self_attn.q_proj"), (2, 1, "self_attn.o_proj")):
    load(1, fsdp, tensor)
    sizes = [n for found, n in reads if found == f"model.layers.1.{name}.weight"]
    whole = cfg.hidden_size * (cfg.mlp_size if "mlp" in name else cfg.num_heads * cfg.head_dim) * 4
    assert sizes == [whole // 2] * 2, (fsdp, tensor, name, sizes)
print("ok")
"""


def run(tmp_path, *layout):
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "model"), *layout],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "ok\n"


def test_shards_of_stacked_and_fused_layers(tmp_path):
    run(tmp_path, "scan", "fuse")


def test_shards_of_plain_layers(tmp_path):
    run(tmp_path, "unrolled", "apart")
