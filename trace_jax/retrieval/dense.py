"""Dense retrieval: E5 embeddings (Wang et al., 2022) in an exact FAISS inner-product index.

A text is embedded as its model card says: "query: " or "passage: " before it, the mean of the last hidden states over
the tokens, normalised to length 1; the score is the cosine. Passages are embedded with their title, as `contents`
(as Search-R1's index builder does). The index lies in memory: 4 bytes x dimension x passages (64 GB for the 21 million
passages of Wikipedia with E5-base).

Needs the extra `trace_jax[dense]` (torch, faiss-cpu).
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from tqdm import tqdm

from trace_jax.retrieval import store
from trace_jax.retrieval.base import IndexFolderError, Passage

KIND = "e5"
MOST_TOKENS = 512  # a longer text is cut; the length that E5 was trained with
_VECTORS = "vectors.faiss"
_PROBE = "query: which model wrote this index?"
_SAME = 0.99  # cosine of the probe's embeddings above which two models are taken for the same one


class DenseError(Exception):
    """Dense retrieval cannot run: a library or the model is missing. One line."""


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DenseError(f"dense retrieval needs {name}: pip install 'trace_jax[dense]' ({error})") from error


class Encoder:
    """A text encoder of transformers with mean pooling. Safe to use from several threads, one after the other."""

    def __init__(self, model: str, *, device: str = "cpu", batch_size: int = 64):
        """
        Args:
          model: folder of the model and its tokenizer (intfloat/e5-base-v2), or its name on the Hugging Face hub.
          device: of torch, "cpu" or "cuda"; half precision on the latter.
          batch_size: texts embedded at once, at least 1.
        Raises DenseError where torch, transformers, the model or the device are missing, and for no batch.
        """
        if batch_size < 1:
            raise DenseError(f"batch_size is {batch_size}, must be at least 1")
        self._torch, transformers = _library("torch"), _library("transformers")
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            self._model = transformers.AutoModel.from_pretrained(model).eval().to(device)
        except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last: a torch without that device
            raise DenseError(f"the encoder {model} cannot be loaded: {str(error).splitlines()[0]}") from error
        if device != "cpu":
            self._model = self._model.half()
        most = getattr(self._model.config, "max_position_embeddings", MOST_TOKENS)
        self._max_length = min(MOST_TOKENS, most)
        self._device, self._lock, self.model, self.batch_size = device, threading.Lock(), model, batch_size

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, dimension], rows of length 1. The texts bring their prefix."""
        parts = [self._batch(texts[i : i + self.batch_size]) for i in range(0, len(texts), self.batch_size)]
        return np.concatenate(parts)

    def _batch(self, texts: Sequence[str]) -> np.ndarray:
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # its tokenizer refuses lone surrogates
        with self._lock, self._torch.inference_mode():  # a fast tokenizer is not to be used by two threads at once
            tokens = self._tokenizer(
                texts, max_length=self._max_length, truncation=True, padding=True, return_tensors="pt"
            ).to(self._device)
            hidden = self._model(**tokens).last_hidden_state.float()
            mask = tokens["attention_mask"][..., None]
            mean = (hidden * mask).sum(1) / mask.sum(1)
            return self._torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


def build(
    passages: Iterable[Passage], folder: Path, encoder: Encoder, *, progress: bool = False, source: str = ""
) -> Dense:
    """Writes a dense index over the passages into a new folder and opens it.

    Raises IndexFolderError for a folder that has content, DenseError without faiss, and what `passages` raises.
    """
    faiss = _library("faiss")
    with store.new_folder(folder) as part:
        probe = encoder.encode([_PROBE])
        index = faiss.IndexFlatIP(probe.shape[1])
        written = store.write_passages(part, passages)
        with tqdm(unit=" passages", desc="embedding", disable=not progress) as bar:
            while batch := list(itertools.islice(written, encoder.batch_size)):
                index.add(encoder.encode([f"passage: {passage.contents}" for passage in batch]))
                bar.update(len(batch))
        faiss.write_index(index, str(part / _VECTORS))
        fields = {"model": encoder.model, "probe": probe[0].tolist()}
        store.write_manifest(part, KIND, {"passages": index.ntotal, "source": source, **fields})
    return load(folder, encoder)


def model_of(folder: Path) -> str:
    """The model that an index was built with, as it was named then."""
    return store.read_manifest(folder, KIND)["model"]


def load(folder: Path, encoder: Encoder) -> Dense:
    """Opens an index.

    Raises IndexFolderError for a folder that is not a whole index of this kind, or whose model is another one than the
    encoder's; DenseError without faiss.
    """
    faiss = _library("faiss")
    manifest = store.read_manifest(folder, KIND)
    try:
        index = faiss.read_index(str(folder / _VECTORS))
    except RuntimeError as error:
        raise IndexFolderError(f"{folder}/{_VECTORS} cannot be read; build it again") from error
    passages = store.PassageStore(folder)
    if index.ntotal != len(passages):
        raise IndexFolderError(f"{folder}: {index.ntotal} vectors beside {len(passages)} passages; build it again")
    probe, own = np.asarray(manifest["probe"], np.float32), encoder.encode([_PROBE])[0]
    if probe.shape != own.shape or float(probe @ own) < _SAME:
        raise IndexFolderError(f"{folder} was built with the model {manifest['model']}, not with {encoder.model}")
    return Dense(index, passages, encoder)


class Dense:
    """`retrieval.base.Index` by embeddings. Every passage has a score, so there are always `top_k` if there are."""

    kind = KIND

    def __init__(self, index, passages: store.PassageStore, encoder: Encoder):
        self._index, self._passages, self._encoder = index, passages, encoder

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, top_k: int) -> list[Passage]:
        """See `retrieval.base.Searcher`."""
        return self.search_many([query], top_k)[0]

    def search_many(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """`search` of each query, embedded in batches."""
        if not queries:
            return []
        vectors = self._encoder.encode([f"query: {query}" for query in queries])
        scores, numbers = self._index.search(vectors, min(top_k, len(self)))
        found = []
        for row_scores, row in zip(scores, numbers):
            order = np.lexsort((row, -row_scores))  # of equal scores the earlier passage first
            found.append([self._passages.get(int(row[i]), float(row_scores[i])) for i in order])
        return found
