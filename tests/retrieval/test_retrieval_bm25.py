import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bm25_formula import formula
from trace_jax.retrieval import bm25
from trace_jax.retrieval.base import CorpusError, IndexFolderError, Passage

PASSAGES = [
    Passage("Loire", "The Loire is the longest river of France.", id="l"),
    Passage("Rhône", "The Rhône is a river of Switzerland and France.", id="r"),
    Passage("Antonín Dvořák", "Dvořák was a Czech composer.", id="d"),
    Passage("Straße", "Eine STRASSE in Köln.", id="s"),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return bm25.build(PASSAGES, tmp_path_factory.mktemp("bm25") / "index", source="rivers")


# --- words


def test_words_are_folded_and_stop_words_left_out():
    assert bm25.words("The Rhône, of FRANCE's 2nd river_x!") == ["rhone", "france", "s", "2nd", "river_x"]
    assert bm25.words("Straße ﬁne Ｗｉｄｅ") == ["strasse", "fine", "wide"]
    assert bm25.words("Dvo\u0159a\u0301k") == bm25.words("dvor\u030cák") == ["dvorak"]
    assert bm25.words("the of and") == bm25.words("") == bm25.words("?!") == []
    assert bm25.words("東京 тест") == ["東京", "тест"]


# --- search


def test_ranking_and_scores_equal_the_formula(tmp_path):
    rng = np.random.default_rng(1)
    vocabulary = [f"w{i}" for i in range(12)]
    documents = [[vocabulary[j] for j in rng.integers(12, size=rng.integers(3, 9))] for _ in range(40)]
    passages = [Passage(words[0], " ".join(words[1:]), id=str(i)) for i, words in enumerate(documents)]
    index = bm25.build(passages, tmp_path / "index")
    for _ in range(50):
        query = [vocabulary[j] for j in rng.integers(12, size=rng.integers(1, 4))]
        scores = formula(documents, query)
        found = index.search(" ".join(query), 5)
        for place, passage in enumerate(found):  # of those not yet listed none scores higher, noise aside
            listed = {int(p.id) for p in found[:place]}
            highest = max(score for i, score in enumerate(scores) if i not in listed)
            assert passage.score == pytest.approx(scores[int(passage.id)], rel=1e-5)
            assert passage.score == pytest.approx(highest, rel=1e-5)
        assert len(found) == min(5, sum(score > 0 for score in scores))


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=30), st.integers(1, 8))
def test_best_is_a_stable_sort_cut_off(scores, top_k):
    expected = sorted((i for i, s in enumerate(scores) if s > 0), key=lambda i: (-scores[i], i))[:top_k]
    assert bm25.best(np.array(scores, np.float32), top_k).tolist() == expected


def test_a_search_for_nothing_is_refused():
    with pytest.raises(ValueError, match="top_k is 0, must be at least 1"):
        bm25.best(np.ones(3), 0)


def test_passages_come_back_whole(index):
    found = index.search("rhone", 10)
    assert [(p.title, p.text, p.id) for p in found] == [("Rhône", PASSAGES[1].text, "r")]
    assert found[0].score > 0
    assert [p.id for p in index.search("river France", 10)] == ["l", "r"]
    assert [p.id for p in index.search("river France", 1)] == ["l"]
    assert [p.id for p in index.search("strasse koln", 3)] == ["s"]
    assert len(index) == 4


@pytest.mark.parametrize("query", ["", "the", "zzz", "\x00", "\ud800", "🦎", "a" * 100_000])
def test_odd_queries_find_nothing(index, query):
    assert index.search(query, 10) == []


def test_many_queries_are_searches_of_each(index):
    queries = ["Loire", "nothing", "composer"]
    assert index.search_many(queries, 2) == [index.search(query, 2) for query in queries]
    assert index.search_many([], 2) == []


def test_equal_scores_keep_the_order_of_the_passages(tmp_path):
    index = bm25.build([Passage("", f"same {word}", id=word) for word in "dbckefgh"], tmp_path / "index")
    assert "".join(p.id for p in index.search("same", 5)) == "dbcke"


def test_threads_share_an_index(index):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: index.search("river of France", 3), range(64)))
    assert all(each == found[0] for each in found)


def test_passages_without_a_single_word(tmp_path):
    assert len(bm25.build([Passage("!", "?"), Passage("", "x")], tmp_path / "one").search("x", 3)) == 1
    with pytest.raises(CorpusError, match="none of the 2 passages holds a word"):
        bm25.build([Passage("!", "?"), Passage("The", "")], tmp_path / "none")


def test_unicode_that_no_file_can_hold_is_replaced(tmp_path):
    index = bm25.build([Passage("bad \ud800", "word \udfff end", id="x")], tmp_path / "index")
    assert index.search("word", 1)[0].title == "bad ?"


# --- folders


def test_a_loaded_index_is_the_built_one_and_stays_on_disk(index, tmp_path):
    folder = tmp_path / "sub" / "index"
    built = bm25.build(iter(PASSAGES), folder)
    loaded = bm25.load(folder)
    assert loaded.search("river France", 3) == built.search("river France", 3) == index.search("river France", 3)
    assert isinstance(loaded._model.scores["data"], np.memmap)


def test_a_folder_in_use_is_not_overwritten(tmp_path):
    bm25.build(PASSAGES, tmp_path / "index")
    with pytest.raises(IndexFolderError, match="index exists already; choose another folder"):
        bm25.build(PASSAGES, tmp_path / "index")


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def passages():
        yield PASSAGES[0]
        raise CorpusError("line 2")

    with pytest.raises(CorpusError, match="line 2"):
        bm25.build(passages(), tmp_path / "index")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_process_filled_meanwhile_is_kept(tmp_path):
    def passages():
        yield PASSAGES[0]
        bm25.build(PASSAGES, tmp_path / "index")

    with pytest.raises(IndexFolderError, match="exists already"):
        bm25.build(passages(), tmp_path / "index")
    assert len(bm25.load(tmp_path / "index")) == 4 and len(list(tmp_path.iterdir())) == 1


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda f: cut(f / "data.csc.index.npy"), "index.npy has .* bytes instead of .*: the index was cut off"),
        (lambda f: cut(f / "passages.jsonl"), "passages.jsonl has .* bytes instead of"),
        (lambda f: (f / "vocab.index.json").unlink(), "vocab.index.json is missing"),
        (lambda f: cut(f / "index.json"), "holds no index .*; build one: python -m trace_jax.retrieval build"),
        (lambda f: (f / "index.json").unlink(), "holds no index"),
        (lambda f: (f / "index.json").write_text('{"format": "other"}'), "is of another format than"),
        (lambda f: (f / "index.json").write_text("[]"), "is of another format than"),
        (lambda f: change(f / "index.json", b'"bm25"', b'"e5"'), "holds an index of kind e5, not bm25"),
        (lambda f: change(f / "index.json", b'"words": 1', b'"words": 0'), "built by another version"),
        (lambda f: change(f / "vocab.index.json", b"{", b"["), "the BM25 index cannot be read"),
        (lambda f: change(f / "params.index.json", b'docs": 4', b'docs": 5'), "an index of 5 passages beside 4"),
        (lambda f: change(f / "offsets.npy", b"NUMPY", b"OTHER"), "its passages cannot be read"),
    ],
)
def test_a_damaged_or_foreign_folder_is_one_line(tmp_path, spoil, message):
    folder = tmp_path / "index"
    bm25.build(PASSAGES, folder)
    spoil(folder)
    with pytest.raises(IndexFolderError, match=message) as error:
        bm25.load(folder)
    assert "\n" not in str(error.value)


def change(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def test_importing_bm25_starts_no_jax_and_leaves_a_loaded_one_alone():
    program = (
        "import sys, trace_jax.retrieval.bm25\n"
        "assert 'jax' not in sys.modules, 'jax was imported'\n"
        "again = [name for name in sys.modules if name.startswith(('bm25s', 'trace_jax.retrieval'))]\n"
        "for name in again: del sys.modules[name]\n"
        "import jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "import trace_jax.retrieval.bm25\n"
        "assert sys.modules['jax'] is jax\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"  # raises once a backend runs
        "assert jax.device_count() == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
