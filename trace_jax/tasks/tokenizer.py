"""The small tokenizer of a task, and loading a tokenizer from a model folder.

A small tokenizer has one token a character, or one token a blank-separated word with the line end as a word of its own.
Encoding never raises: what is not in the vocabulary becomes the unknown token. Text of the task (known symbols, single
blanks, no blanks around line ends) survives encoding and decoding unchanged, and the ids of a text that ends with a
line end do not depend on what follows it. Ids: 0 padding, 1 unknown, then the symbols in order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else its import complains about a missing PyTorch
from transformers import PreTrainedTokenizerFast  # noqa: E402

# A blank inside keeps these names from being a character or a word of any text.
PAD_TOKEN = "<pad token>"
UNKNOWN_TOKEN = "<unknown token>"
_TOKENIZER_FILE = "tokenizer.json"


def build_tokenizer(symbols: Sequence[str], word_level: bool) -> PreTrainedTokenizerFast:
    """A tokenizer over exactly these symbols.

    Raises ValueError for no symbols, for a symbol given twice, and for one that the level cannot hold: more than one
    character at the character level; a blank, or a line end among other characters, at the word level.
    """
    _check_symbols(symbols, word_level)
    vocabulary = {symbol: i for i, symbol in enumerate((PAD_TOKEN, UNKNOWN_TOKEN, *symbols))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    if word_level:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace(Regex("^"), " "),  # a blank before every word ...
                decoders.Fuse(),
                decoders.Replace(" \n", "\n"),  # ... but none around line ends
                decoders.Replace("\n ", "\n"),
                decoders.Strip(" ", 1, 0),  # ... and none at the start
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        split_special_tokens=True,  # text that spells a special token is text
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Writes the tokenizer's files into a model folder, which is made if need be."""
    tokenizer.save_pretrained(str(folder))


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder, exactly as its tokenizer.json has it; never asks the network.

    Raises ValueError when the folder does not exist, holds no tokenizer, or holds one that cannot be read.
    """
    folder = Path(folder)
    if not (folder / _TOKENIZER_FILE).is_file():
        if not folder.is_dir():
            raise ValueError(f"model folder {folder} does not exist; download the model there, or name its folder")
        raise ValueError(
            f"model folder {folder} holds no tokenizer: {_TOKENIZER_FILE} is missing; copy the tokenizer's files there"
        )
    try:
        # Not AutoTokenizer: for some architectures it takes only vocabulary and merges from the file.
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the reader raises bare Exceptions of its native part
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model folder {folder}: tokenizer cannot be read ({reason}); copy its files again") from error


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the greatest id, so that every id of a text is below it; ids may have holes."""
    return 1 + max(tokenizer.get_vocab().values())


def end_ids(tokenizer: PreTrainedTokenizerFast, folder_ids: Any) -> tuple[int, ...]:
    """Ids that end a text: the tokenizer's own, then what a model's `eos_token_id` (one, several or None) adds."""
    more = folder_ids if isinstance(folder_ids, (list, tuple)) else [folder_ids]
    return tuple(dict.fromkeys(i for i in (tokenizer.eos_token_id, *more) if i is not None))


def markers(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """The texts that are tokens whatever stands around them: special ones, and those that were added for a format."""
    return tuple(tokenizer.added_tokens_encoder)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> np.ndarray:
    """Token ids, int32 [n], of a text, without special tokens at either end."""
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")  # lone surrogates are unknown characters
    backend = tokenizer.backend_tokenizer  # the wrapper's own `encode` takes ten times as long on a line of text
    return np.asarray(backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def decode(tokenizer: PreTrainedTokenizerFast, tokens: np.ndarray) -> str:
    """The text of token ids, special tokens written out."""
    return tokenizer.backend_tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def stop_id(tokenizer: PreTrainedTokenizerFast, stop: str) -> int:
    """The one token that a task's stop text is. Raises ValueError where it is none or several."""
    tokens = encode(tokenizer, stop)
    if tokens.size != 1 or tokens[0] == tokenizer.unk_token_id:
        raise ValueError(f"the stop text {stop!r} is {tokens.size} known tokens in this tokenizer, must be exactly one")
    return int(tokens[0])


def _check_symbols(symbols: Sequence[str], word_level: bool) -> None:
    if not symbols:
        raise ValueError("tokenizer: there are no symbols; a task's `symbols()` lists its vocabulary")
    if len(set(symbols)) != len(symbols):
        twice = next(symbol for i, symbol in enumerate(symbols) if symbol in symbols[:i])
        raise ValueError(f"tokenizer: symbol {twice!r} is listed twice; every symbol is one token")
    for symbol in symbols:
        if word_level and (not symbol or " " in symbol or ("\n" in symbol and symbol != "\n")):
            raise ValueError(f"tokenizer: symbol {symbol!r} is not a word; words hold no blank and no line end")
        if not word_level and len(symbol) != 1:
            raise ValueError(f"tokenizer: symbol {symbol!r} is {len(symbol)} characters, must be one")
