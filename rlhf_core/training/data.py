"""From data files to rows to tokens. Imports no torch.

Files are read by ``rlhf_core/data_files.py``, which names a bad line by file and number before anything is trained.
"""

import dataclasses
import importlib
import itertools
import json
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import JsonValue

from rlhf_core.data_files import KINDS, READERS, FileRow, Malformed, label_of, pair_problem, place, template_columns
from rlhf_core.errors import BadConfig, BadData
from rlhf_core.schemas.run import DataSpec, RunSpec
from rlhf_core.training.chat import common_beginning, messages_problem, rendered, turns
from rlhf_core.training.types import Conversation, Messages, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class DataReport:
    """What was read of one split."""

    source: str
    """The file or generator."""
    num_rows: int
    """Rows ready for use."""
    num_malformed: int
    """Rows left out because they were not valid (``data.malformed_rows = "drop"``)."""
    first_problem: str = ""
    """What was wrong with the first of them, with file and line."""


@dataclass(frozen=True)
class EncodedPrompts:
    """Rows whose prompts fit, and their tokens, in the same order."""

    rows: list[Row]
    token_ids: list[list[int]]
    num_overlong: int
    """Rows left out because their prompt is longer than ``data.max_prompt_tokens``, or a completion than
    ``data.max_completion_tokens``."""


class _MalformedRow(Exception):
    """One row is not valid."""


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def load_rows(spec: RunSpec, split: Split) -> list[Row]:
    """The rows of a split; see :func:`load_data`."""
    return load_data(spec, split)[0]


def load_data(spec: RunSpec, split: Split, limit: int | None = None) -> tuple[list[Row], DataReport]:
    """Read a split and fill its templates. The same on every rank: order and identities follow from the data alone.

    In templates ``{prompt}``, ``{answer}``, ``{chosen}`` and ``{rejected}`` are the columns that
    ``data.prompt_column`` and so on name; other names are columns of those names. Values that are no text are turned
    into text with ``str``; a prompt that is a list of messages makes the row a conversation (``chat.py``).

    Args:
        limit: read no more rows than this; None for all.

    Raises:
        BadData: the file is missing or of an unknown kind, a row is not valid and ``data.malformed_rows`` is ``error``
            (the message names file and line), or no row is left.
        BadConfig: the generator does not import, or a template is not well formed.
    """
    data = spec.data
    source = _source(data, split)
    reader = _RowReader(spec)
    rows: list[Row] = []
    problems: list[str] = []
    for where, content in itertools.islice(_records(spec, split, source), limit):
        try:
            if isinstance(content, Malformed):
                if content.ends_file:
                    raise BadData(f"{where}: {content.problem}")
                raise _MalformedRow(content.problem)
            rows.append(reader.row(content))
        except _MalformedRow as error:
            if data.malformed_rows == "error":
                raise BadData(f'{where}: {error} (data.malformed_rows = "drop" leaves such rows out)') from None
            problems.append(f"{where}: {error}")
    if not rows:
        found = f"all {len(problems)} rows are malformed; the first: {problems[0]}" if problems else "it has no rows"
        raise BadData(f"{source}: {found}")
    return rows, DataReport(source, len(rows), len(problems), problems[0] if problems else "")


def _source(data: DataSpec, split: Split) -> str:
    source = data.generator or (data.train if split == "train" else data.eval)
    if not source:
        raise BadData("no held-out data: give data.eval a file in the format of data.train")
    return source


class _RowReader:
    """Makes rows of the columns of a source."""

    def __init__(self, spec: RunSpec) -> None:
        data = spec.data
        self._data = data
        self._pairs = "pair" in spec.data_kinds
        self._needs_answer = "answer" in spec.data_kinds
        self._labels = "label" in spec.data_kinds
        self._seen: Counter[str] = Counter()
        self._templates = {"prompt": data.prompt_template, "target": data.completion_template}
        if self._pairs:
            self._templates |= {"chosen": data.chosen_template, "rejected": data.rejected_template}
        keys = {"target": "completion"}
        self._used = {
            name: _template_fields(f"{keys.get(name, name)}_template", template)
            for name, template in self._templates.items()
        }

    def row(self, columns: Mapping[str, JsonValue]) -> Row:
        """One row.

        Raises:
            _MalformedRow: it is not valid.
        """
        fields = self._named(columns)
        made = [name for name in self._templates if name != "target" or "answer" in fields]
        completions = ("chosen", "rejected") if self._pairs else ()
        for name in ("answer", *completions, "prompt"):
            if name in fields and fields[name] is None:
                raise _MalformedRow(f'column "{name}" is null')
        is_chat = any(isinstance(fields[name], list) for name in ("prompt", *completions))
        row = self._conversation(fields, columns) if is_chat else self._texts(fields, columns, made)
        if self._pairs:
            pair = (row.chat.chosen, row.chat.rejected) if row.chat else (row.chosen, row.rejected)
            if problem := pair_problem(*pair):
                raise _MalformedRow(problem)
        self._seen[row.uid] += 1
        uid = f"{row.uid}-{self._seen[row.uid] - 1}"
        return dataclasses.replace(row, uid=uid, margin=self._margin(columns), desirable=self._label(columns))

    def _named(self, columns: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """The columns, and those that settings name under the names that templates have for them."""
        data = self._data
        names = {"prompt": data.prompt_column, "answer": data.answer_column}
        if self._pairs:
            names |= {"chosen": data.chosen_column, "rejected": data.rejected_column}
        fields = dict(columns)
        for alias, column in names.items():
            if column in columns:
                fields[alias] = columns[column]
            elif alias == "answer" and not self._needs_answer:
                fields.pop(alias, None)
            elif alias != "prompt" or not self._pairs:
                raise _MalformedRow(
                    f'no column "{column}" (data.{alias}_column); it has: {", ".join(columns) or "none"}'
                )
        if self._pairs and data.prompt_column not in columns:
            fields |= _split(fields["chosen"], fields["rejected"])
        return fields

    def _texts(self, fields: Mapping[str, JsonValue], columns: Mapping[str, JsonValue], made: Sequence[str]) -> Row:
        """A row of texts: its templates, filled."""
        used = set().union(*(self._used[name] for name in made))
        for name in sorted(used):
            if name not in fields:
                raise _MalformedRow(f'no column "{name}" for a template of [data]; it has: {", ".join(columns)}')
            if fields[name] is None:
                raise _MalformedRow(f'column "{name}" is null')
        values = {name: str(value) for name, value in fields.items()}
        texts = {name: self._templates[name].format_map(values) for name in made}
        answer = values.get("answer", "")
        _check_text("".join(texts.values()) + answer)
        if not texts["prompt"]:
            raise _MalformedRow("the prompt is empty")
        return Row(
            _digest(texts["prompt"]),
            texts["prompt"],
            answer,
            texts.get("target", ""),
            dict(columns),
            chosen=texts.get("chosen", ""),
            rejected=texts.get("rejected", ""),
        )

    def _conversation(self, fields: Mapping[str, JsonValue], columns: Mapping[str, JsonValue]) -> Row:
        """A row of messages. Templates are for text: of messages the tokenizer's chat template makes one."""
        if not isinstance(fields["prompt"], list):
            raise _MalformedRow(f"expected a list of messages as prompt too, found {fields['prompt']!r:.60}")
        completions: dict[str, Messages] = {}
        for name, column in (("target", "answer"), ("chosen", "chosen"), ("rejected", "rejected")):
            value = fields.get(column) if name == "target" or self._pairs else None
            if value is not None and not isinstance(value, list):
                value = self._templates[name].format_map({key: str(other) for key, other in fields.items()})
            completions[name] = turns(value) if value else []
        for name, messages in (("prompt", fields["prompt"]), *completions.items()):
            if (messages or name == "prompt") and (problem := messages_problem(list(messages))):  # type: ignore[arg-type]
                raise _MalformedRow(f"{name}: {problem}")
        chat = Conversation(prompt=turns(fields["prompt"]), **completions)
        prompt = json.dumps(fields["prompt"], ensure_ascii=False)
        target = str(chat.target[-1]["content"]) if chat.target else ""
        answer = fields.get("answer")
        _check_text(prompt + json.dumps([list(messages) for messages in completions.values()], ensure_ascii=False))
        return Row(
            _digest(prompt),
            prompt,
            target if isinstance(answer, list) else "" if answer is None else str(answer),
            target,
            dict(columns),
            chosen=str(chat.chosen[-1]["content"]) if chat.chosen else "",
            rejected=str(chat.rejected[-1]["content"]) if chat.rejected else "",
            chat=chat,
        )

    def _label(self, columns: Mapping[str, JsonValue]) -> bool:
        name = self._data.label_column
        if not self._labels:
            return True
        if name not in columns:
            raise _MalformedRow(f'no column "{name}" (data.label_column); it has: {", ".join(columns)}')
        label = label_of(columns[name])
        if label is None:
            raise _MalformedRow(
                f'expected true or false in column "{name}" (data.label_column), found {columns[name]!r:.60}'
            )
        return label

    def _margin(self, columns: Mapping[str, JsonValue]) -> float:
        name = self._data.margin_column
        if not name or not self._pairs:
            return 0.0
        if name not in columns:
            raise _MalformedRow(f'no column "{name}" (data.margin_column); it has: {", ".join(columns)}')
        try:
            margin = float(columns[name])  # type: ignore[arg-type]  # whatever it is
        except (TypeError, ValueError):
            margin = math.nan
        if not math.isfinite(margin):
            raise _MalformedRow(
                f'expected a number in column "{name}" (data.margin_column), found {columns[name]!r:.60}'
            )
        return margin


def _split(chosen: JsonValue, rejected: JsonValue) -> dict[str, JsonValue]:
    """A pair without a prompt: the prompt that both completions begin with, and what is left of them."""
    for kind in (str, list):
        if isinstance(chosen, kind) and isinstance(rejected, kind):
            length = common_beginning(chosen, rejected)
            if not length:
                raise _MalformedRow(
                    "no prompt, and the chosen and the rejected completion begin with nothing in common"
                )
            return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}
    raise _MalformedRow("no prompt, and completions that are neither both texts nor both lists of messages")


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _MalformedRow("a text holds half of a surrogate pair, which is no valid Unicode") from None


def _template_fields(key: str, template: str) -> set[str]:
    names, problem = template_columns(template)
    if problem:
        raise BadConfig(f"data.{key}: {problem}")
    return set(names)


# ---------------------------------------------------------------------------------------------------------------------
# Records: the rows of a source as they stand, each with its place for error messages

Record = tuple[str, Mapping[str, JsonValue] | Malformed]


def _records(spec: RunSpec, split: Split, source: str) -> Iterator[Record]:
    if spec.data.generator:
        return _generated(source, split, spec.seed, spec.data.generator_args)
    path = Path(source)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise BadData(f'{path}: found a file ending in "{path.suffix}"; expected one of {", ".join(KINDS)}')
    if not path.is_file():
        raise BadData(f"{path}: there is no such file (data.{split})")
    return ((place(path, number), content) for number, content in reader(path))


def _read_parquet(path: Path) -> Iterator[FileRow]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except pyarrow.ArrowException as error:
        yield number, Malformed(f"not a valid parquet file: {error}", ends_file=True)


_READERS = {**READERS, ".parquet": _read_parquet}


def _generated(source: str, split: Split, seed: int, arguments: Mapping[str, JsonValue]) -> Iterator[Record]:
    module_name, _, name = source.partition(":")
    try:
        generator = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise BadConfig(f"data.generator = {source} does not import: {error}") from error
    try:
        rows = list(generator(split, seed, **arguments))
    except TypeError as error:
        raise BadConfig(
            f"data.generator = {source} cannot be called as function(split, seed, **generator_args): {error}"
        ) from error
    for number, row in enumerate(rows):
        yield (
            f"{source}: row {number}",
            row if isinstance(row, Mapping) else Malformed(f"is no dictionary but {row!r:.80}"),
        )


# ---------------------------------------------------------------------------------------------------------------------
# Order


def row_indices(num_rows: int, seed: int, start: int, count: int) -> list[int]:
    """Part of the endless sequence in which rows are used: one permutation of all rows after the other.

    A pure function of its arguments, so that a position in the sequence is all that has to be saved.

    Args:
        num_rows: rows of the split.
        seed: ``seed`` of the run.
        start: position in the sequence, from 0.
        count: how many.
    """
    return [
        _permutation(num_rows, seed, position // num_rows)[position % num_rows]
        for position in range(start, start + count)
    ]


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> "array[int]":
    order = list(range(num_rows))
    random.Random(f"rows {seed} {epoch}").shuffle(order)
    return array("q", order)


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def encode_prompts(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", data: DataSpec) -> EncodedPrompts:
    """Rows with their texts, and the tokens of their prompts. Rows that are too long are left out or refused, as
    ``data.overlong_prompts`` and ``data.overlong_completions`` say.

    A tokenizer that puts a token in front of every text (``<s>``) does so, unless the prompt already begins with it, or
    is a conversation: there its chat template decides.

    Raises:
        BadData: a row is too long and the policy is ``error``, a prompt has no tokens or no text can be made of its
            messages, or no row is left.
    """
    kept = EncodedPrompts([], [], 0)
    num_overlong = 0
    for row in (rendered(row, tokenizer) for row in rows):
        token_ids = prompt_tokens(row, tokenizer)
        if not token_ids:
            raise BadData(f"the prompt {row.prompt[:80]!r} has no tokens with this tokenizer")
        problem = _too_long(row, token_ids, tokenizer, data)
        if not problem:
            kept.rows.append(row)
            kept.token_ids.append(token_ids)
        elif problem.policy == "error":
            raise BadData(f'{problem.text}; raise it, or leave such rows out with data.{problem.setting} = "drop"')
        else:
            num_overlong += 1
    if rows and not kept.rows:
        raise BadData(
            f"all {len(rows)} prompts are longer than data.max_prompt_tokens = {data.max_prompt_tokens}, or their "
            f"completions than data.max_completion_tokens = {data.max_completion_tokens}; raise them"
        )
    return dataclasses.replace(kept, num_overlong=num_overlong)


@dataclass(frozen=True)
class _LongText:
    text: str
    setting: str
    policy: Literal["drop", "error"]


def _too_long(
    row: Row, prompt: Sequence[int], tokenizer: "PreTrainedTokenizerBase", data: DataSpec
) -> _LongText | None:
    if len(prompt) > data.max_prompt_tokens:
        text = (
            f"the prompt {row.prompt[:80]!r}... has {len(prompt)} tokens, more than data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}"
        )
        return _LongText(text, "overlong_prompts", data.overlong_prompts)
    if not data.max_completion_tokens:
        return None
    for completion in completions_of(row):
        length = len(completion_tokens(completion, row, tokenizer))
        if length > data.max_completion_tokens:
            text = (
                f"the completion {completion[:80]!r}... has {length} tokens, more than data.max_completion_tokens = "
                f"{data.max_completion_tokens}"
            )
            return _LongText(text, "overlong_completions", data.overlong_completions)
    return None


def completions_of(row: Row) -> list[str]:
    """Completions of a row that are learned from."""
    return [text for text in (row.target, row.chosen, row.rejected) if text]


def prompt_tokens(row: Row, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokens of the prompt of a row that is text by now."""
    bos = tokenizer.bos_token
    begins = row.chat is not None or bool(bos and row.prompt.startswith(str(bos)))
    tokens: list[int] = tokenizer.encode(row.prompt, add_special_tokens=not begins)
    return tokens


def completion_tokens(text: str, row: Row, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokens of a completion of a row, with the end token: of a conversation, the one that the chat template sets."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    ends = row.chat is not None or tokens[-1:] == [tokenizer.eos_token_id]
    return tokens if ends else [*tokens, tokenizer.eos_token_id]
