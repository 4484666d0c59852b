"""SGLang's `/generate` on the wire: token ids and settings to a JSON body, a JSON reply to a checked `Generation`.

Ids go in and ids come out; text is never sent. A reply is believed only if everything in it fits together: what is
missing, short, aborted or sampled from other weights raises `BadReply`, and never becomes something to train on.
Shapes as seen on SGLang 0.5.9 and 0.5.23.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from trace_jax.engines.base import EngineDown, EngineError
from trace_jax.types import GenerateRequest, Generation

SHOWN = 200  # characters of a reply that an error shows


class BadReply(Exception):
    """A reply that cannot be used; another try may bring a good one."""


class MixedVersions(BadReply):
    """A generation whose tokens were not all sampled from the weights that the server should have."""

    def __init__(self, found: list[str], version: str):
        super().__init__(f"sampled from weight version {' and '.join(found)}, expected {version}")
        self.found = found


def check_request(request: GenerateRequest, *, context_length: int, vocab_size: int) -> None:
    """Raises EngineError for a request that must not be sent: one bad id kills a server."""
    tokens = request.tokens
    if not 1 <= tokens.shape[0] < context_length:
        size = tokens.shape[0]
        raise EngineError(
            f"a request of {size} tokens does not fit the engine's context of {context_length}; raise "
            "config.model.context_length"
        )
    check_ids(tokens, vocab_size)
    if request.max_new_tokens < 1 or request.temperature <= 0:
        raise EngineError(
            f"max_new_tokens is {request.max_new_tokens} and temperature {request.temperature}; the one must be at "
            "least 1, the other above 0"
        )


def check_ids(tokens: np.ndarray, vocab_size: int) -> None:
    """Raises EngineError for a token id outside the vocabulary."""
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise EngineError(f"token id {bad} lies outside the vocabulary of {vocab_size}")


def generate_body(request: GenerateRequest, *, context_length: int, salt: str) -> bytes:
    """The body of `/generate`: `max_new_tokens` is cut to the context that is left.

    `extra_key` is a name space of the server's radix tree. `logprob_start_len` is left out: with it the server would
    compute the whole prompt again.
    """
    room = context_length - request.tokens.shape[0]
    sampling: dict[str, Any] = {
        "temperature": request.temperature,
        "max_new_tokens": min(request.max_new_tokens, room),
        "stop_token_ids": list(request.stop_ids),
        "no_stop_trim": True,  # the token that ends a turn is part of it
        "skip_special_tokens": False,
    }
    if request.stop_texts:
        sampling["stop"] = list(request.stop_texts)
    if request.top_p != 1:
        sampling["top_p"] = request.top_p
    if request.top_k:
        sampling["top_k"] = request.top_k
    return _body(request.tokens, sampling, salt, return_logprob=True)


def preload_body(tokens: np.ndarray, *, salt: str) -> bytes:
    """The body of a `/generate` that only fills the prefix cache."""
    return _body(tokens, {"temperature": 1.0, "max_new_tokens": 0}, salt)


def _body(tokens: np.ndarray, sampling: dict[str, Any], salt: str, **more: Any) -> bytes:
    ids = np.ascontiguousarray(tokens, np.int32)
    return orjson.dumps(
        {"input_ids": ids, "sampling_params": sampling, "extra_key": salt, **more}, option=orjson.OPT_SERIALIZE_NUMPY
    )


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises BadReply for anything else: half a reply, an error page, a list."""
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadReply(f"a reply that is no JSON ({error}): {body[:SHOWN]!r}") from error
    if not isinstance(reply, dict):
        raise BadReply(f"a reply that is no object: {body[:SHOWN]!r}")
    return reply


def error_text(body: bytes) -> str:
    """The message of an error reply, whichever of the server's forms it has; else its beginning."""
    try:
        reply = read_object(body)
    except BadReply:
        return one_line(body.decode("utf-8", "replace"))
    error = reply.get("error", reply.get("message", ""))
    text = error.get("message", "") if isinstance(error, dict) else error
    return one_line(str(text or reply))


def one_line(text: str) -> str:
    """The beginning of a text, without its line breaks."""
    return " ".join(text[: 2 * SHOWN].split())[:SHOWN]


def read_generation(body: bytes, request: GenerateRequest, *, version: int, vocab_size: int) -> Generation:
    """The reply of `/generate` as a generation of weight version `version`.

    Ids and log-probs are both taken from `output_token_logprobs`, which must have `completion_tokens` entries (the last
    ones count: SGLang-JAX repeats earlier ones), so that they cannot fall out of step.

    Raises:
      MixedVersions: any token was sampled from other weights.
      BadReply: aborted, no token, too many tokens, a missing, non-finite or positive log-prob, an id outside the
        vocabulary, or a field that is not there.
      EngineDown: the server ended the turn at an id that the request does not name: its model folder knows other ends.
    """
    reply = read_object(body)
    try:
        meta = reply["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] == "abort":
            raise BadReply(f"aborted: {one_line(str(finish.get('message')))}")
        found = _versions(meta)
        if found != [str(version)]:
            raise MixedVersions(found, str(version))
        tokens, logprobs = _tokens(meta)
        cached = int(meta.get("cached_tokens") or 0)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadReply(f"a reply without what it needs ({type(error).__name__}: {error})") from error
    prompt = request.tokens.shape[0]
    if meta.get("prompt_tokens", prompt) != prompt or not 0 <= cached <= prompt:
        raise BadReply(f"{meta.get('prompt_tokens')} prompt tokens and {cached} cached for a request of {prompt}")
    if not 1 <= tokens.shape[0] <= request.max_new_tokens:
        raise BadReply(f"{tokens.shape[0]} tokens where 1 to {request.max_new_tokens} were asked for")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise BadReply(f"a sampled id lies outside the vocabulary of {vocab_size}")
    generation = Generation(
        tokens=tokens,
        logprobs=logprobs,
        stopped=_stopped(finish, int(tokens[-1]), request),
        cached_tokens=cached,
        prefilled_tokens=prompt - cached,
        weight_version=version,
    )
    try:
        return generation.validate()
    except ValueError as error:
        raise BadReply(str(error)) from error


def _versions(meta: dict[str, Any]) -> list[str]:
    """Weight versions of all sampled tokens, in their order; older servers tell one for all."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
    return list(dict.fromkeys(str(span["version"]) for span in spans))


def _tokens(meta: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    count, entries = int(meta["completion_tokens"]), meta["output_token_logprobs"]
    if len(entries) < count or count < 1:
        raise BadReply(f"{len(entries)} log-probs for {count} sampled tokens")
    entries = entries[-count:]
    tokens, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
    if any(type(logprob) not in (float, int) for logprob in logprobs):
        raise BadReply("a sampled token without a log-prob")
    if any(type(token) is not int for token in tokens):
        raise BadReply("a sampled token without an id")
    return np.array(tokens, np.int32), np.array(logprobs, np.float32)


def _stopped(finish: dict[str, Any], last: int, request: GenerateRequest) -> bool:
    """Whether the turn was ended by the policy; a turn that is as long as it may be can still end with a stop id."""
    if last in request.stop_ids:
        return True
    if finish["type"] != "stop":
        return False
    if isinstance(finish.get("matched"), str) and finish["matched"] in request.stop_texts:
        return True
    raise EngineDown(
        f"the server ended a turn at {finish.get('matched')!r}, which is not among the stops {request.stop_ids} "
        f"{request.stop_texts}: its model folder names other ends of text; serve the folder that the run uses"
    )
