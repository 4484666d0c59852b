"""A byte-level tokenizer as chat models have it: special tokens of both formats, merges learnt from chat text."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers import PreTrainedTokenizerFast  # noqa: E402

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip
# Text whose blocks a learner of merges would gladly join: "><", ".\n\n", " {".
_TEXT = [
    '<tool_call>\n{"name": "python", "arguments": {"code": "print(17 * 23)"}}\n</tool_call>',
    "<tool_response>\n391\n</tool_response>", "<think>\n\n</think>\n\n<tool_call>", "</tool_call><tool_call>",
    "assistant\nThe answer is \\boxed{391}.", "user\nWhat is 17 * 23?\n\n", "system\nYou are a helpful assistant.\n\n# Tools",
]  # fmt: skip


# How the tokenizers of Qwen 2 to 3 and of Llama 3 cut text into words: line ends are words of their own.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def chat_tokenizer(*, old: bool = False) -> PreTrainedTokenizerFast:
    """About 400 tokens; the ids do not change from call to call. `old`: words as GPT-2 and SmolLM2 have them."""
    return train_tokenizer(_TEXT * 20, 600, old=old)


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, old: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges are those of `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not old:
        words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
