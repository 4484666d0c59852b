"""The settings of the task families, a section each, and what the families of public data sets share."""

from __future__ import annotations

import dataclasses

SMALL_TASKS = ("arithmetic", "lookup")  # generated questions, read by a small tokenizer too
DATA_TASKS = ("math", "multihop_qa", "bfcl")  # public data sets, read as a chat by a pretrained model


@dataclasses.dataclass(frozen=True)
class ArithmeticConfig:
    """Expression trees with a calculator (tasks/arithmetic)."""

    seed: int = 0  # of the questions
    difficulty: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # weights of 1, 2, ... operations
    demo_difficulty: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)  # the same, of the demonstrations
    max_number: int = 29
    shots: tuple[float, ...] = ()  # solved examples of 1, 2, ... operations before each prompt (tasks/few_shot.py)


@dataclasses.dataclass(frozen=True)
class LookupConfig:
    """Multi-hop questions over a generated knowledge base with BM25 search (tasks/lookup)."""

    seed: int = 0  # of the knowledge base and the questions
    difficulty: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # weights of 1, 2, ... hops
    demo_difficulty: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    shots: tuple[float, ...] = ()  # solved examples of 1, 2, ... hops before each prompt (tasks/few_shot.py)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Public data sets, for the tasks math, multihop_qa and bfcl; `python -m trace_jax.data prepare` makes them."""

    folder: str | None = None  # of the prepared sets; ~/.cache/trace_jax/data if not given
    seed: int = 0  # of the order of training records, which is another one each epoch


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """How the same tasks are written as a chat (tasks/chat)."""

    template: str = "qwen3"  # or "llama3", or the path of a chat template whose history only ever grows
    thinking: bool = False  # the model thinks before it acts; thoughts stay in the history
    shots: int = 0  # solved conversations that every prompt begins with
    max_prompt_tokens: int = 2048  # records with a longer prompt are left out


@dataclasses.dataclass(frozen=True)
class MathConfig:
    """Mathematics with a Python tool (tasks/math). Training on DeepScaleR, 5 turns, 12 s a call: paper 6.2 and E.3."""

    train: str = "deepscaler"
    eval_sets: tuple[str, ...] = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")
    max_turns: int = 5
    python_timeout: float = 12.0  # seconds of a call that names none
    python_workers: int = 4  # calls that run at the same time on this machine
    python_url: str | None = None  # of a code-execution service in place of this machine's sandbox
    check_workers: int = 2  # processes that compare answers
    check_timeout: float = 5.0  # seconds after which an answer that cannot be compared is wrong


@dataclasses.dataclass(frozen=True)
class MultihopQaConfig:
    """Multi-hop questions with a search tool (tasks/multihop_qa). HotpotQA and 5 turns: paper 6.2 and E.3."""

    train: str = "hotpotqa"
    eval_sets: tuple[str, ...] = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    max_turns: int = 5
    search_url: str | None = None  # of `python -m trace_jax.retrieval`; None: BM25 over the paragraphs of the records
    document_characters: int = 300  # that a search shows of each document; rLLM's agent, which the paper's is


@dataclasses.dataclass(frozen=True)
class BfclConfig:
    """Multi-turn function calling of BFCL v4 (tasks/bfcl). 40 model turns: paper E.3."""

    categories: tuple[str, ...] = ("base", "long_context", "miss_func", "miss_param")
    max_turns: int = 40
