"""A generated knowledge base: people, places and works with names that share words, and facts that link them.

Every relation maps the entities of one kind one-to-one onto those of another, and two relations between the same kinds
disagree on every entity. So one wrong entity or one wrong relation on a path of facts always ends at a wrong answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from trace_jax.tasks.lookup import names
from trace_jax.tasks.lookup.search import SearchIndex

KINDS = ("person", "place", "work")
# (kind of the subject, kind of the object) -> the two relations between them
RELATIONS = {
    ("person", "person"): ("mentor", "rival"),
    ("person", "place"): ("born", "home"),
    ("person", "work"): ("reads", "sings"),
    ("place", "person"): ("mayor", "founder"),
    ("place", "place"): ("twin", "market"),
    ("place", "work"): ("anthem", "emblem"),
    ("work", "person"): ("author", "critic"),
    ("work", "place"): ("scene", "origin"),
    ("work", "work"): ("sequel", "model"),
}
ENTITIES = 24  # of each kind
_PARTS = 6  # first words and last words that the names of one kind are made of: 24 of the 36 combinations
_TITLE_WEIGHT = 2  # times that a document's subject is indexed, as search engines weigh titles
_WORDS = {
    "person": (names.PERSON_FIRST, names.PERSON_LAST),
    "place": (names.PLACE_FIRST, names.PLACE_LAST),
    "work": (names.WORK_FIRST, names.WORK_LAST),
}


@dataclasses.dataclass(frozen=True)
class Fact:
    """One document: "mara novak born salt bay"."""

    subject: str  # two words
    relation: str
    object: str  # two words

    @property
    def text(self) -> str:
        """The document as the search tool shows it."""
        return f"{self.subject} {self.relation} {self.object}"


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """One knowledge base. Compared by identity; never changed."""

    entities: Mapping[str, tuple[str, ...]]  # kind -> names
    facts: tuple[Fact, ...]  # the documents, in index order
    objects: Mapping[tuple[str, str], str]  # (subject, relation) -> object
    kinds: Mapping[str, str]  # name -> kind
    index: SearchIndex

    def search(self, words: list[str], limit: int) -> list[Fact]:
        """The best documents for these words, best first."""
        return [self.facts[i] for i in self.index.search(words, limit)]

    def namesakes(self, name: str) -> list[str]:
        """The other entities of the same kind whose names share a word with this one, in a fixed order."""
        first, last = name.split()
        others = self.entities[self.kinds[name]]
        return [other for other in others if other != name and (other.split()[0] == first or other.split()[1] == last)]


def build_world(rng: np.random.Generator) -> World:
    """Draws names and facts; every fact is a document, in a random order."""
    entities = {kind: _draw_names(rng, *_WORDS[kind]) for kind in KINDS}
    facts = []
    for (subject_kind, object_kind), relations in RELATIONS.items():
        for relation, order in zip(relations, _two_maps(rng, subject_kind == object_kind), strict=True):
            for subject, target in zip(entities[subject_kind], order, strict=True):
                facts.append(Fact(subject, relation, entities[object_kind][target]))
    facts = tuple(facts[i] for i in rng.permutation(len(facts)))
    return World(
        entities=entities,
        facts=facts,
        objects={(fact.subject, fact.relation): fact.object for fact in facts},
        kinds={name: kind for kind in KINDS for name in entities[kind]},
        index=SearchIndex([(f"{fact.subject} " * (_TITLE_WEIGHT - 1) + fact.text).split() for fact in facts]),
    )


def words() -> tuple[str, ...]:
    """Every word that a document can hold, in a fixed order."""
    name_words = [word for kind in KINDS for part in _WORDS[kind] for word in part]
    return (*name_words, *(relation for pair in RELATIONS.values() for relation in pair))


def _draw_names(rng: np.random.Generator, firsts: tuple[str, ...], lasts: tuple[str, ...]) -> tuple[str, ...]:
    first = rng.choice(firsts, _PARTS, replace=False)
    last = rng.choice(lasts, _PARTS, replace=False)
    return tuple(f"{first[i // _PARTS]} {last[i % _PARTS]}" for i in rng.permutation(_PARTS**2)[:ENTITIES])


def _two_maps(rng: np.random.Generator, same_kind: bool) -> tuple[np.ndarray, np.ndarray]:
    """Two permutations that differ everywhere and, within one kind, map no entity to itself."""
    identity = np.arange(ENTITIES)
    while True:
        one, two = rng.permutation(ENTITIES), rng.permutation(ENTITIES)
        fixed = same_kind and (np.any(one == identity) or np.any(two == identity))
        if not fixed and not np.any(one == two):
            return one, two
