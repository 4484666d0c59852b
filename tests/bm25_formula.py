"""The oracle of the tests of BM25."""

from __future__ import annotations

import math


def formula(documents, query):
    """Scores by the published formula over lists of words, k1 = 1.5, b = 0.75, written as loops."""
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in query:
            n = sum(word in other for other in documents)
            f = document.count(word)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            score += idf * f / (f + 1.5 * (0.25 + 0.75 * len(document) / mean))
        scores.append(score)
    return scores
