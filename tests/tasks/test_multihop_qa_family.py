import copy
import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.retrieval.base import Passage, RetrievalError
from trace_jax.tasks.base import Outcome
from trace_jax.tasks.chat.family import BadCall, Message, Reply, ToolCall
from trace_jax.tasks.multihop_qa import prompts, score, tool
from trace_jax.tasks.multihop_qa.family import MOST_CALLS, MultihopQa, State

PLACE = "Nelahozeves"
RECORD = {"id": "q1", "question": "Where was Dvořák born? ", "answers": [PLACE, PLACE, " "], "group": "x"}


class Searches:
    """A searcher that notes what it was asked and gives what it was made with."""

    def __init__(self, answer=lambda query, top_k: [Passage("T", f"about {query}", 1.0)]):
        self.asked, self._answer = [], answer

    def search(self, query, top_k):
        self.asked.append((query, top_k))
        return self._answer(query, top_k)


def down(query, top_k):
    raise RetrievalError("http://x/retrieve: ConnectError (tries: 4)" + "!" * 1000)


def call(name=tool.NAME, **arguments):
    return ToolCall(name, arguments)


def contents(reaction):
    assert all(message.role == "tool" and message.name == "local_search" for message in reaction.messages)
    return [message.content for message in reaction.messages]


def react(*calls, searcher=None, **settings):
    family = MultihopQa(searcher or Searches(), **settings)
    return family.react(family.ask(RECORD).state, Reply("", tuple(calls)))


# --- questions


def test_a_record_becomes_a_question():
    question = MultihopQa(Searches()).ask(RECORD)
    assert question.messages == (Message("system", prompts.SYSTEM), Message("user", "Where was Dvořák born?"))
    assert question.state == State("Where was Dvořák born?", ("Nelahozeves",))
    assert question.group == "x" and question.tools == (tool.SCHEMA,)
    function = question.tools[0]["function"]
    assert function["name"] == "local_search" and function["parameters"]["required"] == ["query"]
    assert set(function["parameters"]["properties"]) == {"query", "top_k"}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"question": ""}, "record 'q1' has no question"),
        ({"question": 3}, "record 'q1' has no question"),
        ({"answers": []}, "record 'q1' has no answers"),
        ({"answers": [" "]}, "record 'q1' has no answers"),
        ({"answers": "Nelahozeves"}, "they are a list of texts"),
        ({"answers": [1]}, "they are a list of texts"),
        ({"answers": None}, "they are a list of texts"),
    ],
)
def test_a_foreign_record_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MultihopQa(Searches()).ask(RECORD | change)


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="tool_timeout is 10 and turn_seconds 10; the former must be above the latter"):
        MultihopQa(Searches(), tool_timeout=10, turn_seconds=10)
    with pytest.raises(ValueError, match="document_characters is 0, must be at least 1"):
        MultihopQa(Searches(), document_characters=0)
    family = MultihopQa(Searches(), max_turns=3)
    assert (family.max_turns, family.tool_timeout, MultihopQa(Searches()).max_turns) == (3, 120.0, 5)


# --- searches


def test_several_searches_of_a_turn_are_answered_in_order():
    searcher = Searches()
    reaction = react(call(query=" one "), call(query="two", top_k=3), searcher=searcher)
    assert searcher.asked == [("one", 10), ("two", 3)]
    assert contents(reaction) == ["[1] T\nabout one", "[1] T\nabout two"]
    assert (reaction.done, reaction.tool_calls, reaction.state.turns) == (False, 2, 1)


@pytest.mark.parametrize(
    "top_k, used",
    [
        (None, 10),
        (1, 1),
        (50, 50),
        (51, 50),
        (10**400, 50),
        (0, 1),
        (-5, 1),
        (4.0, 4),
        (1e300, 50),
        ("7", 7),
        (" 7.0", 7),
    ],
)
def test_top_k_is_clamped(top_k, used):
    searcher = Searches()
    assert react(call(query="q", top_k=top_k), searcher=searcher).tool_calls == 1
    assert searcher.asked == [("q", used)]


@pytest.mark.parametrize("top_k", [True, 2.5, float("nan"), float("inf"), "ten", "9" * 10_000, "nan", [], {}, ""])
def test_a_top_k_that_is_no_number_is_told(top_k):
    searcher = Searches()
    reaction = react(call(query="q", top_k=top_k), searcher=searcher)
    assert contents(reaction) == ["Error: top_k must be an integer from 1 to 50"]
    assert reaction.tool_calls == 0 and not searcher.asked and not reaction.done


@pytest.mark.parametrize("arguments", [{}, {"query": ""}, {"query": " \n"}, {"query": 3}, {"query": ["q"]}, {"q": "x"}])
def test_a_query_that_is_none_is_told(arguments):
    reaction = react(call(**arguments))
    assert contents(reaction) == ["Error: query must be a text that is not empty"] and reaction.tool_calls == 0


def test_odd_queries_reach_the_searcher_in_a_form_it_can_take():
    searcher = Searches()
    react(call(query="x" * 10**6), call(query="\ud800 東京", unknown=1), searcher=searcher)
    assert searcher.asked == [("x" * tool.MOST_QUERY, 10), ("? 東京", 10)]


def test_an_unknown_tool_and_an_unreadable_call_are_told_beside_a_good_one():
    reaction = react(call("web" * 1000, query="q"), BadCall("no JSON" + "!" * 10**6), call(query="q"))
    first, second, third = contents(reaction)
    assert first.startswith("Error: there is no tool 'webweb") and first.endswith("the only tool is local_search")
    assert second.startswith("Error: no JSON!") and third == "[1] T\nabout q"
    assert max(map(len, (first, second))) < 300 and reaction.tool_calls == 1


def test_a_turn_makes_a_bounded_number_of_searches():
    searcher = Searches()
    reaction = react(*[call(query=str(i)) for i in range(1000)], searcher=searcher)
    assert len(searcher.asked) == reaction.tool_calls == MOST_CALLS and len(reaction.messages) == 1000
    assert contents(reaction)[-1] == "Error: not carried out; a turn may make at most 8 calls"


def test_a_service_that_is_down_is_asked_once_a_turn_and_again_in_the_next():
    searcher = Searches(down)
    reaction = react(call(query="a"), call(query="b"), call(query=""), searcher=searcher)
    first, second, third = contents(reaction)
    assert first == second and first.startswith("Error: the search service is not available (http://x/retrieve: Conn")
    assert len(first) < 300 and third == "Error: query must be a text that is not empty"
    assert len(searcher.asked) == 1 and reaction.tool_calls == 0 and not reaction.done
    MultihopQa(searcher).react(reaction.state, Reply("", (call(query="c"),)))
    assert searcher.asked[-1] == ("c", 10)


def test_a_slow_service_ends_the_searches_of_a_turn():
    searcher = Searches(lambda *_: time.sleep(0.03) or [])
    reaction = react(*[call(query="q")] * 5, searcher=searcher, turn_seconds=0.05)
    assert 1 <= reaction.tool_calls < 5
    assert contents(reaction)[0] == "No passage was found."
    assert contents(reaction)[-1] == "Error: not carried out; the searches before it took too long"


def test_a_service_that_takes_long_to_fail_is_called_down_not_slow():
    searcher = Searches(lambda *_: time.sleep(0.03) or down(*_))
    first, second = contents(react(call(query="a"), call(query="b"), searcher=searcher, turn_seconds=0.02))
    assert first == second and "not available" in first and len(searcher.asked) == 1


def test_a_fault_of_ours_is_not_hidden_from_us():
    with pytest.raises(ZeroDivisionError):
        react(call(query="q"), searcher=Searches(lambda *_: 1 / 0))


def test_passages_are_numbered_and_cut_to_300_characters():
    passages = [Passage("T", "x" * 1000), Passage("", "y" * 300), Passage("Only a title", "")]
    assert tool.show(passages) == f"[1] T\n{'x' * 298}...\n\n[2] {'y' * 300}\n\n[3] Only a title"
    assert contents(react(call(query="q" * 50), document_characters=9)) == ["[1] T\nabout q..."]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)


CALLS = st.builds(
    ToolCall, st.text() | st.just(tool.NAME), st.dictionaries(st.sampled_from(["query", "top_k"]) | st.text(), JSON)
)


@given(st.lists(CALLS), st.text())
def test_any_call_and_any_text_is_survived_and_the_state_before_stays(calls, text):
    family = MultihopQa(Searches())
    state = family.ask(RECORD).state
    before = copy.deepcopy(state)
    reaction = family.react(state, Reply(text, tuple(calls)))
    assert state == before and reaction == family.react(state, Reply(text, tuple(calls)))
    assert len(reaction.messages) == len(calls) and reaction.done == (not calls)
    assert family.score(reaction.state).success in (0.0, 1.0)
    hash(reaction.state)  # immutable all the way down


def test_states_cannot_be_changed():
    state = MultihopQa(Searches()).ask(RECORD).state
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.turns = 3


# --- the end


def test_a_turn_without_a_call_is_the_answer():
    family = MultihopQa(Searches())
    state = family.ask(RECORD).state
    assert family.score(state) == Outcome(0.0, 0.0)
    reaction = family.react(state, Reply("He was born in \\boxed{Nelahozeves}.", thought="\\boxed{Prague}"))
    assert (reaction.messages, reaction.done, reaction.tool_calls) == ((), True, 0)
    assert family.score(reaction.state) == Outcome(1.0, 1.0)


def test_a_cut_off_episode_is_scored_by_its_last_text():
    family = MultihopQa(Searches())
    sure = family.react(family.ask(RECORD).state, Reply("\\boxed{Nelahozeves}", (call(query="q"),))).state
    assert family.score(sure).success == 1
    assert family.score(family.react(sure, Reply("", (call(query="q"),))).state).success == 0


@pytest.mark.parametrize(
    "answer", ["Nelahozeves", "a } b", "{", "\\", "a {b} c", "The The", "!!!", "yes", "no", "東京 ś", "A", "$1,000"]
)
def test_the_expert_succeeds_whatever_the_answer(answer):
    searcher = Searches(down)  # even without a service
    family = MultihopQa(searcher)
    state = family.ask(RECORD | {"answers": [answer]}).state
    replies = []
    while not replies or replies[-1].calls:
        replies.append(family.expert(state))
        state = family.react(state, replies[-1]).state
    assert searcher.asked == [("Where was Dvořák born?", 10)] and len(replies) == 2
    assert family.score(state) == Outcome(1.0, 1.0)


def test_the_examples_are_conversations_of_this_family():
    """Each is a question, searches with what the tool would show, and an answer in a box."""
    for user, *rest, last in prompts.EXAMPLES:
        assert user.role == "user" and user.content.endswith("?")
        assert len(rest) == 4 and not last.calls and score.extract(last.text) in ("Czech Republic", "yes")
        for reply, message in zip(rest[::2], rest[1::2]):
            search = tool.read(reply.calls[0].arguments)
            assert (message.role, message.name) == ("tool", reply.calls[0].name) == ("tool", tool.NAME)
            assert message.content.count("\n\n[") == search.top_k - 1 and "..." not in message.content
    assert MultihopQa(Searches()).examples is prompts.EXAMPLES
