"""The real server as the project starts it: what it promises to the client, and what remains after it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error

import numpy as np
import pytest

from tests.sglang_server import write_model

PROMPT = list(range(2, 22))


def generate(server, tokens, new_tokens, **sampling):
    parameters = {"temperature": 0.0, "max_new_tokens": new_tokens} | sampling
    return server.post("/generate", {"input_ids": tokens, "sampling_params": parameters, "return_logprob": True})


def test_an_episode_as_long_as_the_context_fits_to_its_last_token(sglang_server):
    """The spare tokens of the command line: an episode of N tokens, prompt included, is served at any split."""
    room = sglang_server.context_length
    for prompt_length in (room - 1, room // 2, 1):
        tokens = [2 + i % 7 for i in range(prompt_length)]
        reply = generate(sglang_server, tokens, room - prompt_length)
        assert len(reply["output_ids"]) == room - prompt_length
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": room - prompt_length}


def test_a_second_turn_comes_from_the_cache(sglang_server):
    """All but the last token of the first turn: that one was sampled and never read."""
    sglang_server.restore()
    first = generate(sglang_server, PROMPT, 12)
    assert first["meta_info"]["cached_tokens"] == 0
    history = PROMPT + first["output_ids"]
    second = generate(sglang_server, [*history, 3, 4], 4)
    assert second["meta_info"]["cached_tokens"] == len(history) - 1


def test_an_idle_connection_stays_open(sglang_server):
    """Longer than the 5 seconds after which SGLang would close it by itself."""
    host, port = sglang_server.url.removeprefix("http://").split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        for pause in (0, 7):
            time.sleep(pause)
            connection.request("GET", "/health")
            reply = connection.getresponse()
            assert reply.status == 200 and reply.read() == b""


def test_log_probs_are_of_the_tempered_distribution(sglang_server):
    """At temperature T the log-prob of each next token is log softmax(logits / T), from the same server's own logits:
    those at T = 1 are known up to a constant from the top log-probs of the whole vocabulary."""
    size = json.loads((sglang_server.model / "config.json").read_text())["vocab_size"]
    for temperature in (1.0, 0.7):
        parameters = {"temperature": temperature, "max_new_tokens": 1}
        body = {"input_ids": PROMPT, "sampling_params": parameters, "return_logprob": True, "top_logprobs_num": size}
        meta = sglang_server.post("/generate", body)["meta_info"]
        found = np.array([entry[0] for entry in sorted(meta["output_top_logprobs"][0], key=lambda entry: entry[1])])
        if temperature == 1.0:
            logits = found
        expected = logits / temperature
        expected = expected - np.log(np.exp(expected).sum())
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_new_weights_and_back(sglang_server, tmp_path):
    before = generate(sglang_server, PROMPT, 16)["output_ids"]
    other = write_model(tmp_path / "other", seed=1)
    try:
        body = {"model_path": str(other), "weight_version": "7"}
        assert sglang_server.post("/update_weights_from_disk", body)["success"]
        after = generate(sglang_server, PROMPT, 16)
        assert after["output_ids"] != before and after["meta_info"]["weight_version"] == "7"
        assert sglang_server.get("/model_info")["weight_version"] == "7"
    finally:
        sglang_server.restore()
    again = generate(sglang_server, PROMPT, 16)
    assert again["output_ids"] == before and again["meta_info"]["weight_version"] == "default"


def test_a_folder_that_is_not_there_is_refused_and_nothing_changes(sglang_server, tmp_path):
    with pytest.raises(urllib.error.HTTPError) as refused:
        sglang_server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "none")})
    assert refused.value.code == 400
    assert sglang_server.get("/model_info")["weight_version"] == "default"
