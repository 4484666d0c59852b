import subprocess
import sys

import numpy as np
import pytest

from tests.bm25_formula import formula
from trace_jax.tasks.lookup import names
from trace_jax.tasks.lookup import world as worlds
from trace_jax.tasks.lookup.search import SearchIndex

WORLD = worlds.build_world(np.random.default_rng(0))


# --- search


def test_ranking_equals_the_formula():
    rng = np.random.default_rng(1)
    words = [f"w{i}" for i in range(12)]
    documents = [[words[j] for j in rng.integers(12, size=rng.integers(3, 9))] for _ in range(40)]
    index = SearchIndex(documents)
    for _ in range(50):
        query = [words[j] for j in rng.integers(12, size=rng.integers(1, 4))]
        scores = formula(documents, query)
        found = index.search(query, 5)
        for place, number in enumerate(found):  # of the documents not yet listed none scores higher, noise aside
            rest = [score for i, score in enumerate(scores) if i not in found[:place]]
            assert scores[number] == pytest.approx(max(rest), rel=1e-5)


def test_equal_scores_keep_the_order_of_the_documents():
    index = SearchIndex([["b", "c"], ["a", "b"], ["c", "a"], ["a", "d"], ["b", "a"]])
    assert index.search(["a"], 10) == [1, 2, 3, 4]
    assert index.search(["a"], 2) == [1, 2]


def test_words_that_no_document_holds_change_nothing():
    index = SearchIndex([["a", "b"], ["c", "d"]])
    assert index.search(["zzz"], 2) == []
    assert index.search([], 2) == []
    assert index.search(["zzz", "d", "\ud800"], 2) == [1]


def test_an_empty_index_is_refused():
    with pytest.raises(ValueError, match="search index: there are no documents"):
        SearchIndex([])


def test_search_prints_nothing(capfd):
    SearchIndex([["a"], ["b"]]).search(["a"], 1)
    assert capfd.readouterr() == ("", "")


def test_importing_the_search_starts_no_jax_and_leaves_a_loaded_one_alone():
    program = (
        "import sys, trace_jax.tasks.lookup.search\n"
        "assert 'jax' not in sys.modules, 'jax was imported'\n"
        "again = [name for name in sys.modules if name.startswith(('bm25s', 'trace_jax.tasks.lookup'))]\n"
        "for name in again: del sys.modules[name]\n"
        "import jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "import trace_jax.tasks.lookup.search\n"
        "assert sys.modules['jax'] is jax\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"  # raises once a backend runs
        "assert jax.device_count() == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --- the knowledge base


def test_words_are_distinct_and_lower_case():
    words = worlds.words()
    assert len(set(words)) == len(words) == 6 * 32 + 18
    assert all(word.isalpha() and word.islower() for word in words)
    assert len(names.PERSON_FIRST) == len(names.WORK_LAST) == 32


def test_every_relation_is_one_to_one_and_its_twin_disagrees_everywhere():
    assert len(WORLD.facts) == 18 * worlds.ENTITIES
    for (subject_kind, object_kind), (one, two) in worlds.RELATIONS.items():
        subjects, objects = WORLD.entities[subject_kind], WORLD.entities[object_kind]
        for relation in (one, two):
            assert sorted(WORLD.objects[subject, relation] for subject in subjects) == sorted(objects)
        assert all(WORLD.objects[subject, one] != WORLD.objects[subject, two] for subject in subjects)
        if subject_kind == object_kind:
            for subject in subjects:
                assert subject not in (WORLD.objects[subject, one], WORLD.objects[subject, two])


def test_names_are_distinct_two_words_and_shared_in_parts():
    for kind in worlds.KINDS:
        entities = WORLD.entities[kind]
        assert len(set(entities)) == worlds.ENTITIES
        assert len({name.split()[0] for name in entities}) <= 6
        for name in entities:
            assert WORLD.kinds[name] == kind
            shared = {other for other in entities if set(other.split()) & set(name.split())} - {name}
            assert set(WORLD.namesakes(name)) == shared and shared


@pytest.mark.parametrize("seed", range(3))
def test_an_exact_query_finds_its_document_first(seed):
    world = worlds.build_world(np.random.default_rng(seed))
    for fact in world.facts:
        best, second = world.search([*fact.subject.split(), fact.relation], 2)
        assert best == fact
        assert second.subject != fact.subject or second.relation != fact.relation


def test_a_world_is_a_function_of_its_random_stream():
    again = worlds.build_world(np.random.default_rng(0))
    assert (again.facts, again.entities) == (WORLD.facts, WORLD.entities)
    assert worlds.build_world(np.random.default_rng(1)).facts != WORLD.facts
