"""Dense retrieval with a tiny BERT of random weights, against numpy."""

import sys

import numpy as np
import pytest

from trace_jax.retrieval import dense, indexes
from trace_jax.retrieval.base import IndexFolderError, Passage

torch = pytest.importorskip("torch", reason="dense retrieval needs torch: pip install 'trace_jax[dense]'")
pytest.importorskip("faiss", reason="dense retrieval needs faiss-cpu: pip install 'trace_jax[dense]'")
transformers = pytest.importorskip("transformers")

WORDS = "query passage : the a river france loire rhone sea long short red blue green one two three".split()
PASSAGES = [Passage("Loire", "the long river", id="l"), Passage("Rhone", "the sea", id="r"), Passage("", "red")]
PASSAGES += [Passage(f"{one}", f"{two} {one} river", id=f"{one}-{two}") for one in WORDS[5:12] for two in WORDS[8:15]]


def save_model(folder, seed, hidden=16):
    folder.mkdir()
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        initializer_range=0.5,  # of the usual 0.02 all embeddings would be nearly equal
    )
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "bert", seed=0)


@pytest.fixture(scope="module")
def encoder(model):
    return dense.Encoder(model, batch_size=8)


@pytest.fixture(scope="module")
def index(encoder, tmp_path_factory):
    return dense.build(PASSAGES, tmp_path_factory.mktemp("dense") / "index", encoder)


def embed(model, text):
    """One text without padding: mean of the last hidden states over its tokens, length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModel.from_pretrained(model).eval()
    with torch.no_grad():
        hidden = network(**tokenizer(text, return_tensors="pt", truncation=True, max_length=40)).last_hidden_state[0]
    mean = hidden.numpy().astype(np.float64).mean(0)
    return mean / np.linalg.norm(mean)


def test_embeddings_are_the_mean_over_real_tokens_whatever_the_batch(model, encoder):
    texts = ["query: the river", "passage: red", "query: " + "blue " * 100, "passage: loire france sea", ""]
    vectors = encoder.encode(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (5, 16)
    for text, vector in zip(texts, vectors):
        np.testing.assert_allclose(vector, embed(model, text), atol=1e-5)


def test_searches_equal_brute_force_with_the_prefixes(model, encoder, index):
    passages = encoder.encode([f"passage: {passage.contents}" for passage in PASSAGES]).astype(np.float64)
    for query in ["the long river", "sea", "red loire", "zzz"]:
        scores = passages @ embed(model, f"query: {query}")
        found = index.search(query, 10)
        np.testing.assert_allclose([p.score for p in found], np.sort(scores)[::-1][:10], atol=1e-5)
        for passage in found:
            number = next(i for i, p in enumerate(PASSAGES) if (p.id, p.text) == (passage.id, passage.text))
            assert passage.score == pytest.approx(scores[number], abs=1e-5)
            assert passage.title == PASSAGES[number].title


def test_prefixes_matter(encoder):
    one, two = encoder.encode(["query: river", "passage: river"])
    assert one @ two < 0.999


def test_many_queries_at_once_and_more_passages_than_there_are(index):
    queries = ["sea", "river", "\ud800", ""] * 5
    many = index.search_many(queries, 100)
    assert all(len(row) == len(PASSAGES) == len(index) for row in many)
    for row, query in zip(many, queries):
        np.testing.assert_allclose([p.score for p in row], [p.score for p in index.search(query, 100)], atol=1e-5)
    assert index.search_many([], 3) == []


def test_equal_passages_keep_their_order(encoder, tmp_path):
    index = dense.build([Passage("", "sea", id=i) for i in "cab"], tmp_path / "index", encoder)
    assert [p.id for p in index.search("sea", 3)] == ["c", "a", "b"]


def test_a_saved_index_is_opened_with_its_model(model, encoder, tmp_path, capfd):
    folder = tmp_path / "index"
    built = dense.build(iter(PASSAGES), folder, encoder, progress=True)
    assert f"embedding: {len(PASSAGES)} passages" in capfd.readouterr().err
    loaded = indexes.load(folder)
    assert loaded.kind == "e5" and loaded.search("sea", 3) == built.search("sea", 3)
    assert indexes.load(folder, model=model).search("sea", 3) == built.search("sea", 3)


def test_another_model_is_refused(encoder, tmp_path):
    dense.build(PASSAGES[:3], tmp_path / "index", encoder)
    for name, settings in {"other": {"seed": 1}, "wide": {"seed": 0, "hidden": 8}}.items():
        other = save_model(tmp_path / name, **settings)
        with pytest.raises(IndexFolderError, match=f"was built with the model .*/bert, not with {other}"):
            dense.load(tmp_path / "index", dense.Encoder(other))


def test_a_damaged_index_is_one_line(encoder, tmp_path):
    folder = tmp_path / "index"
    dense.build(PASSAGES[:3], folder, encoder)
    vectors = (folder / "vectors.faiss").read_bytes()
    (folder / "vectors.faiss").write_bytes(vectors[:-4])
    with pytest.raises(IndexFolderError, match="vectors.faiss has .* bytes instead of"):
        dense.load(folder, encoder)
    (folder / "vectors.faiss").write_bytes(b"\0" * len(vectors))
    with pytest.raises(IndexFolderError, match="vectors.faiss cannot be read; build it again") as error:
        dense.load(folder, encoder)
    assert "\n" not in str(error.value)


def test_what_is_missing_is_one_line(tmp_path, monkeypatch, model):
    with pytest.raises(dense.DenseError, match="the encoder .*bert cannot be loaded: "):
        dense.Encoder(model, device="cuda:99")
    with pytest.raises(dense.DenseError, match="the encoder .*nowhere cannot be loaded: ") as error:
        dense.Encoder(str(tmp_path / "nowhere"))
    assert "\n" not in str(error.value)
    for library in ("torch", "faiss"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            message = rf"dense retrieval needs {library}: pip install 'trace_jax\[dense\]'"
            with pytest.raises(dense.DenseError, match=message):
                dense.Encoder("x") if library == "torch" else dense.load(tmp_path, None)
