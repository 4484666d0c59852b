"""From official files to stored records: every format round trips, and every bad input is one line and no set."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests.data import official_files
from trace_jax.data import fields, formats, sources, store
from trace_jax.data.__main__ import main, table
from trace_jax.data.errors import DataError, RowError
from trace_jax.data.prepare import prepare


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    folder = tmp_path_factory.mktemp("official")
    official_files.write(folder)
    return folder


@pytest.fixture(scope="module")
def prepared(official, tmp_path_factory):
    """All sets, prepared by one command."""
    folder = tmp_path_factory.mktemp("prepared")
    names = [name for name in sources.SOURCES if name != "gpqa_diamond"]
    assert main(["prepare", *names, f"--data_dir={official}", f"--folder={folder}"]) == 0
    return folder


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output, and the last line of standard error (progress bars come before)."""
    status = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return status, output.out, output.err.replace("\r", "\n").strip().splitlines()[-1] if output.err.strip() else ""


@pytest.mark.parametrize(("name", "split"), official_files.RECORDS)
def test_official_files_become_records(prepared, name, split):
    records = store.load(name, prepared, split=split)
    assert list(records) == official_files.RECORDS[name, split]
    assert records[-1] == records[len(records) - 1] and records[:1] == [records[0]]
    with pytest.raises(IndexError):
        records[len(records)]


def test_every_set_has_a_fixture():
    assert {name for name, _ in official_files.RECORDS} | {"gpqa_diamond"} == set(sources.SOURCES)


def test_gpqa_comes_from_its_encrypted_archive_in_an_order_of_its_own(tmp_path, official):
    """Options ordered by SHA-256 of id/number, worked out here with hashlib; the CSV beside it gives the same."""
    archive = official_files.FIXTURES / "gpqa_encrypted.zip"
    prepare("gpqa_diamond", tmp_path / "a", data_dir=archive, show_progress=False)
    prepare("gpqa_diamond", tmp_path / "b", data_dir=official, show_progress=False)
    records = list(store.load("gpqa_diamond", tmp_path / "a", split="test"))
    assert records == list(store.load("gpqa_diamond", tmp_path / "b", split="test"))
    texts = ["4", "3", "5", "22"]
    order = sorted(range(4), key=lambda n: hashlib.sha256(f"rec1/{n}".encode()).hexdigest())
    options = [f"{letter}. {texts[n]}" for letter, n in zip("ABCD", order)]
    assert records[0] == {
        "id": "rec1",
        "problem": "What, roughly, is\n2 + 2?\n\n" + "\n".join(options),
        "answer": "ABCD"[order.index(0)],
        "group": "Physics",
        "kind": "choice",
    }
    assert records[1]["problem"].splitlines()["ABCD".index(records[1]["answer"]) + 2].endswith("argon")


@pytest.mark.parametrize("name", ["hotpotqa", "2wikimultihopqa", "musique", "bamboogle"])
def test_questions_in_the_format_of_flashrag(tmp_path, name):
    (tmp_path / "test.jsonl").write_text(official_files.lines(official_files.FLASHRAG))
    prepare(name, tmp_path, data_dir=tmp_path / "test.jsonl", show_progress=False)
    expected = official_files.question("dev_0", "Who?", ["Ann", "Anne"], [], "all")
    assert list(store.load(name, tmp_path, split="test")) == [expected]


def test_archives_are_read_in_place(tmp_path):
    with zipfile.ZipFile(tmp_path / "data_ids_april7.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.json", json.dumps(official_files.TWO_WIKI[:1]))
        archive.writestr("dev.json", json.dumps(official_files.TWO_WIKI))
    result = prepare("2wikimultihopqa", tmp_path, data_dir=tmp_path / "data_ids_april7.zip", show_progress=False)
    assert dict(result.counts) == {"train": 1, "test": 2}


def test_preparing_twice_does_nothing_and_says_so(prepared, official, capsys):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    status, out, _ = run(capsys, "prepare", "musique", f"--data_dir={official}", f"--folder={prepared}")
    assert status == 0 and "musique: already prepared (1 test)" in out
    after = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    assert {path for path in before if before[path] != after[path]} <= {prepared / "musique" / ".lock"}


def test_rows_without_an_answer_are_counted(tmp_path, official, capsys):
    status, out, _ = run(capsys, "prepare", "deepscaler", f"--data_dir={official}", f"--folder={tmp_path}")
    assert status == 0 and "2 train records" in out and "1 train rows without an answer left out" in out


def test_the_table_shows_what_is_prepared(prepared):
    rows = {line.split()[0]: line for line in table(prepared).splitlines()[2:]}
    assert set(rows) == set(sources.SOURCES)
    assert "2, 1" in rows["hotpotqa"] and "train, test" in rows["hotpotqa"] and "CC BY-SA 4.0" in rows["hotpotqa"]
    assert " - " in rows["gpqa_diamond"] and "size not known" in rows["deepscaler"] and "package" in rows["bfcl_base"]


ROWS = official_files


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("aime24", "aime.json", "", "is empty"),
        ("aime24", "aime.json", json.dumps([{"problem": "P", "answer": "1"}])[:-9], "ends within record 0: truncated"),
        ("aime24", "aime.json", '[{"problem": "P", "answer": "1"},', "ends after record 1, without a closing bracket"),
        ("aime24", "aime.json", '[{"problem": "P", "answer": "1"}, oops]', "is no JSON at record 1"),
        ("aime24", "aime.json", '[{"problem": "P", "answer": "1"} {}]', "is no JSON after record 0"),
        ("aime24", "aime.json", "[]", "holds no record with an answer"),
        ("aime24", "aime.json", '["text"]', "record 0 is str, not an object; this is no file of aime24"),
        ("aime24", "aime.json", '[{"question": "P", "answer": "1"}, {"text": 1}]', "record 1 has no key 'problem'"),
        ("aime24", "aime.json", '[{"problem": "P"}]', "record 0 has no key 'answer'"),
        ("aime24", "aime.json", '[{"problem": 7, "answer": "1"}]', "record 0 has int in 'problem', not text"),
        ("aime24", "aime.json", '[{"problem": "P", "answer": {"a": 1}}]', "record 0 has dict in 'answer'"),
        ("aime24", "aime.json", "<html>gone</html>", "is neither JSON, JSON lines nor Parquet"),
        ("aime24", "aime.json", "version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
        ("aime24", "aime.json", b'[{"problem": "\xff\xfe"}]', "is no UTF-8 text"),
        ("aime24", "aime.json", "[" * 100_000, "is no JSON at record 0"),
        ("aime24", "aime.json", '[{"problem": "\\ud800", "answer": "1"}]', "record 0 has half a character"),
        ("hotpotqa", "hotpot_dev_distractor_v1.json", json.dumps(ROWS.TWO_WIKI), "record 0 has no key 'level'"),
        ("hotpotqa", "hotpot_dev_distractor_v1.json", json.dumps(ROWS.HOTPOTQA * 2), "record 1 has id '5a', which"),
        (
            "hotpotqa",
            "hotpot_dev_distractor_v1.json",
            json.dumps([ROWS.HOTPOTQA[0] | {"context": [["T", "no list"]]}]),
            "something other than [title, [sentence, ...]]",
        ),
        ("musique", "musique_ans_v1.0_dev.jsonl", ROWS.lines(ROWS.MUSIQUE)[:-20], "ends within line 2: truncated"),
        ("musique", "musique_ans_v1.0_dev.jsonl", '{"id": \n{}\n', "is no JSON on line 1"),
        ("musique", "musique_ans_v1.0_dev.jsonl", ROWS.lines(ROWS.ARC), "record 0 has dict in 'question', not text"),
        ("bamboogle", "bamboogle.json", json.dumps(ROWS.HOTPOTQA), "record 0 has no key 'Question'"),
        ("arc_challenge", "ARC-Challenge-Test.jsonl", ROWS.lines(ROWS.FLASHRAG), "record 0 has no key 'answerKey'"),
        ("arc_challenge", "ARC-Challenge-Test.jsonl", ROWS.lines([ROWS.ARC[0] | {"answerKey": "9"}]), "answerKey '9'"),
        ("mmlu_pro", "mmlu_pro.parquet", ROWS.lines([ROWS.MMLU_PRO[0] | {"answer": "D"}]), "which disagree"),
        ("mmlu_pro", "mmlu_pro.parquet", b"PAR1 and then nothing", "is no Parquet file, or a truncated one"),
        ("gpqa_diamond", "gpqa_diamond.csv", "Question,Answer\nWhat?,4\n", "record 0 has no key 'Correct Answer'"),
        ("gpqa_diamond", "gpqa_diamond.csv", 'Question,Correct Answer\n"What', "is no CSV file, or a truncated one"),
    ],
)
def test_a_bad_file_is_one_line_and_leaves_nothing(tmp_path, capsys, name, file, content, message):
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, out, err = run(capsys, "prepare", name, f"--data_dir={tmp_path}", f"--folder={tmp_path / 'out'}")
    assert status == 1 and not out
    assert err.startswith(f"error: {path}") and message in err, err
    assert not list((tmp_path / "out").rglob("*"))
    with pytest.raises(DataError, match=f"{name} is not prepared in .*python -m trace_jax.data prepare {name}"):
        store.load(name, tmp_path / "out", split="test")


def test_a_damaged_archive(tmp_path, capsys):
    whole = (official_files.FIXTURES / "gpqa_encrypted.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:-40])
    (tmp_path / "other.zip").write_bytes(whole)
    assert run(capsys, "prepare", "gpqa_diamond", f"--data_dir={tmp_path}/cut.zip", f"--folder={tmp_path}/o")[0] == 1
    _, _, err = run(capsys, "prepare", "arc_challenge", f"--data_dir={tmp_path}/other.zip", f"--folder={tmp_path}/o")
    assert "is a ZIP file without ARC-V1-Feb2018-2/ARC-Challenge/ARC-Challenge-Test.jsonl" in err
    flipped = bytearray(whole)
    flipped[120] ^= 1
    (tmp_path / "flipped.zip").write_bytes(flipped)
    _, _, err = run(capsys, "prepare", "gpqa_diamond", f"--data_dir={tmp_path}/flipped.zip", f"--folder={tmp_path}/o")
    assert "is damaged or truncated" in err


def test_what_can_not_be_found(tmp_path, capsys, official):
    folder = f"--folder={tmp_path / 'out'}"
    for arguments, message in [
        (["nothing"], "no data set is called 'nothing'; there are deepscaler, aime24"),
        (["aime24", "nothing"], "no data set is called 'nothing'"),
        (["aime24", "--data_dir=gone"], "gone does not exist"),
        (["aime24", f"--data_dir={tmp_path}"], "holds none of aime.json, aime24.json"),
        (["aime24", "--split=dev", f"--data_dir={official}"], "aime24 has no split 'dev'; it has test"),
        (["hotpotqa", f"--data_dir={official / 'dev.json'}", "--split=dev"], "has no split 'dev'"),
        (["hotpotqa", f"--data_dir={official / 'bamboogle.json'}"], "Give --split"),
    ]:
        status, out, err = run(capsys, "prepare", *arguments, folder)
        assert status == 1 and not out and message in err, err
    with pytest.raises(DataError, match="hotpotqa has no split 'validation'; it has train, test"):
        store.load("hotpotqa", tmp_path, split="validation")
    (tmp_path / "file").write_text("")
    _, _, err = run(capsys, "prepare", "aime24", f"--data_dir={official}", f"--folder={tmp_path / 'file'}")
    assert "can't be written to" in err


def test_a_split_that_was_not_there(prepared):
    with pytest.raises(DataError, match="musique was prepared in .* without its train split: remove"):
        store.load("musique", prepared, split="train")
    with pytest.raises(DataError, match="musique is there without its train split: remove"):
        prepare("musique", prepared, split="train", show_progress=False)


def test_a_damaged_set_is_told(tmp_path, official):
    prepare("aime24", tmp_path, data_dir=official, show_progress=False)
    (data,) = tmp_path.rglob("*.array_record*")
    data.write_bytes(b"")
    with pytest.raises(DataError, match="damaged"):
        store.load("aime24", tmp_path, split="test")[0]
    (tmp_path / "aime24" / fields.VERSION / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match="aime24 in .* is damaged: remove the folder"):
        store.load("aime24", tmp_path, split="test")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupted_prepare_leaves_nothing_and_the_next_one_works(tmp_path, official, monkeypatch, interruption):
    def read(row, name):
        if name == "deepscaler/2":
            raise interruption
        return formats.math_problem(row, name)

    with monkeypatch.context() as patch:
        patch.setitem(sources.SOURCES, "deepscaler", dataclasses.replace(sources.find("deepscaler"), read=read))
        with pytest.raises(interruption):
            prepare("deepscaler", tmp_path, data_dir=official, show_progress=False)
    assert not list(tmp_path.rglob("*"))
    killed = tmp_path / "deepscaler" / "incomplete.AB12CD_1.0.0"  # what a killed process leaves
    killed.mkdir(parents=True)
    prepare("deepscaler", tmp_path, data_dir=official, show_progress=False)
    assert len(store.load("deepscaler", tmp_path, split="train")) == 2 and not killed.exists()


def test_one_process_at_a_time(tmp_path, official, monkeypatch):
    """The second one starts while the first one is in the middle of its records."""
    told = []

    def read(row, name):
        try:
            prepare("aime24", tmp_path, data_dir=official, show_progress=False)
        except DataError as error:
            told.append(str(error))
        return formats.math_problem(row, name)

    monkeypatch.setitem(sources.SOURCES, "aime24", dataclasses.replace(sources.find("aime24"), read=read))
    prepare("aime24", tmp_path, data_dir=official, show_progress=False)
    assert len(told) == 1 and "is being prepared" in told[0]


@pytest.fixture
def served(tmp_path):
    """A local server of the files in a folder."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def offer(monkeypatch, name: str, url: str, size: int, sha256: str) -> None:
    """The set's test split comes from that address from now on."""
    source = sources.find(name)
    split = dataclasses.replace(source.splits["test"], download=sources.Download(url, size, sha256))
    monkeypatch.setitem(sources.SOURCES, name, dataclasses.replace(source, splits={"test": split}))


def test_a_download_with_the_right_checksum(served, tmp_path, official, monkeypatch):
    folder, address = served
    shutil.copy(official / "aime.json", folder)
    content = (folder / "aime.json").read_bytes()
    offer(monkeypatch, "aime24", f"{address}/aime.json", len(content), hashlib.sha256(content).hexdigest())
    prepare("aime24", tmp_path / "out", show_progress=True)
    assert list(store.load("aime24", tmp_path / "out", split="test")) == official_files.RECORDS["aime24", "test"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["aime24"]  # the download is not kept


def test_a_downloaded_archive(served, tmp_path, monkeypatch):
    folder, address = served
    shutil.copy(official_files.FIXTURES / "gpqa_encrypted.zip", folder / "dataset.zip")
    content = (folder / "dataset.zip").read_bytes()
    offer(monkeypatch, "gpqa_diamond", f"{address}/dataset.zip", len(content), hashlib.sha256(content).hexdigest())
    assert dict(prepare("gpqa_diamond", tmp_path / "out", show_progress=False).counts) == {"test": 2}


@pytest.mark.parametrize("wrong", ["content", "truncated", "gone"])
def test_a_download_that_is_not_the_published_file(served, tmp_path, official, monkeypatch, capsys, wrong):
    folder, address = served
    content = (official / "aime.json").read_bytes()
    served_content = {"content": content.replace(b"025", b"026"), "truncated": content[:-3], "gone": None}[wrong]
    if served_content:
        (folder / "aime.json").write_bytes(served_content)
    offer(monkeypatch, "aime24", f"{address}/aime.json", len(content), hashlib.sha256(content).hexdigest())
    status, out, err = run(capsys, "prepare", "aime24", f"--folder={tmp_path / 'out'}")
    assert status == 1 and not out
    if wrong == "gone":
        assert "aime24 can't be downloaded (404" in err and "give --data_dir" in err
    else:
        assert "has wrong checksum" in err and hashlib.sha256(content).hexdigest() in err
        assert hashlib.sha256(served_content).hexdigest() in err
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    with pytest.raises(DataError, match="is not prepared"):
        store.load("aime24", tmp_path / "out", split="test")


def test_a_download_that_is_known_by_its_git_object(served, tmp_path, official, monkeypatch):
    """The oracle of the id is git itself."""
    folder, address = served
    shutil.copy(official / "deepscaler.json", folder)
    command = ["git", "hash-object", "--no-filters", str(folder / "deepscaler.json")]
    blob = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    source = sources.find("deepscaler")
    download = sources.Download(f"{address}/deepscaler.json", None, git_blob=blob)
    splits = {"train": dataclasses.replace(source.splits["train"], download=download)}
    monkeypatch.setitem(sources.SOURCES, "deepscaler", dataclasses.replace(source, splits=splits))
    (folder / "deepscaler.json").write_text("[]")
    with pytest.raises(DataError, match=f"is not the published file: 2 bytes, git object .*, expected {blob}"):
        prepare("deepscaler", tmp_path / "out", show_progress=False)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.suffix != ".INFO"]
    shutil.copy(official / "deepscaler.json", folder)  # the next try downloads anew
    assert dict(prepare("deepscaler", tmp_path / "out", show_progress=True).counts) == {"train": 2}


def test_one_split_is_downloaded_alone(served, tmp_path, official, monkeypatch):
    """The other split's address leads nowhere and is not asked for."""
    folder, address = served
    shutil.copy(official / "hotpot_dev_distractor_v1.json", folder / "dev.json")
    content = (folder / "dev.json").read_bytes()
    source = sources.find("hotpotqa")
    here = sources.Download(f"{address}/dev.json", len(content), hashlib.sha256(content).hexdigest())
    gone = sources.Download(f"{address}/train.json", 1, "0" * 64)
    splits = {
        "train": dataclasses.replace(source.splits["train"], download=gone),
        "test": dataclasses.replace(source.splits["test"], download=here),
    }
    monkeypatch.setitem(sources.SOURCES, "hotpotqa", dataclasses.replace(source, splits=splits))
    with pytest.raises(DataError, match="hotpotqa can't be downloaded .404 .*train.json.; get it from https://hotpot"):
        prepare("hotpotqa", tmp_path / "out", show_progress=False)
    assert dict(prepare("hotpotqa", tmp_path / "out", split="test", show_progress=False).counts) == {"test": 1}


def test_a_set_that_is_never_downloaded(tmp_path, monkeypatch):
    source = sources.find("aime24")
    splits = {"test": dataclasses.replace(source.splits["test"], download=None)}
    monkeypatch.setitem(sources.SOURCES, "aime24", dataclasses.replace(source, splits=splits))
    with pytest.raises(DataError, match="aime24 is never downloaded .*: get aime.json from https://github.com/"):
        prepare("aime24", tmp_path, show_progress=False)


def test_a_file_of_another_size_than_the_published_one_is_noted(tmp_path, official, capsys):
    status, out, _ = run(capsys, "prepare", "aime24", f"--data_dir={official}", f"--folder={tmp_path}")
    size = (official / "aime.json").stat().st_size
    assert status == 0 and f"note: aime.json has {size:,} bytes, the published file 38,011" in out


def test_every_download_is_pinned():
    """Addresses are used once, hashes look like SHA-256, and addresses on hosts with revisions name one."""
    for source in sources.SOURCES.values():
        for split in source.splits.values():
            if split.download is None:
                continue
            assert len(bytes.fromhex(split.download.sha256)) == 32 or len(bytes.fromhex(split.download.git_blob)) == 20
            if "githubusercontent" in split.download.url or "huggingface" in split.download.url:
                assert re.search("/[0-9a-f]{40}/", split.download.url)


def test_bad_bfcl_folders(tmp_path, capsys):
    def told(**changes):
        official_files.write_bfcl(tmp_path, "base")
        for file, rows in changes.items():
            path = {
                "entry": tmp_path / "BFCL_v4_multi_turn_base.json",
                "truth": tmp_path / "possible_answer" / "BFCL_v4_multi_turn_base.json",
                "document": tmp_path / "multi_turn_func_doc" / "math_api.json",
            }[file]
            path.unlink() if rows is None else path.write_text(official_files.lines(rows))
        status, _, err = run(capsys, "prepare", "bfcl_base", f"--data_dir={tmp_path}", f"--folder={tmp_path / 'out'}")
        assert status == 1 and not (tmp_path / "out" / "bfcl_base").exists()
        return err

    entry, truth = official_files.BFCL_ENTRY, official_files.BFCL_TRUTH
    assert "holds none of BFCL_v4_multi_turn_base.json" in told(entry=None)
    assert "possible_answer/BFCL_v4_multi_turn_base.json does not exist" in told(truth=None)
    assert "math_api.json does not exist" in told(document=None)
    assert "for which possible_answer has no ground truth" in told(truth=[truth | {"id": "other"}])
    assert "has 2 turns, but a ground truth of 1" in told(truth=[truth | {"ground_truth": [[]]}])
    assert "involves 'WebAPI', which is none of" in told(entry=[entry | {"involved_classes": ["WebAPI"]}])
    assert "record 0 has no key 'question'" in told(entry=[{"id": "x"}])
    assert "other than lists of messages" in told(entry=[entry | {"question": [["text"]]}])
    assert "record 0 has no key 'ground_truth'" in told(truth=[{"id": "x"}])
    assert "math_api.json: record 0 has no key 'name'" in told(document=[{}])


def test_the_package_and_the_library_may_be_missing(tmp_path, monkeypatch, official):
    monkeypatch.setattr("trace_jax.data.bfcl.PACKAGE", "no_such_package")
    with pytest.raises(DataError, match="bfcl-eval is not installed: pip install"):
        prepare("bfcl_base", tmp_path, show_progress=False)
    monkeypatch.delitem(sys.modules, "trace_jax.data.builders", raising=False)
    monkeypatch.delattr("trace_jax.data.builders", raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(DataError, match=r"tensorflow-datasets is not installed .*pip install 'trace_jax\[tasks\]'"):
        prepare("aime24", tmp_path, data_dir=official, show_progress=False)


def test_a_reader_that_has_seen_enough(tmp_path):
    """`list | head`: the table's end is not wanted any more."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "trace_jax.data", "list", f"--folder={tmp_path}"]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_one_file_is_of_one_set(tmp_path, official, capsys):
    file = official / "aime.json"
    status, out, err = run(capsys, "prepare", "aime24", "minerva", f"--data_dir={file}", f"--folder={tmp_path / 'x'}")
    assert status == 1 and not out and not (tmp_path / "x").exists()
    assert err == f"error: {file} is one file, of one set; name that set alone, or give a folder"


def test_a_failure_keeps_what_another_version_prepared(tmp_path, official, capsys):
    other = tmp_path / "aime24" / "0.9.0" / "dataset_info.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    (tmp_path / "bad.json").write_text("[")
    command = ("prepare", "aime24", f"--folder={tmp_path}")
    assert run(capsys, *command, f"--data_dir={tmp_path / 'bad.json'}")[0] == 1
    assert list((tmp_path / "aime24").iterdir()) == [other.parent]
    assert run(capsys, *command, f"--data_dir={official}")[0] == 0 and other.exists()


def test_equal_forms_of_an_answer_are_one(tmp_path):
    rows = [
        {"problem": "P", "answer": ["4", "4\n", None]},
        {"problem": "P", "answer": [0.5, "$\\frac{1}{2}$", 2.0]},
        {"problem": "P", "answer": []},
    ]
    (tmp_path / "minerva.json").write_text(json.dumps(rows))
    result = prepare("minerva", tmp_path, data_dir=tmp_path, show_progress=False)
    records = store.load("minerva", tmp_path, split="test")
    assert [record["answer"] for record in records] == ["4", ["0.5", "\\frac{1}{2}", "2"]]
    assert dict(result.left_out) == {"test": 1}
    with pytest.raises(RowError, match="has bool in 'answer'"):
        formats.math_problem({"problem": "P", "answer": ["1", True]}, "x")


def test_too_many_options():
    with pytest.raises(RowError, match="has 27 options, not 2 to 26"):
        formats.choices("Which?", ["x"] * 27)


def test_neither_tensorflow_nor_jax_is_needed(tmp_path, official):
    """In a process of its own: the whole way without them; the order imports jax but starts no backend."""
    code = f"""
import sys
from pathlib import Path
from trace_jax.data import order, store
from trace_jax.data.__main__ import main
assert main(["prepare", "musique", "--data_dir={official}", "--folder={tmp_path}"]) == 0
assert store.load("musique", Path("{tmp_path}"), split="test")[0]["answers"] == ["Stanley", "Stanley, ND"]
assert not {{"tensorflow", "jax", "grain", "torch"}} & set(sys.modules)
assert sorted(order.shuffled(5, seed=0)[i] for i in range(5)) == list(range(5))
assert "tensorflow" not in sys.modules
import jax
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend runs
assert len(jax.devices()) == 3
"""
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "error::DeprecationWarning:trace_jax", "-c", code]
    subprocess.run(command, check=True, env=environment)


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.default_folder() == tmp_path / "trace_jax" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.default_folder() == tmp_path / ".cache" / "trace_jax" / "data"
    with pytest.raises(DataError, match=r"run `python -m trace_jax.data prepare aime24`$"):
        store.load("aime24", split="test")
