"""Lookup: multi-hop questions over a generated knowledge base, answered through a search tool.

An episode with two hops (a line is a turn, `<` marks the environment's lines):

    silent garden author born           the question: where was the author of "silent garden" born?
    search silent garden author         the policy searches
    < silent garden author mara novak ; silent garden critic hugo falk        the two best documents
    search mara novak born
    < mara novak born salt bay ; mara novak home iron ridge
    answer salt bay                     ends the episode

Words are tokens. The tool ranks all documents by BM25 (`search.py`) over whatever words the policy writes; no match
gives "none", any other line gives "?", and the episode goes on. Reward and success are 1 for the exact answer, ignoring
case and blanks, else 0.

Splits are disjoint because each has knowledge bases of its own: nothing that can be learnt by heart in one is true in
another. The difficulty class is the number of hops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from trace_jax.tasks import base
from trace_jax.tasks.lookup import world as worlds
from trace_jax.tasks.lookup.world import World

MAX_HOPS = 8
SPARE_TURNS = 2  # turns beyond those that the longest question needs
RESULTS = 2  # documents that a search shows
ERROR = "?"
NO_MATCH = "none"
_MAX_WORDS = 8
_MAX_ACTION_CHARACTERS = 200
_SEARCH, _ANSWER, _SEPARATOR = "search", "answer", ";"


@dataclasses.dataclass(frozen=True)
class LookupState:
    """The question, what was read so far, and the answer once there is one."""

    world: World
    start: str  # the entity that the question names
    relations: tuple[str, ...]  # one a hop
    goal: str  # the right answer
    read: tuple[str, ...] = ()  # for each search with a result: the object of its best document
    answer: str | None = None


class Lookup:
    """The task. `difficulty` maps a number of hops (1..8) to its weight; each split draws from `knowledge_bases` many.

    Raises ValueError for a negative seed, for bad difficulty weights, and for fewer than one knowledge base.
    """

    name = "lookup"
    stop = "\n"
    closings = (stop,)
    word_level = True
    preamble = ""
    labels = base.Labels("Question: ", "Result: ", ((f"{_ANSWER} ", "Answer: "), (f"{_SEARCH} ", "Search: ")))
    tool_timeout = None

    def __init__(self, seed: int, difficulty: Mapping[int, float], knowledge_bases: int = 32):
        if knowledge_bases < 1:
            raise ValueError(f"lookup: knowledge_bases is {knowledge_bases}, must be at least 1")
        self._seed = base.check_seed(seed, task=self.name)
        self._difficulty = base.difficulty_of(difficulty, task=self.name, unit="hops", highest=MAX_HOPS)
        self._knowledge_bases = knowledge_bases
        self._world = functools.lru_cache(maxsize=None)(self._build_world)
        self.max_turns = int(self._difficulty.levels[-1]) + 1 + SPARE_TURNS

    def symbols(self) -> tuple[str, ...]:
        """All words of names and relations, the two verbs, and the tool's marks."""
        return (*worlds.words(), _SEARCH, _ANSWER, _SEPARATOR, NO_MATCH, ERROR, self.stop)

    def size(self, split: str) -> None:
        """Without end."""

    def instance(self, split: str, index: int) -> base.Instance:
        """Draws a knowledge base of the split, a number of hops and a path that visits no entity twice."""
        rng = base.instance_rng(self._seed, split, index)
        world = self._world(split, int(rng.integers(self._knowledge_bases)))
        hops = self._difficulty.draw(rng)
        path, relations = _draw_path(rng, world, hops)
        state = LookupState(world, path[0], relations, path[-1])
        text = " ".join((path[0], *relations)) + self.stop
        return base.Instance(f"{self.name}/{split}/{index}", text, state, str(hops))

    def step(self, state: LookupState, action: str) -> base.StepResult:
        """Runs "search WORDS" or takes "answer WORDS". Raises ValueError after the answer."""
        if state.answer is not None:
            raise ValueError("lookup: the episode is over; step must not be called after the answer")
        text = action.removesuffix(self.stop)
        verb, words = _parse(text)
        if verb == _ANSWER:
            return base.StepResult(dataclasses.replace(state, answer=" ".join(words)), "", True, 0)
        if verb != _SEARCH:
            return base.StepResult(state, ERROR + self.stop, False, 0, 1)
        found = state.world.search(words, RESULTS)
        if not found:
            return base.StepResult(state, NO_MATCH + self.stop, False, 1)
        state = dataclasses.replace(state, read=(*state.read, found[0].object))
        shown = f" {_SEPARATOR} ".join(fact.text for fact in found)
        return base.StepResult(state, shown + self.stop, False, 1)

    def score(self, state: LookupState) -> base.Outcome:
        """1 if the answer is the goal, else 0; no answer scores 0."""
        right = float(state.answer is not None and _normalise(state.answer) == _normalise(state.goal))
        return base.Outcome(reward=right, success=right)

    def expert(self, state: LookupState) -> str:
        """Follows the relations from what was read last, then answers with it."""
        hop = len(state.read)
        entity = state.read[-1] if state.read else state.start
        if hop >= len(state.relations):
            return f"{_ANSWER} {entity}{self.stop}"
        return f"{_SEARCH} {entity} {state.relations[hop]}{self.stop}"

    def slip(self, state: LookupState, rng: np.random.Generator) -> str:
        """The expert's search for an entity of a similar name, or with the other relation between the same kinds.

        The answer line has no slip: it only repeats what was read last.
        """
        hop = len(state.read)
        if hop >= len(state.relations):
            return self.expert(state)
        entity, relation = state.read[-1] if state.read else state.start, state.relations[hop]
        if rng.random() < 0.5:
            pair = next(pair for pair in worlds.RELATIONS.values() if relation in pair)
            relation = next(other for other in pair if other != relation)
        else:
            namesakes = state.world.namesakes(entity)
            entity = namesakes[rng.integers(len(namesakes))]
        return f"{_SEARCH} {entity} {relation}{self.stop}"

    def _build_world(self, split: str, number: int) -> World:
        # a child of the stream of the instance with this number, so that no instance shares its draws
        return worlds.build_world(base.instance_rng(self._seed, split, number).spawn(1)[0])


def _parse(text: str) -> tuple[str, list[str]]:
    """The verb of a line and its words; ("", []) for a line without words, with too many, or too long."""
    if len(text) > _MAX_ACTION_CHARACTERS or "\n" in text:
        return "", []
    verb, *words = text.split() or [""]
    return (verb, words) if 1 <= len(words) <= _MAX_WORDS else ("", [])


def _draw_path(rng: np.random.Generator, world: World, hops: int) -> tuple[list[str], tuple[str, ...]]:
    """Entities [hops + 1], all different, and the relations [hops] between them."""
    while True:
        kind = worlds.KINDS[rng.integers(len(worlds.KINDS))]
        path, relations = [world.entities[kind][rng.integers(worlds.ENTITIES)]], []
        for _ in range(hops):
            possible = [relation for kinds, pair in worlds.RELATIONS.items() if kinds[0] == kind for relation in pair]
            relations.append(possible[rng.integers(len(possible))])
            path.append(world.objects[path[-1], relations[-1]])
            kind = world.kinds[path[-1]]
        if len(set(path)) == len(path):
            return path, tuple(relations)


def _normalise(text: str) -> str:
    return " ".join(text.casefold().split())
