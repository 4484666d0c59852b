import numpy as np
import pytest

from trace_jax.tasks import base
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.tasks.lookup import world as worlds
from trace_jax.tasks.lookup.search import SearchIndex
from trace_jax.tasks.lookup.task import MAX_HOPS, Lookup, LookupState
from trace_jax.tasks.lookup.world import Fact, World

TASK = Lookup(seed=0, difficulty={n: 1.0 for n in range(1, 8)}, knowledge_bases=4)
FACTS = (
    Fact("silent garden", "author", "mara novak"),
    Fact("silent garden", "critic", "hugo falk"),
    Fact("mara novak", "born", "salt bay"),
    Fact("mara falk", "born", "iron bay"),
)
# By hand, documents of six words: the query "mara novak born" matches document 2 in all three words,
# 3 in "mara" and "born", 0 in "mara novak" (once each, as an object).
SMALL = World(
    entities={
        "work": ("silent garden",),
        "person": ("mara novak", "mara falk", "hugo falk"),
        "place": ("salt bay", "iron bay"),
    },
    facts=FACTS,
    objects={(fact.subject, fact.relation): fact.object for fact in FACTS},
    kinds={
        "silent garden": "work",
        "mara novak": "person",
        "mara falk": "person",
        "hugo falk": "person",
        "salt bay": "place",
        "iron bay": "place",
    },
    index=SearchIndex([f"{fact.subject} {fact.text}".split() for fact in FACTS]),
)
START = LookupState(SMALL, "silent garden", ("author", "born"), "salt bay")


def plain(instance):
    """An instance without its knowledge base, which is compared by identity."""
    state = instance.state
    return instance.uid, instance.text, instance.group, state.goal, state.world.facts


# --- instances


def test_an_instance_is_a_function_of_seed_split_and_index():
    same = Lookup(0, {n: 1.0 for n in range(1, 8)}, knowledge_bases=4)
    other = Lookup(1, {n: 1.0 for n in range(1, 8)}, knowledge_bases=4)
    backwards = [plain(same.instance("train", i)) for i in reversed(range(20))][::-1]
    assert backwards == [plain(TASK.instance("train", i)) for i in range(20)]
    assert backwards != [plain(other.instance("train", i)) for i in range(20)]


def test_the_goal_is_where_the_facts_lead():
    for i in range(200):
        instance = TASK.instance("train", i)
        first, last, *relations = instance.text.split()
        facts = {(fact.subject, fact.relation): fact.object for fact in instance.state.world.facts}
        path = [f"{first} {last}"]
        for relation in relations:
            path.append(facts[path[-1], relation])
        assert path[-1] == instance.state.goal
        assert len(set(path)) == len(path)  # no entity twice, so no hop can be left out
        assert instance.group == str(len(relations))
        assert instance.uid == f"lookup/train/{i}"


def test_splits_share_no_knowledge_base():
    facts = {split: {TASK.instance(split, i).state.world.facts for i in range(40)} for split in base.SPLITS}
    assert [len(found) for found in facts.values()] == [4, 4, 4]
    assert len(set.union(*facts.values())) == 12


def test_difficulty_weights_decide_the_groups():
    task = Lookup(0, {2: 1.0, 3: 3.0}, knowledge_bases=1)
    groups = [task.instance("train", i).group for i in range(400)]
    assert set(groups) == {"2", "3"}
    assert groups.count("3") / 400 == pytest.approx(0.75, abs=0.11)  # five standard errors
    assert task.max_turns == 3 + 1 + 2


# --- the environment


def test_an_episode_by_hand():
    first = TASK.step(START, "search silent garden author\n")
    assert first.observation == "silent garden author mara novak ; silent garden critic hugo falk\n"
    assert (first.done, first.tool_calls) == (False, 1)
    second = TASK.step(first.state, "search mara novak born\n")
    assert second.observation == "mara novak born salt bay ; mara falk born iron bay\n"
    right, wrong = TASK.step(second.state, "answer salt bay\n"), TASK.step(second.state, "answer iron bay\n")
    assert (right.observation, right.done, right.tool_calls) == ("", True, 0)
    assert TASK.score(right.state) == base.Outcome(1.0, 1.0)
    assert wrong.done and TASK.score(wrong.state) == base.Outcome(0.0, 0.0)
    assert TASK.score(second.state) == base.Outcome(0.0, 0.0)
    assert START.read == () and second.state.answer is None  # nothing was changed in place
    with pytest.raises(ValueError, match="the episode is over"):
        TASK.step(right.state, "search mara\n")


def test_an_answer_is_compared_without_case_and_blanks():
    assert TASK.score(TASK.step(START, "answer  Salt   BAY ").state).success == 1.0
    assert TASK.score(TASK.step(START, "answer salt bay salt bay").state).success == 0.0


def test_a_search_takes_any_words():
    assert TASK.step(START, "search bay").observation == "mara novak born salt bay ; mara falk born iron bay\n"
    result = TASK.step(START, "search zebra \ud800")
    assert (result.observation, result.done, result.tool_calls) == ("none\n", False, 1)
    assert result.state == START


@pytest.mark.parametrize(
    "action",
    [
        "",
        "\n",
        "search",
        "answer\n",
        "find mara novak",
        "mara novak born",
        "search mara\nanswer salt bay",
        "answer a b c d e f g h i",
        "search " + "mara " * 9,
        "search " + "9" * 5_000_000,
        "answer " + "x " * 1_000_000,
        "__import__('os').system('true')",
        "\ud800",
        "\x00",
    ],
)
def test_malformed_and_hostile_actions_get_an_error_and_change_nothing(action):
    result = TASK.step(START, action)
    assert (result.observation, result.done, result.tool_calls) == ("?\n", False, 0)
    assert result.state == START


def test_every_text_is_within_the_vocabulary():
    tokenizer = tokenizers.build_tokenizer(TASK.symbols(), TASK.word_level)
    assert 200 <= len(tokenizer) <= 300
    rng = np.random.default_rng(0)
    for i in range(100):
        instance = TASK.instance("train", i)
        state = instance.state
        texts = [instance.text, TASK.slip(state, rng)]
        texts += [TASK.step(state, action).observation for action in ("", "search x")]
        while state.answer is None:
            texts.append(TASK.expert(state))
            result = TASK.step(state, texts[-1])
            state = result.state
            texts.append(result.observation)
        for text in texts:
            tokens = tokenizers.encode(tokenizer, text)
            assert tokenizer.unk_token_id not in tokens
            assert tokenizers.decode(tokenizer, tokens) == text


# --- the scripts


def test_the_expert_always_solves():
    for i in range(200):
        state, turns = TASK.instance("eval", i).state, 0
        while state.answer is None:
            state = TASK.step(state, TASK.expert(state)).state
            turns += 1
        assert TASK.score(state).success == 1.0
        assert turns == len(state.relations) + 1 <= TASK.max_turns


def test_one_slip_anywhere_loses_the_episode():
    rng = np.random.default_rng(0)
    kinds = set()
    for i in range(300):
        state = TASK.instance("demo", i).state
        at = rng.integers(len(state.relations))
        while state.answer is None:
            slips = len(state.read) == at
            action = TASK.slip(state, rng) if slips else TASK.expert(state)
            if slips:
                kinds.add(action.split()[3] == state.relations[at])
            state = TASK.step(state, action).state
        assert TASK.score(state).success == 0.0
    assert kinds == {True, False}  # wrong entities and wrong relations


def test_the_answer_has_no_slip():
    state = LookupState(SMALL, "silent garden", ("author",), "mara novak", read=("mara novak",))
    assert TASK.slip(state, np.random.default_rng(0)) == TASK.expert(state) == "answer mara novak\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -2, "difficulty": {1: 1.0}}, "lookup: seed is -2"),
        ({"seed": 0, "difficulty": {}}, "lookup: difficulty is empty"),
        ({"seed": 0, "difficulty": {MAX_HOPS + 1: 1.0}}, "level 9; hops are integers in 1..8"),
        ({"seed": 0, "difficulty": {1: 1.0}, "knowledge_bases": 0}, "knowledge_bases is 0, must be at least 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Lookup(**arguments)


def test_relations_between_two_kinds_come_in_pairs():
    assert all(len(pair) == 2 for pair in worlds.RELATIONS.values())
    assert {kinds for kinds in worlds.RELATIONS} == {(a, b) for a in worlds.KINDS for b in worlds.KINDS}
