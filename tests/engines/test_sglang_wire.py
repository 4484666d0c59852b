"""Bodies and replies of `/generate`, beside what a real SGLang 0.5.23 was sent and said."""

from __future__ import annotations

import copy
import dataclasses
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from trace_jax.engines import sglang_wire as wire
from trace_jax.engines.base import EngineDown, EngineError
from trace_jax.types import GenerateRequest

REQUEST = GenerateRequest(
    tokens=np.array([3, 4, 5, 6, 7, 8, 9, 10], np.int32), max_new_tokens=60, temperature=1.0, stop_ids=(9,), key=(0,)
)
# Replies of the real server to these tokens at temperature 1; white space is ours.
STOPPED = """{"text":"47","output_ids":[6,9],"meta_info":{"id":"034365f382df41ca8efa025e1f39fd52",
"finish_reason":{"type":"stop","matched":9},"prompt_tokens":8,"weight_version":"0","num_retractions":0,
"input_token_logprobs":[],"output_token_logprobs":[[-3.074653148651123,6,null],[-1.8675614595413208,9,null]],
"output_token_logprobs_length":2,"reasoning_tokens":0,"completion_tokens":2,"cached_tokens":7,
"weight_versions":[{"version":"0","start":0,"end":2}],"cached_tokens_details":{"device":7,"host":0},"dp_rank":null,
"e2e_latency":0.02943626400156063,"response_sent_to_client_ts":1795984136.757752}}"""
LENGTH = """{"text":"989","output_ids":[11,10,11],"meta_info":{"id":"8b0d50b9db714d4b84c4374b69e3c830",
"finish_reason":{"type":"length","length":3},"prompt_tokens":8,"weight_version":"0","num_retractions":0,
"input_token_logprobs":[],"output_token_logprobs":[[-3.2823729515075684,11,null],[-2.2068886756896973,10,null],
[-2.666084051132202,11,null]],"output_token_logprobs_length":3,"reasoning_tokens":0,"completion_tokens":3,
"cached_tokens":0,"weight_versions":[{"version":"0","start":0,"end":3}],"cached_tokens_details":null,"dp_rank":null,
"e2e_latency":0.03880340099931345,"response_sent_to_client_ts":1795984136.7257552}}"""
TEXT_STOP = """{"text":"177","output_ids":[3,9,9],"meta_info":{"id":"ff97c7803e974592bc8abb691a506555",
"finish_reason":{"type":"stop","matched":"77"},"prompt_tokens":8,"weight_version":"0","num_retractions":0,
"input_token_logprobs":[],"output_token_logprobs":[[-2.5675387382507324,3,null],[-2.3059685230255127,9,null],
[-1.139388084411621,9,null]],"output_token_logprobs_length":3,"reasoning_tokens":0,"completion_tokens":3,
"cached_tokens":7,"weight_versions":[{"version":"0","start":0,"end":3}],"cached_tokens_details":{"device":7,"host":0},
"dp_rank":null,"e2e_latency":0.06976550999752362,"response_sent_to_client_ts":1795984140.5679333}}"""


def read(body, request=REQUEST, version=0, vocab_size=20):
    body = body if isinstance(body, bytes) else body.encode()
    return wire.read_generation(body, request, version=version, vocab_size=vocab_size)


def edited(edit, body=STOPPED):
    """The real reply with something changed in its meta_info, or in all of it."""
    document = json.loads(body)
    result = edit(document["meta_info"], document)
    return json.dumps(document if not isinstance(result, (str, list)) else result).encode()


def test_body_byte_for_byte():
    """max_new_tokens 60 is cut to the 2 tokens that a context of 10 leaves behind 8."""
    body = wire.generate_body(REQUEST, context_length=10, salt="7")
    assert body == (
        b'{"input_ids":[3,4,5,6,7,8,9,10],"sampling_params":{"temperature":1.0,"max_new_tokens":2,"stop_token_ids":[9],'
        b'"no_stop_trim":true,"skip_special_tokens":false},"extra_key":"7","return_logprob":true}'
    )


def test_body_with_every_option():
    request = dataclasses.replace(REQUEST, temperature=0.7, stop_texts=("\n", "</s>"), top_p=0.95, top_k=20)
    assert json.loads(wire.generate_body(request, context_length=100, salt="v")) == {
        "input_ids": [3, 4, 5, 6, 7, 8, 9, 10],
        "sampling_params": {
            "temperature": 0.7,
            "max_new_tokens": 60,
            "stop_token_ids": [9],
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "stop": ["\n", "</s>"],
            "top_p": 0.95,
            "top_k": 20,
        },
        "extra_key": "v",
        "return_logprob": True,
    }


def test_body_of_a_history_that_is_a_view_into_a_longer_array():
    """Episodes hand out views of one growing array, and trees may hold every second token of something."""
    long = np.arange(40, dtype=np.int32)
    for view, ids in ((long[3:6], [3, 4, 5]), (long[0:6:2], [0, 2, 4])):
        request = dataclasses.replace(REQUEST, tokens=view)
        assert json.loads(wire.generate_body(request, context_length=100, salt=""))["input_ids"] == ids


def test_body_that_fills_the_cache():
    assert wire.preload_body(np.array([1, 2], np.int32), salt="3") == (
        b'{"input_ids":[1,2],"sampling_params":{"temperature":1.0,"max_new_tokens":0},"extra_key":"3"}'
    )


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"tokens": np.zeros(0, np.int32)}, "does not fit"),
        ({"tokens": np.zeros(32, np.int32)}, "does not fit"),
        ({"tokens": np.array([3, 20], np.int32)}, "token id 20"),
        ({"tokens": np.array([-1, 3], np.int32)}, "token id -1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_requests_that_are_not_sent(changes, word):
    with pytest.raises(EngineError, match=word):
        wire.check_request(dataclasses.replace(REQUEST, **changes), context_length=32, vocab_size=20)


def test_the_longest_and_the_outermost_request_that_are_sent():
    tokens = np.array([0, 19] * 15 + [19], np.int32)
    wire.check_request(dataclasses.replace(REQUEST, tokens=tokens), context_length=32, vocab_size=20)


def test_stop_id():
    generation = read(STOPPED)
    assert generation.tokens.tolist() == [6, 9] and generation.tokens.dtype == np.int32
    assert generation.logprobs.tolist() == [np.float32(-3.074653148651123), np.float32(-1.8675614595413208)]
    assert generation.logprobs.dtype == np.float32
    assert (generation.stopped, generation.cached_tokens, generation.prefilled_tokens) == (True, 7, 1)
    assert generation.weight_version == 0


def test_length():
    generation = read(LENGTH, dataclasses.replace(REQUEST, max_new_tokens=3))
    assert generation.tokens.tolist() == [11, 10, 11]
    assert (generation.stopped, generation.cached_tokens, generation.prefilled_tokens) == (False, 0, 8)


def test_stop_text():
    """The text is cut from `text`; its tokens are part of the turn. A text that was not asked for is another end."""
    request = dataclasses.replace(REQUEST, stop_ids=(2,), stop_texts=("77",))
    generation = read(TEXT_STOP, request)
    assert generation.tokens.tolist() == [3, 9, 9] and generation.stopped
    with pytest.raises(EngineDown, match="'77'.*model folder"):
        read(TEXT_STOP, dataclasses.replace(request, stop_texts=("7\n",)))


def test_an_end_that_the_request_does_not_name():
    with pytest.raises(EngineDown, match="9.*model folder"):
        read(STOPPED, dataclasses.replace(REQUEST, stop_ids=(2,)))


def test_a_turn_as_long_as_it_may_be_that_ends_with_a_stop_id_was_stopped():
    body = edited(lambda meta, _: meta.update(finish_reason={"type": "length", "length": 2}))
    assert read(body, dataclasses.replace(REQUEST, max_new_tokens=2)).stopped


def test_repeated_entries_of_log_probs_are_left_out():
    """SGLang-JAX puts earlier tokens before the ones that count."""
    body = edited(lambda meta, _: meta.update(output_token_logprobs=[[-9.0, 1, None]] + meta["output_token_logprobs"]))
    assert read(body).tokens.tolist() == [6, 9]


def test_one_version_for_all_tokens_of_an_older_server():
    def old(meta, _):
        del meta["weight_versions"]

    assert read(edited(old)).weight_version == 0
    with pytest.raises(wire.MixedVersions, match="weight version 0, expected 1"):
        read(edited(old), version=1)


@pytest.mark.parametrize("names", [("0", "1"), ("1", "0"), ("1",), ("default",), ("0", "1", "0")])
def test_other_weights(names):
    spans = [{"version": name, "start": i, "end": i + 1} for i, name in enumerate(names)]
    with pytest.raises(wire.MixedVersions) as error:
        read(edited(lambda meta, _: meta.update(weight_versions=spans)))
    assert error.value.found == list(dict.fromkeys(names))


def _entries(value):
    return lambda meta, _: meta.update(output_token_logprobs=value)


def _meta(**values):
    return lambda meta, _: meta.update(values)


def _without(name):
    return lambda meta, _: meta.pop(name) and None


BAD = {
    "aborted": _meta(finish_reason={"type": "abort", "message": "Abort in waiting queue"}),
    "no finish": _meta(finish_reason=None),
    "finish is text": _meta(finish_reason="stop"),
    "no log-probs": _without("output_token_logprobs"),
    "log-probs null": _entries(None),
    "one short": _entries([[-1.0, 6, None]]),
    "none": _entries([]),
    "null log-prob": _entries([[None, 6, None], [-1.0, 9, None]]),
    "positive": _entries([[0.5, 6, None], [-1.0, 9, None]]),
    "text": _entries([["-x", 6, None], [-1.0, 9, None]]),
    "empty entry": _entries([[], [-1.0, 9, None]]),
    "entry without id": _entries([[-1.0], [-1.0]]),
    "entry is a number": _entries([-1.0, -2.0]),
    "entry is an object": _entries([{"logprob": -1.0, "id": 6}] * 2),
    "id is vocab_size": _entries([[-1.0, 20, None], [-1.0, 9, None]]),
    "negative id": _entries([[-1.0, -1, None], [-1.0, 9, None]]),
    "id beyond 32 bits": _entries([[-1.0, 2**40, None], [-1.0, 9, None]]),
    "id null": _entries([[-1.0, None, None], [-1.0, 9, None]]),
    "id is a fraction": _entries([[-1.0, 6.5, None], [-1.0, 9, None]]),
    "count null": _meta(completion_tokens=None),
    "count 0": _meta(completion_tokens=0),
    "count negative": _meta(completion_tokens=-2),
    "more than asked for": _meta(completion_tokens=61, output_token_logprobs=[[-1.0, 6, None]] * 61),
    "other prompt": _meta(prompt_tokens=9),
    "more cached than sent": _meta(cached_tokens=9),
    "negative cached": _meta(cached_tokens=-1),
    "no version": lambda meta, _: (meta.pop("weight_version"), meta.pop("weight_versions")) and None,
    "versions are text": _meta(weight_versions=["0"]),
    "no meta": lambda _, document: document.pop("meta_info") and None,
    "meta is a list": lambda _, document: document.update(meta_info=[]),
    "a list": lambda _, document: [document],
    "a text": lambda _, document: "ok",
}


@pytest.mark.parametrize("name", BAD)
def test_replies_that_are_never_used(name):
    with pytest.raises(wire.BadReply):
        read(edited(BAD[name]))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-1e999"])
def test_log_probs_that_are_not_finite(value):
    with pytest.raises(wire.BadReply):
        read(STOPPED.replace("-3.074653148651123", value))


def test_every_beginning_of_a_reply_is_refused():
    """A reply that was cut anywhere is no JSON: no half of a turn is ever taken for a turn."""
    body = STOPPED.encode()
    for end in range(len(body)):
        with pytest.raises(wire.BadReply):
            read(body[:end])


@pytest.mark.parametrize("body", [b"", b"<html>502 Bad Gateway</html>", b"\xff\xfe\x00", b"null", b"7", b"{}"])
def test_garbage(body):
    with pytest.raises(wire.BadReply):
        read(body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@hypothesis.given(st.sampled_from(sorted(json.loads(STOPPED)["meta_info"])), _JSON, st.integers(0, 2))
def test_a_reply_with_anything_in_a_field_is_read_or_refused(name, value, depth):
    """Never another error, and what is read has as many log-probs as tokens, all of them of this vocabulary."""
    document = copy.deepcopy(json.loads(STOPPED))
    meta = document["meta_info"]
    if name == "output_token_logprobs" and depth:
        if depth == 1:
            meta[name][0] = value
        else:
            meta[name][1][1] = value
    else:
        meta[name] = value
    try:
        generation = read(json.dumps(document))
    except (wire.BadReply, EngineError):
        return
    assert generation.tokens.shape == generation.logprobs.shape
    assert generation.tokens.min() >= 0 and generation.tokens.max() < 20


@pytest.mark.parametrize(
    "body, text",
    [  # as the real server said it
        (b'{"error":{"message":"temperature must be a non-negative finite number, got -1."}}', "temperature must be"),
        (b'{"error":"unknown field `nonsense`, expected one of `max_new_tokens`"}', "unknown field `nonsense`"),
        (b'{"success":false,"message":"Failed to get weights iterator","num_paused_requests":0}', "Failed to get"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"\xff<html>", "\N{REPLACEMENT CHARACTER}<html>"),
        (b'{"detail":"Not Found"}', "Not Found"),
    ],
)
def test_error_text(body, text):
    assert text in wire.error_text(body)


def test_error_text_is_short():
    assert len(wire.error_text(json.dumps({"error": "x" * 10_000}).encode())) == wire.SHOWN
