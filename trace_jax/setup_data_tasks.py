"""From settings to a chat task of public data sets: records, family with its tools, chat format."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError, RunConfig
from trace_jax.data import order, store
from trace_jax.data.errors import DataError
from trace_jax.report.console import Bar
from trace_jax.retrieval.base import IndexFolderError
from trace_jax.retrieval.client import SearchService
from trace_jax.retrieval.corpus import CorpusError
from trace_jax.sandbox.pool import PythonPool
from trace_jax.sandbox.result import Limits, SandboxError
from trace_jax.sandbox.service import PythonService
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.tasks.bfcl import split as bfcl_split
from trace_jax.tasks.bfcl.family import Bfcl
from trace_jax.tasks.chat.family import Family, Record
from trace_jax.tasks.chat.formats import load_format
from trace_jax.tasks.chat.records import DataSet, Records, data_set
from trace_jax.tasks.chat.render import Renderer
from trace_jax.tasks.chat.task import Chat, opening
from trace_jax.tasks.math.family import Math
from trace_jax.tasks.math.grading import Grader, GraderError
from trace_jax.tasks.multihop_qa import paragraphs
from trace_jax.tasks.multihop_qa.family import MultihopQa

_SHOW_FROM = 10_000  # records from which on reading them shows a bar


@dataclasses.dataclass(frozen=True)
class Sets:
    """The data sets of a run, before prompts that are too long are left out."""

    train: DataSet | None  # None where nothing is trained
    evaluation: tuple[DataSet, ...]


def make_chat(config: RunConfig, tokenizer: Any, *, training: bool = True) -> Chat:
    """The task that the config names. Without `training` the training set need not be there.

    Raises ConfigError for a data set that is not prepared, a template that cannot be used, a tool that cannot start.
    """
    sets = {"math": _math_sets, "multihop_qa": _qa_sets, "bfcl": _bfcl_sets}
    families = {"math": _math, "multihop_qa": _multihop_qa, "bfcl": _bfcl}
    try:
        form = load_format(config.chat.template)
        renderer = Renderer(form, thinking=config.chat.thinking, markers=tokenizers.markers(tokenizer))
    except ValueError as error:
        raise ConfigError(f"config.chat.template: {error}") from error
    try:
        chosen = sets[config.task](config, training)
    except DataError as error:
        raise ConfigError(f"config.data.folder: {error}") from error
    try:
        family = families[config.task](config, chosen)
        return _chat(config, family, renderer, chosen, functools.partial(tokenizers.encode, tokenizer))
    except (ValueError, ImportError, SandboxError, GraderError, CorpusError, IndexFolderError) as error:
        raise ConfigError(f"config.{config.task}: {error}") from error


def _chat(config: RunConfig, family: Family, renderer: Renderer, sets: Sets, encode: Callable[[str], Any]) -> Chat:
    limit, shots, begins = config.chat.max_prompt_tokens, config.chat.shots, set()

    def fits(record: Record) -> bool:
        _, begin, end = opening(family, renderer, record, shots)
        text = begin + end
        # A token has at least one byte, so most texts need no counting.
        kept = len(text.encode("utf-8", "replace")) <= limit or encode(text).size <= limit
        if kept:
            begins.add(begin)
        return kept

    train = None if sets.train is None else _where(sets.train, fits, limit)
    evaluation = tuple(_where(chosen, fits, limit) for chosen in sets.evaluation)
    first = evaluation[0] if train is None else train
    records = Records(first, evaluation, order.shuffled(max(len(first), 1), config.data.seed))
    return Chat(family, renderer, records, shots=shots, preamble=begins.pop() if len(begins) == 1 else "")


def _where(chosen: DataSet, fits: Callable[[Record], bool], limit: int) -> DataSet:
    """The records with prompts that fit; says how many do not."""
    bar = Bar(f"read {chosen.name}", len(chosen), "record") if len(chosen) >= _SHOW_FROM else None
    done = 0

    def counted(record: Record) -> bool:
        nonlocal done
        done += 1
        if bar is not None and done % 1000 == 0:
            bar.to(done)
        return fits(record)

    kept = chosen.where(counted)
    if bar is not None:
        bar.to(done)
        bar.close()
    too_long = len(chosen) - len(kept)
    if too_long:
        print(
            f"{chosen.name}: {too_long} of {len(chosen)} records are left out, their prompts are longer than "
            f"chat.max_prompt_tokens {limit}"
        )
    return dataclasses.replace(kept, too_long=too_long)


def _load(config: RunConfig, name: str, split: str) -> DataSet:
    folder = None if config.data.folder is None else Path(config.data.folder)
    return data_set(name, store.load(name, folder, split=split))


def _math_sets(config: RunConfig, training: bool) -> Sets:
    return _named_sets(config, training, config.math.train, config.math.eval_sets)


def _qa_sets(config: RunConfig, training: bool) -> Sets:
    return _named_sets(config, training, config.multihop_qa.train, config.multihop_qa.eval_sets)


def _named_sets(config: RunConfig, training: bool, train: str, evaluation: Sequence[str]) -> Sets:
    return Sets(
        train=_load(config, train, "train") if training else None,
        evaluation=tuple(_load(config, name, "test") for name in evaluation),
    )


def _bfcl_sets(config: RunConfig, training: bool) -> Sets:
    """Four fifths of each category's entries train, one fifth is held out (tasks/bfcl/split.py)."""
    whole = [_load(config, f"bfcl_{category}", "test") for category in config.bfcl.categories]
    held_out = tuple(chosen.where(lambda record: bfcl_split.side(record["id"]) == "eval") for chosen in whole)
    if not training:
        return Sets(None, held_out)
    train = [record for chosen in whole for record in chosen.where(lambda r: bfcl_split.side(r["id"]) == "train")]
    return Sets(data_set("bfcl", train), held_out)


def _math(config: RunConfig, sets: Sets) -> Math:
    settings = config.math
    if settings.python_url is not None:
        python = _tried(PythonService(settings.python_url))
    else:
        python = PythonPool(workers=settings.python_workers, limits=Limits())
    grader = Grader(workers=settings.check_workers, deadline=settings.check_timeout)
    return Math(python, grader, max_turns=settings.max_turns, timeout=settings.python_timeout)


def _tried(python: PythonService) -> PythonService:
    """The service, after one call. Raises ValueError where it does not run Python: a run would notice much later."""
    execution = python.run("print(6 * 7)", 10.0)
    if execution.stdout.strip() != "42":
        python.close()
        raise ValueError(f"python_url: {execution.stderr.strip() or 'the service does not run Python code'}")
    return python


def _multihop_qa(config: RunConfig, sets: Sets) -> MultihopQa:
    settings = config.multihop_qa
    if settings.search_url is not None:
        searcher = SearchService(settings.search_url)
    else:
        folder = store.default_folder() if config.data.folder is None else Path(config.data.folder)
        chosen = ([] if sets.train is None else [sets.train]) + list(sets.evaluation)
        searcher = paragraphs.index(
            paragraphs.Joined(chosen),
            folder / "indexes",
            name="-".join(records.name for records in chosen),
            progress=sum(map(len, chosen)) >= _SHOW_FROM,
        )
    return MultihopQa(searcher, max_turns=settings.max_turns, document_characters=settings.document_characters)


def _bfcl(config: RunConfig, sets: Sets) -> Bfcl:
    return Bfcl(max_turns=config.bfcl.max_turns)
