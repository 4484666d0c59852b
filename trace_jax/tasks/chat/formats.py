"""The chat formats: a template of transformers' kind, the text that ends a turn, and a syntax of calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from trace_jax.tasks.chat import calls
from trace_jax.tasks.chat.family import Reply

_FOLDER = Path(__file__).parent / "templates"


@dataclasses.dataclass(frozen=True)
class Format:
    """How a chat is written for a kind of model."""

    name: str
    template: str  # jinja
    stop: str  # ends every turn; one token of the models' tokenizers
    tags: tuple[str, ...]  # text with a meaning of its own, beside the tokenizer's special tokens
    read: Callable[[str], Reply]
    write: Callable[[Reply], str]


def load_format(name: str) -> Format:
    """"qwen3", "llama3", or the path of a chat template with Qwen3's turns and calls (`<|im_end|>`, `<tool_call>`).

    Raises ValueError for a name that is neither, and for a file that cannot be read.
    """
    if name == "llama3":
        template = (_FOLDER / "llama3.jinja").read_text()
        return Format(name, template, "<|eot_id|>", ("<|python_tag|>",), calls.read_bare, calls.write_bare)
    path = _FOLDER / "qwen3.jinja" if name == "qwen3" else Path(name)
    try:
        template = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name!r} is neither qwen3, llama3 nor a chat template that can be read ({error})") from error
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    return Format(name, template, "<|im_end|>", tags, calls.read_tagged, calls.write_tagged)
