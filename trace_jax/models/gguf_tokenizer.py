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


def files(get: Callable[..., Any]) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json` as text.

    Args:
      get: (name, default) -> a value of the file's metadata.
    Raises ValueError that names a tokenizer model or pre-tokenizer that is not known, or metadata that are missing.
    """
    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"tokenizer model {kind!r} is not read, only gpt2 (byte-level BPE); use another file")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {pre!r} is not known; those that are: {', '.join(PRE_TOKENIZERS)}")
    tokens, merges, types = (get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type"))
    if not tokens or merges is None:
        raise ValueError("metadata lack the tokenizer's tokens or merges; get the file again")
    while types and len(types) == len(tokens) and types[-1] == _UNUSED:
        tokens, types = tokens[:-1], types[:-1]
    roles = {role: get(f"tokenizer.ggml.{name}_token_id") for role, name in _ROLES.items()}
    outside = [f"{role} {token}" for role, token in roles.items() if token is not None and token >= len(tokens)]
    if outside:
        raise ValueError(f"token ids {', '.join(outside)} lie outside the {len(tokens)} tokens; get the file again")
    make_pre_tokenizer, normalizer, starts_with_bos = PRE_TOKENIZERS[pre]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = make_pre_tokenizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types or (), strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == _CONTROL)
            (tokenizer.add_special_tokens if kind == _CONTROL else tokenizer.add_tokens)([added])
    bos = roles["bos"]
    if get("tokenizer.ggml.add_bos_token", starts_with_bos) and bos is not None:
        single, pair = f"{tokens[bos]} $A", f"{tokens[bos]} $A {tokens[bos]} $B"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(tokens[bos], bos)]
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": get("tokenizer.chat_template"),
        **{f"{role}_token": None if token is None else tokens[token] for role, token in roles.items()},
    }
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config, indent=2)}
