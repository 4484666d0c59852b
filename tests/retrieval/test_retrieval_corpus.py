import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.retrieval import corpus
from trace_jax.retrieval.base import CorpusError, Passage, split_contents


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# --- the text form of a passage


@pytest.mark.parametrize(
    "contents, title, text",
    [
        ('"Evan Morris"\nEvan L. Morris was a lobbyist.', "Evan Morris", "Evan L. Morris was a lobbyist."),
        ('""Weird Al" Yankovic"\nA singer.\nTwo lines.', '"Weird Al" Yankovic', "A singer.\nTwo lines."),
        ("no title line", "", "no title line"),
        ("Title without quotes\ntext", "", "Title without quotes\ntext"),
        ('"only a title"', "", '"only a title"'),
        ('"\ntext', "", '"\ntext'),
        ('""\n"a"\nb', "", '"a"\nb'),
        ("", "", ""),
    ],
)
def test_a_title_is_a_first_line_in_quotes(contents, title, text):
    assert split_contents(contents) == (title, text)


@given(st.text().map(lambda text: text.replace("\n", " ")), st.text(alphabet='ab" \n') | st.text())
def test_contents_are_read_back_as_they_were(title, text):
    assert split_contents(Passage(title, text).contents) == (title, text)


def test_a_text_without_a_title_stays_as_it_is_unless_it_looks_titled():
    assert Passage("", "no title line").contents == "no title line"
    assert Passage("", '"a"\nb').contents == '""\n"a"\nb'


# --- corpus files


def test_both_formats_are_read_in_order(tmp_path):
    path = write(
        tmp_path / "c.jsonl",
        {"id": "0", "contents": '"Ümlaut"\nfirst'},
        {"id": 1, "contents": "no title"},
        {"title": "Two\nlines", "text": "third"},
        {"title": None, "text": "fourth"},
    )
    assert list(corpus.read(path)) == [
        Passage("Ümlaut", "first", id="0"),
        Passage("", "no title", id="1"),
        Passage("Two lines", "third"),
        Passage("", "fourth"),
    ]


def test_equal_and_blank_passages_are_left_out(tmp_path):
    path = write(
        tmp_path / "c.jsonl",
        {"id": "a", "contents": '"T"\nx'},
        {"id": "b", "title": "T", "text": "x"},
        {"title": "T", "text": "y"},
        {"title": "", "text": " \n"},
        {"title": "T", "text": ""},
    )
    path.write_text(path.read_text() + "\n\n")
    assert [(p.id, p.title, p.text) for p in corpus.read(path)] == [("a", "T", "x"), ("", "T", "y"), ("", "T", "")]


def test_a_gzipped_corpus_is_the_same_and_its_cut_is_noticed(tmp_path, capfd):
    records = [{"id": str(i), "contents": f'"T{i}"\ntext {i * 7919}'} for i in range(3000)]
    plain = write(tmp_path / "c.jsonl", *records)
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(corpus.read(packed)) == list(corpus.read(plain, progress=True))
    assert "100%" in capfd.readouterr().err
    packed.write_bytes(packed.read_bytes()[:-2000])
    with pytest.raises(CorpusError, match=r"c\.jsonl\.gz: cut off or damaged after line \d+ "):
        list(corpus.read(packed))


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"title": "a", "text": "b"}\nnot json\n')
    passages = corpus.read(path)
    assert next(passages) == Passage("a", "b")
    with pytest.raises(CorpusError, match=r"c\.jsonl:2: is no JSON .*; a corpus has one JSON object a line"):
        next(passages)


@pytest.mark.parametrize(
    "line, message",
    [
        ("[1]", "c.jsonl:1: is a list; a passage is a JSON object"),
        ('{"id": 3, "body": "x"}', 'c.jsonl:1: has the keys id, body; a passage has "contents", or "title" and "text"'),
        ('{"title": 3, "text": "x"}', "c.jsonl:1: has the keys title, text"),
        ("{}", "c.jsonl:1: has the keys none"),
        ('{"contents": "cut', "c.jsonl:1: is no JSON"),
        ("", "c.jsonl: there is no passage in it"),
    ],
)
def test_a_foreign_file_is_one_line(tmp_path, line, message):
    (tmp_path / "c.jsonl").write_text(line)
    with pytest.raises(CorpusError) as error:
        list(corpus.read(tmp_path / "c.jsonl"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_and_a_binary_one(tmp_path):
    with pytest.raises(CorpusError, match="nowhere.jsonl: cannot be read"):
        list(corpus.read(tmp_path / "nowhere.jsonl"))
    (tmp_path / "b").write_bytes(b"\x80\x81\xff\x00" * 10)
    with pytest.raises(CorpusError, match="b:1: is no JSON"):
        list(corpus.read(tmp_path / "b"))


def test_paragraphs_of_a_data_set():
    paragraphs = [{"title": "A", "text": "x"}, {"title": "A", "text": "x"}, {"title": "B", "text": "x"}]
    assert list(corpus.from_paragraphs(paragraphs)) == [Passage("A", "x"), Passage("B", "x")]
    with pytest.raises(CorpusError, match="there are no paragraphs"):
        list(corpus.from_paragraphs([]))
    with pytest.raises(CorpusError, match="paragraph 1: has the keys title;"):
        list(corpus.from_paragraphs([{"title": "A", "text": "x"}, {"title": "B"}]))
