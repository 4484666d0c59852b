"""Versions on disk: whole or not there, the last two, and nothing left in the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trace_jax.engines.weight_folders import WeightFolders, difference


def save(folder: Path, params: str) -> None:
    (folder / "model").write_text(params)
    (folder / "config").write_text("{}")


def names(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir())


def test_a_version_is_where_it_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = WeightFolders("weights", save).write("seven", 7)
    assert folder == tmp_path / "weights" / "version-7"
    assert (folder / "model").read_text() == "seven" and names(folder) == ["config", "model"]


def test_the_last_two_are_kept(tmp_path):
    folders = WeightFolders(tmp_path, save)
    kept = []
    for version in range(8, 13):  # 9 to 10: the order is not that of names
        folders.write(str(version), version)
        kept.append(names(tmp_path))
    assert kept == [
        ["version-8"],
        ["version-8", "version-9"],
        ["version-10", "version-9"],
        ["version-10", "version-11"],
        ["version-11", "version-12"],
    ]


def test_a_run_that_goes_back_keeps_what_it_wrote_last(tmp_path):
    folders = WeightFolders(tmp_path, save)
    for version in (5, 6, 4):
        folders.write(str(version), version)
    assert names(tmp_path) == ["version-4", "version-6"]


def test_a_version_can_be_written_again(tmp_path):
    folders = WeightFolders(tmp_path, save)
    folders.write("old", 3)
    assert (folders.write("new", 3) / "model").read_text() == "new"
    assert names(tmp_path) == ["version-3"]


def test_nothing_is_seen_before_all_is_written(tmp_path):
    seen = []

    def watched(folder: Path, params: str) -> None:
        save(folder, params)
        seen.append([name for name in names(tmp_path) if name.startswith("version-")])

    folders = WeightFolders(tmp_path, watched)
    folders.write("a", 1)
    folders.write("b", 2)
    assert seen == [[], ["version-1"]]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_a_save_that_fails_half_way_changes_nothing(tmp_path, error):
    def full(folder: Path, params: str) -> None:
        if params == "full":
            (folder / "model").write_text("half")
            raise error
        save(folder, params)

    folders = WeightFolders(tmp_path, full)
    for version in (1, 2):
        folders.write(str(version), version)
    for version in (2, 3):
        with pytest.raises(type(error)):
            folders.write("full", version)
    assert names(tmp_path) == ["version-1", "version-2"]
    assert [(tmp_path / name / "model").read_text() for name in names(tmp_path)] == ["1", "2"]
    assert folders.write("3", 3).name == "version-3"  # when there is room again


def test_a_home_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        WeightFolders(tmp_path / "file" / "weights", save).write("a", 1)


def test_clear_removes_what_a_killed_process_left(tmp_path):
    home = tmp_path / "weights"
    for name in ("version-3", "version-12", ".unfinished-13"):
        (home / name).mkdir(parents=True)
        save(home / name, name)
    WeightFolders(home, save).clear()
    assert not home.exists()


def test_clear_leaves_what_is_not_ours(tmp_path):
    folders = WeightFolders(tmp_path, save)
    folders.write("a", 1)
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "version-of-mine").write_text("a file")
    folders.clear()
    assert names(tmp_path) == ["notes", "version-of-mine"]


def test_clear_before_there_is_anything(tmp_path):
    WeightFolders(tmp_path / "none", save).clear()
    assert not (tmp_path / "none").exists()


def test_an_unfinished_version_is_written_over(tmp_path):
    (tmp_path / ".unfinished-4").mkdir()
    (tmp_path / ".unfinished-4" / "stale").write_text("")
    folder = WeightFolders(tmp_path, save).write("a", 4)
    assert names(folder) == ["config", "model"] and os.listdir(tmp_path) == ["version-4"]


def test_folders_of_models_of_other_shapes(tmp_path):
    def folder(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
        return tmp_path / name

    one = folder("one", '{"vocab_size": 20, "hidden_size": 64, "head_dim": null, "rope_theta": 1.0}')
    same = folder("same", '{"vocab_size": 20, "hidden_size": 64, "head_dim": 16, "rope_theta": 2.0}')
    other = folder("other", '{"vocab_size": 37, "hidden_size": 32}')
    assert difference(one, same) == difference(one, one) == ""
    assert difference(one, other) == "vocab_size 20 against 37, hidden_size 64 against 32"
    for unreadable in (tmp_path / "nowhere", folder("half", '{"vocab_size": '), folder("list", "[1]")):
        assert difference(unreadable, one) == difference(one, unreadable) == ""
