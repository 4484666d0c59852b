"""Checkpoints: bitwise round trips, damage to every file, foreign folders, other configs, a killed writer."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trace_jax.train import checkpoint, state

# Reads that fail leave coroutines behind in orbax's own event loop; Python complains when it collects them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collect_them_here():
    yield
    gc.collect()


CONFIG = {"seed": 1, "model": {"layers": 2, "shape": (3, 4)}}


def _arrays(seed):
    params = {"w": jax.random.normal(jax.random.key(seed), (64, 33)), "b": jnp.full((5,), seed, jnp.bfloat16)}
    return {"policy": state.create(params, optax.adam(1e-3)), "key": jax.random.key(seed + 100)}


def _snapshot(step, rng=None, host=None):
    document = {"cursor": step * 7, "rng": checkpoint.rng_state(rng or np.random.default_rng(step)), "value": 0.1 + 0.2}
    host = {"token": np.arange(step * 3, dtype=np.int32)} if host is None else host
    return checkpoint.Snapshot(step=step, arrays=_arrays(step), host=host, document=document)


def _open(folder, config=CONFIG, keep=3):
    return checkpoint.Checkpointer(folder, fingerprint=config, keep=keep)


def _bits(tree):
    raw = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return [(leaf.dtype, raw(leaf).shape, np.asarray(raw(leaf)).tobytes()) for leaf in jax.tree.leaves(tree)]


def _saved(folder, *steps):
    writer = _open(folder)
    for step in steps:
        writer.save(_snapshot(step))
    writer.close()


def test_a_part_is_read_alone(tmp_path):
    """The parameters of the newest step without what stands beside them; errors as of the whole."""
    writer = _open(tmp_path)
    assert writer.restore_part({}) is None
    writer.close()
    _saved(tmp_path, 1, 2)
    reader = _open(tmp_path)
    part = reader.restore_part({"policy": {"params": _arrays(1)["policy"].params}})
    assert _bits(part.arrays) == _bits({"policy": {"params": _arrays(2)["policy"].params}})
    assert (part.step, part.host, part.document) == (2, {}, reader.restore_latest(_arrays(1)).document)
    reader.save(_snapshot(3))  # and the same object goes on as before
    reader.close()
    assert _bits(_open(tmp_path).restore_latest(_arrays(1)).arrays) == _bits(_arrays(3))
    other = _open(tmp_path, {"seed": 2})
    with pytest.raises(checkpoint.CheckpointError, match="is of another config"):
        other.restore_part({"policy": {"params": _arrays(1)["policy"].params}})
    other.close()


def test_round_trip_is_bitwise(tmp_path):
    rng = np.random.default_rng(5)
    rng.normal(size=3)
    rng.integers(0, 2**16, dtype=np.uint16)  # leaves half a word in the generator's buffer
    host = {"token": np.arange(6, dtype=np.int32).reshape(2, 3), "none": np.zeros((0, 9), np.float32)}
    want = _snapshot(2, rng, host)
    writer = _open(tmp_path / "ckpt")
    assert writer.restore_latest(want.arrays) is None
    writer.save(want)
    writer.close()
    got = _open(tmp_path / "ckpt").restore_latest(_arrays(0))
    assert got.step == 2 and got.document == want.document
    assert jax.tree.structure(got.arrays) == jax.tree.structure(want.arrays) and _bits(got.arrays) == _bits(want.arrays)
    assert set(got.host) == set(host)
    for name in host:
        assert got.host[name].dtype == host[name].dtype
        np.testing.assert_array_equal(got.host[name], host[name])
    again = checkpoint.rng_from_state(got.document["rng"])
    np.testing.assert_array_equal(
        again.integers(0, 2**16, size=5, dtype=np.uint16), rng.integers(0, 2**16, size=5, dtype=np.uint16)
    )
    np.testing.assert_array_equal(again.normal(size=9), rng.normal(size=9))


def test_no_host_arrays_at_all(tmp_path):
    writer = _open(tmp_path)
    writer.save(_snapshot(1, host={}))
    assert writer.restore_latest(_arrays(0)).host == {}
    writer.close()


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    writer = _open(tmp_path)
    arrays = {"w": jax.random.normal(jax.random.key(0), (1024, 512))}
    want = _bits(arrays)
    writer.save(checkpoint.Snapshot(step=1, arrays=arrays, host={}, document={}))
    jax.block_until_ready(overwrite(arrays))
    writer.wait()
    assert _bits(writer.restore_latest({"w": jnp.zeros((1024, 512))}).arrays) == want
    writer.close()


def test_document_and_host_are_copied(tmp_path):
    writer = _open(tmp_path)
    document, host = {"list": [1]}, np.ones(1000)
    writer.save(checkpoint.Snapshot(step=1, arrays=_arrays(1), host={"x": host}, document=document))
    document["list"].append(2)
    host[:] = 7
    got = (writer.wait(), writer.restore_latest(_arrays(0)))[1]
    assert got.document == {"list": [1]} and got.host["x"].sum() == 1000
    writer.close()


def test_keeps_the_newest_and_saves_a_step_once(tmp_path):
    writer = _open(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        writer.save(_snapshot(step))
    with pytest.raises(checkpoint.CheckpointError, match="step 2 comes before step 3"):
        writer.save(_snapshot(2))
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["00000002", "00000003"]
    assert _open(tmp_path).latest_step() == 3


def _files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.stat().st_size)


@pytest.mark.parametrize("cut", [0.0, 0.5], ids=["emptied", "halved"])
def test_every_damaged_file_is_noticed(tmp_path, cut):
    """Cuts each file of the newest checkpoint in turn: either a CheckpointError, or the values are all there."""
    _saved(tmp_path / "good", 1, 2)
    names, refused = _files(tmp_path / "good" / "00000002"), []
    for i, name in enumerate(names):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "good", folder)
        victim = folder / "00000002" / name
        os.truncate(victim, int(victim.stat().st_size * cut))
        reader = _open(folder)
        try:
            got = reader.restore_latest(_arrays(0))
        except checkpoint.CheckpointError as error:
            assert "\n" not in str(error)
            assert "step 2 in" in str(error) and "delete 00000002 there to resume from step 1" in str(error)
            refused.append(name)
        else:
            assert _bits(got.arrays) == _bits(_arrays(2)) and list(got.host["token"]) == list(range(6)), name
        reader.close()
    assert {"document/metadata", "arrays/manifest.ocdbt", "host/manifest.ocdbt"} <= set(refused)
    assert any(name.startswith("arrays/ocdbt.process_0/d/") for name in refused)


def test_following_the_advice_after_damage(tmp_path):
    _saved(tmp_path, 1, 2)
    os.truncate(tmp_path / "00000002" / "document" / "metadata", 3)
    shutil.rmtree(tmp_path / "00000002")
    assert _open(tmp_path).restore_latest(_arrays(0)).step == 1


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(checkpoint.CheckpointError, match="holds 7, notes.txt, which is no checkpoint of this project"):
        _open(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["7", "notes.txt"]
    with pytest.raises(checkpoint.CheckpointError, match="is a file"):
        _open(tmp_path / "notes.txt")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "format.json").write_text('{"trace_jax_checkpoints": 0}')
    with pytest.raises(checkpoint.CheckpointError, match="does not say"):
        _open(tmp_path / "old")


def test_other_config_lists_the_differences(tmp_path):
    _saved(tmp_path, 1)
    other = {"seed": 2, "model": {"layers": 2, "shape": [3, 4]}, "extra": None}
    with pytest.raises(checkpoint.CheckpointError) as error:
        _open(tmp_path, other).restore_latest(_arrays(0))
    text = str(error.value)
    assert "of another config: extra is 'absent' there, None here; seed is 1 there, 2 here; restore" in text
    assert "layers" not in text and "\n" not in text


def test_another_model_is_refused(tmp_path):
    _saved(tmp_path, 1)
    wrong = {"policy": state.create({"w": jnp.zeros((2, 2))}, optax.adam(1e-3)), "key": jax.random.key(0)}
    with pytest.raises(checkpoint.CheckpointError, match="step 1 in .* cannot be read .* start anew"):
        _open(tmp_path).restore_latest(wrong)


def test_killed_while_writing(tmp_path):
    """A process that dies at the moment step 2 would get its name leaves step 1 usable, and 2 can be written again."""
    _saved(tmp_path, 1)
    script = textwrap.dedent("""
        import os, sys
        import jax.numpy as jnp
        from trace_jax.train import checkpoint

        def dying(real):
            def call(source, target, *args, **kwargs):
                if os.path.basename(str(target)) == "00000002":
                    os._exit(9)
                return real(source, target, *args, **kwargs)
            return call

        os.rename, os.replace = dying(os.rename), dying(os.replace)
        config = {"seed": 1, "model": {"layers": 2, "shape": (3, 4)}}
        writer = checkpoint.Checkpointer(sys.argv[1], fingerprint=config, keep=3)
        writer.save(checkpoint.Snapshot(step=2, arrays={"w": jnp.ones(4)}, host={}, document={}))
        writer.wait()
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 9, done.stderr
    assert any(p.name.startswith("00000002.") for p in tmp_path.iterdir())  # it had begun
    survivor = _open(tmp_path)
    got = survivor.restore_latest(_arrays(0))
    assert got.step == 1 and _bits(got.arrays) == _bits(_arrays(1))
    survivor.save(_snapshot(2))
    survivor.close()
    assert _open(tmp_path).restore_latest(_arrays(0)).step == 2


def test_what_json_cannot_hold_is_named(tmp_path):
    writer = _open(tmp_path)
    with pytest.raises(ValueError, match="the document holds what JSON cannot"):
        writer.save(checkpoint.Snapshot(step=1, arrays=_arrays(1), host={}, document={"x": np.zeros(2)}))
    writer.close()
    with pytest.raises(ValueError, match="generator is a MT19937"):
        checkpoint.rng_state(np.random.Generator(np.random.MT19937(0)))
    with pytest.raises(ValueError, match="keep is 0"):
        _open(tmp_path, keep=0)
