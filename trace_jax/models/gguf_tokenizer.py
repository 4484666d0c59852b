"""A Hugging Face tokenizer from the metadata of a GGUF file: byte-level BPE with the pre-tokenizers that are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL, _USER_DEFINED = 3, 4  # token types that are matched whole; control tokens are special ones
_UNUSED = 5  # names that pad the vocabulary to the rows of the embedding
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


# name in the file -> (pre-tokenizer, normalizer, whether a text starts with the BOS token where the file does not say)
PRE_TOKENIZERS: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None, bool]] = {
    "smollm": (_single_digits, None, False),
    "llama-bpe": (lambda: _split(_WORDS % r"\p{N}{1,3}"), None, True),
    "qwen2": (lambda: _split(_WORDS % r"\p{N}"), normalizers.NFC, False),
}
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # Hugging Face's name -> llama.cpp's


FILES = ("tokenizer.json", "tokenizer_config.json")


def files(get: Callable[..., Any]) -> dict[str, str]:
    """The text of each of `FILES`.

    Args:
      get: (name, default) -> a value of the file's metadata.
    Raises ValueError that names a tokenizer model or pre-tokenizer that is not known, or metadata that are missing, of
    another type or do not fit each other.
    """
    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"tokenizer model {kind!r} is not read, only gpt2 (byte-level BPE); use another file")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {pre!r} is not known; those that are: {', '.join(PRE_TOKENIZERS)}")
    tokens, merges = _list(get, "tokens", str), _list(get, "merges", str)
    if not tokens or merges is None:
        raise ValueError("metadata lack the tokenizer's tokens or merges; get the file again")
    types = _list(get, "token_type", int)
    while types and len(types) == len(tokens) and types[-1] == _UNUSED:
        tokens, types = tokens[:-1], types[:-1]
    roles = {role: get(f"tokenizer.ggml.{name}_token_id") for role, name in _ROLES.items()}
    within = lambda token: token is None or (type(token) is int and 0 <= token < len(tokens))
    outside = [f"{role} {token}" for role, token in roles.items() if not within(token)]
    if outside:
        raise ValueError(f"token ids {', '.join(outside)} lie outside the {len(tokens)} tokens; get the file again")
    bos = roles["bos"] if get("tokenizer.ggml.add_bos_token", PRE_TOKENIZERS[pre][2]) else None
    try:
        tokenizer = _tokenizer(pre, tokens, types or [], merges, bos).to_str()
    except Exception as error:  # the library raises TypeError and bare Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"no tokenizer can be built of tokens and merges ({reason}); get the file again") from error
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": _template(get),
        **{f"{role}_token": None if token is None else tokens[token] for role, token in roles.items()},
    }
    return dict(zip(FILES, (tokenizer, json.dumps(config, indent=2)), strict=True))


def _tokenizer(pre: str, tokens: list[str], types: list[int], merges: list[str], bos: int | None) -> Tokenizer:
    make_pre_tokenizer, normalizer, _ = PRE_TOKENIZERS[pre]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = make_pre_tokenizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == _CONTROL)
            (tokenizer.add_special_tokens if kind == _CONTROL else tokenizer.add_tokens)([added])
    if bos is not None:
        single, pair = f"{tokens[bos]} $A", f"{tokens[bos]} $A {tokens[bos]} $B"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _list(get: Callable[..., Any], name: str, kind: type) -> list | None:
    value = get(f"tokenizer.ggml.{name}")
    if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
        raise ValueError(f"tokenizer.ggml.{name} is no list of type {kind.__name__}; get the file again")
    return value


def _template(get: Callable[..., Any]) -> str | None:
    value = get("tokenizer.chat_template")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"tokenizer.chat_template is {str(value)[:40]!r}, must be a text; get the file again")
    return value
