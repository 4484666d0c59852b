"""The family: what a user and a policy see of each other, and states as values."""

from __future__ import annotations

import json
import sys

import pytest

from experiments.real_tasks_cpu import hostile_calls
from tests.tasks import bfcl_records
from tests.tasks.bfcl_records import handmade
from trace_jax.tasks.bfcl.family import MAX_CALLING_REPLIES, Bfcl
from trace_jax.tasks.chat.family import BadCall, Reply, ToolCall

pytest.importorskip("bfcl_eval", reason="pip install --no-deps bfcl-eval==2026.3.23, and mpmath and filelock")

FAMILY = Bfcl()
TWO_TURNS = (("Look around.", ["ls()"]), ("Go down.", ["cd('deep')", "pwd()"]))


def start(*turns, **changes):
    return FAMILY.ask(handmade(*(turns or TWO_TURNS), **changes)).state


def calls(*found):
    return Reply("", tuple(ToolCall(name, arguments) for name, arguments in found))


def test_a_question_is_the_first_turn_with_all_functions():
    question = FAMILY.ask(handmade(*TWO_TURNS, excluded_functions=["cp"]))
    assert [message.role for message in question.messages] == ["system", "user"]
    assert question.messages[1].content == "Look around." and question.group == "base"
    names = [tool["function"]["name"] for tool in question.tools]
    assert len(names) == 18 and "cp" in names  # the official list keeps what is marked as excluded


def test_an_episode_by_hand():
    state = start()
    reaction = FAMILY.react(state, calls(("ls", {}), ("cat", {"file_name": "a.txt"})))
    assert [(message.role, message.name) for message in reaction.messages] == [("tool", "ls"), ("tool", "cat")]
    assert reaction.messages[1].content == '{"file_content": "one"}'
    assert (reaction.tool_calls, reaction.done) == (2, False)
    reaction = FAMILY.react(reaction.state, Reply("There you are."))
    assert [(message.role, message.content) for message in reaction.messages] == [("user", "Go down.")]
    reaction = FAMILY.react(reaction.state, calls(("cd", {"folder": "deep"})))
    reaction = FAMILY.react(reaction.state, calls(("pwd", {})))
    assert reaction.messages[0].content == '{"current_working_directory": "/desk/deep"}'
    assert FAMILY.score(reaction.state).success == 0.0  # the user turn is still open
    reaction = FAMILY.react(reaction.state, Reply("You are there."))
    assert reaction.done and reaction.messages == () and FAMILY.score(reaction.state).success == 1.0
    assert [turn.steps for turn in reaction.state.ended] == [
        (("ls()", "cat(file_name='a.txt')"),),
        (("cd(folder='deep')",), ("pwd()",)),
    ]


def test_functions_that_are_told_later():
    turns = (("List them.", []), ("", ["ls()"]), ("Thanks, and where are we?", ["pwd()"]))
    question = FAMILY.ask(handmade(*turns, missed_functions={"1": ["ls"]}))
    assert "ls" not in [tool["function"]["name"] for tool in question.tools] and len(question.tools) == 17
    first = FAMILY.react(question.state, Reply("I have no function for that."))
    (told,) = first.messages
    line = told.content.splitlines()[1]
    assert told.role == "user" and json.loads(line)["function"]["name"] == "ls"
    second = FAMILY.react(FAMILY.react(first.state, calls(("ls", {}))).state, Reply("Here."))
    assert [message.content for message in second.messages] == ["Thanks, and where are we?"]


def test_a_held_out_function_is_carried_out_as_officially():
    state = start(("List them.", []), ("", ["ls()"]), missed_functions={"1": ["ls"]})
    assert FAMILY.react(state, calls(("ls", {}))).messages[0].content.startswith('{"current_directory_content"')


def test_what_cannot_be_carried_out_is_told():
    good = calls(("post_tweet", {}), ("cd", {"where": "deep"}), ("pwd", {}))
    reaction = FAMILY.react(start(), Reply("", (BadCall("no JSON"), *good.calls)))
    assert [message.content for message in reaction.messages] == [
        "Error during execution: no JSON",
        "Error during execution: there is no function 'post_tweet'",
        "Error during execution: GorillaFileSystem.cd() got an unexpected keyword argument 'where'",
        '{"current_working_directory": "/desk"}',
    ]
    assert (reaction.tool_calls, reaction.done) == (2, False)
    assert reaction.state.steps == (("refused()", "cd(where='deep')", "pwd()"),)


def test_siblings_do_not_share():
    parent = start()
    one = FAMILY.react(parent, calls(("rm", {"file_name": "a.txt"})))
    two = FAMILY.react(parent, calls(("cat", {"file_name": "a.txt"})))
    assert two.messages[0].content == '{"file_content": "one"}'
    three = FAMILY.react(one.state, calls(("cat", {"file_name": "a.txt"})))
    assert "No such file" in three.messages[0].content
    assert parent.results == () and list(parent.services["GorillaFileSystem"].root.contents) == ["a.txt", "deep"]


def tweeting():
    config = {"TwitterAPI": {"authenticated": True, "tweet_counter": 0, "tweets": {}}}
    return start(("Post.", ["posting_get_login_status()"]), classes=("TwitterAPI",), initial_config=config)


def test_arguments_that_are_changed_later_change_no_state():
    tags = ["#x"]
    state = tweeting()
    after = FAMILY.react(state, calls(("post_tweet", {"content": "hi", "tags": tags}))).state
    tags.append("#y")
    assert [tweet["tags"] for tweet in after.services["TwitterAPI"].tweets.values()][-1] == ["#x"]


def test_a_list_that_a_method_has_as_its_default_stays_empty():
    """post_tweet's default list becomes part of its tweet; the runner's own tweets would all share it."""
    state = tweeting()
    mention = ("mention", {"tweet_id": 0, "mentioned_usernames": ["@a"]})
    made = calls(("post_tweet", {"content": "1"}), mention, ("post_tweet", {"content": "2"}))
    after = FAMILY.react(state, made).state
    assert [tweet["mentions"] for tweet in after.services["TwitterAPI"].tweets.values()] == [["@a"], []]


def test_the_twenty_first_reply_with_calls_ends_the_episode():
    for turns, success in ((TWO_TURNS, 0.0), (TWO_TURNS[:1], 1.0)):  # the last user turn is scored as it stands
        state = start(*turns)
        for _ in range(MAX_CALLING_REPLIES):
            reaction = FAMILY.react(state, calls(("ls", {})))
            state = reaction.state
            assert not reaction.done
        reaction = FAMILY.react(state, calls(("ls", {})))
        assert reaction.done and reaction.messages == () and FAMILY.score(reaction.state).success == success


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"involved_classes": ["WebSearchAPI"]}, "WebSearchAPI"),
        ({"ground_truth": [["ls()"]]}, "2 user turns and right calls for 1"),
        ({"ground_truth": [["ls()"], ["cd(__import__('os'))"]]}, "literals"),
        ({"ground_truth": [["ls()"], ["post_tweet('x')"]]}, "not documented"),
        ({"missed_functions": {"1": ["fly"]}}, "tells functions later"),
        ({"missed_functions": {"9": ["ls"]}}, "tells functions later"),
    ],
)
def test_records_that_are_none(changes, problem):
    with pytest.raises(ValueError, match=problem) as error:
        start(**changes)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="record 'x' has no category, turns"):
        FAMILY.ask({"id": "x", "problem": "1 + 1"})


@pytest.mark.parametrize("category", bfcl_records.CATEGORIES)
def test_all_right_calls_succeed_and_nothing_leaks(category):
    runner = pytest.importorskip("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
    before = dict(vars(runner))
    failed = []
    for record in bfcl_records.records(category):
        state, done, turns = FAMILY.ask(record).state, False, 0
        while not done and turns < FAMILY.max_turns:
            reaction = FAMILY.react(state, FAMILY.expert(state))
            state, done, turns = reaction.state, reaction.done, turns + 1
        failed += [] if done and FAMILY.score(state).success == 1.0 else [record["id"]]
    assert not failed and len(bfcl_records.records(category)) == 200
    assert vars(runner) == before and "eval" not in before
    assert "bfcl_eval.constants.eval_config" not in sys.modules


def test_the_experts_replies_are_not_the_entrys_own():
    state = start(("Go.", ["cd(folder='deep')"]))
    FAMILY.expert(state).calls[0].arguments["folder"] = "elsewhere"
    assert FAMILY.expert(state).calls[0].arguments == {"folder": "deep"}


def test_hostile_calls_are_refused():
    outcomes = hostile_calls.refused()
    assert len(outcomes) >= 70 and len(hostile_calls.TEXTS) >= 20
    assert not [outcome for outcome in outcomes if not outcome[1]]
