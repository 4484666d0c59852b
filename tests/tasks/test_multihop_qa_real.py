"""The family and its default knowledge base on real records."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import multihop_samples as samples
from trace_jax.retrieval.base import CorpusError, IndexFolderError
from trace_jax.tasks.base import Outcome
from trace_jax.tasks.chat.family import Reply, ToolCall
from trace_jax.tasks.multihop_qa import paragraphs
from trace_jax.tasks.multihop_qa.family import MultihopQa


@pytest.fixture(scope="module")
def hotpotqa():
    return samples.hotpotqa()


@pytest.fixture(scope="module")
def index(hotpotqa, tmp_path_factory):
    return paragraphs.index(hotpotqa, tmp_path_factory.mktemp("real"), name="hotpotqa/train")


def test_supporting_paragraphs_are_found(hotpotqa, index):
    """Of 400 supporting paragraphs among 1,971, 372 are in the first ten of a search for the bare question."""
    assert len(index) == 1971
    start, found = time.perf_counter(), 0
    for record in hotpotqa:
        titles = {passage.title for passage in index.search(record["question"], 10)}
        found += len(titles & record["support"])
    assert time.perf_counter() - start < 5
    assert found / sum(len(record["support"]) for record in hotpotqa) == pytest.approx(0.93, abs=0.01)


@pytest.mark.parametrize("name", ["hotpotqa", "two_wiki", "musique", "bamboogle"])
def test_the_expert_solves_every_question(name, index):
    family = MultihopQa(index)
    failures = []
    records = getattr(samples, name)()
    for record in records:
        state, done = family.ask(record).state, False
        while not done:
            reaction = family.react(state, family.expert(state))
            state, done = reaction.state, reaction.done
        if family.score(state) != Outcome(reward=1.0, success=1.0):
            failures.append(record["id"])
    assert not failures and len(records) >= 125


def test_an_answer_of_another_question_fails(hotpotqa, index):
    """The score tells questions apart: of 199 answers of the next question, few fit (yes and no do, by chance)."""
    family = MultihopQa(index)
    right = 0
    for record, other in zip(hotpotqa, hotpotqa[1:]):
        reaction = family.react(family.ask(record).state, Reply(f"\\boxed{{{other['answers'][0]}}}"))
        right += family.score(reaction.state).success
    assert right <= 10


def test_observations_of_real_searches_are_bounded(hotpotqa, index):
    family = MultihopQa(index)
    for record in hotpotqa[:20]:
        reply = Reply("", (ToolCall("local_search", {"query": record["question"], "top_k": 50}),))
        (message,) = family.react(family.ask(record).state, reply).messages
        assert message.content.startswith("[1] ") and len(message.content) <= 50 * 312


# --- the kept index


def test_an_index_is_built_once_for_the_same_records(tmp_path):
    records = [{"paragraphs": [{"title": "T", "text": f"text {i}"}]} for i in range(3)]
    first = paragraphs.index(records, tmp_path, name="set/train", progress=True)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("set-train-3-")
    stamp = (folder / "index.json").stat().st_mtime_ns
    again = paragraphs.index(records, tmp_path, name="set/train")
    assert (folder / "index.json").stat().st_mtime_ns == stamp
    assert again.search("text", 3) == first.search("text", 3) and len(again) == 3
    paragraphs.index(records[:2], tmp_path, name="set/train")
    changed = [*records[:2], {"paragraphs": [{"title": "T", "text": "new"}]}]
    assert len(paragraphs.index(changed, tmp_path, name="set/train").search("new", 3)) == 1
    assert len(list(tmp_path.iterdir())) == 3


class Counted(list):
    """Records that count how often one of them is read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_joined_sets_are_read_only_where_they_are_asked_for(tmp_path):
    record = lambda i: {"paragraphs": [{"title": "T", "text": f"text {i}"}]}
    sets = [Counted(map(record, range(300))), Counted(), Counted([record(300)])]
    joined = paragraphs.Joined(sets)
    assert len(joined) == 301 and len(paragraphs.Joined([])) == 0
    assert [joined[i] for i in (0, 299, 300)] == [record(0), record(299), record(300)]
    assert list(joined) == [*sets[0], *sets[2]]
    for index in (-1, 301):
        with pytest.raises(IndexError, match=f"record {index} of 301"):
            joined[index]
    assert len(paragraphs.index(joined, tmp_path, name="set")) == 301
    sets[0].reads = 0
    assert len(paragraphs.index(joined, tmp_path, name="set")) == 301
    assert 0 < sets[0].reads <= 64


def test_several_builders_at_once_share_one_index(tmp_path):
    records = [{"paragraphs": [{"title": "T", "text": f"text {i}"}]} for i in range(500)]
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: paragraphs.index(records, tmp_path, name="set"), range(4)))
    assert [len(index) for index in built] == [500] * 4 and len(list(tmp_path.iterdir())) == 1


def test_records_without_paragraphs_and_damaged_indexes_are_named(tmp_path):
    with pytest.raises(CorpusError, match="there are no paragraphs"):
        paragraphs.index([{"paragraphs": []}], tmp_path, name="set")
    records = [{"paragraphs": [{"title": "T", "text": "x"}]}]
    paragraphs.index(records, tmp_path, name="set")
    (folder,) = tmp_path.iterdir()
    (folder / "passages.jsonl").write_text("")
    with pytest.raises(IndexFolderError, match="passages.jsonl has 0 bytes instead of"):
        paragraphs.index(records, tmp_path, name="set")
