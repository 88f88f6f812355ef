"""Loading of data files into rows and tokens. Does not import torch.

Files are read by ``rlhf_core/files/data_rows.py``, which names a bad line by file and number before anything is
trained.
"""

import dataclasses
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import BadData
from rlhf_core.files.data_rows import KINDS, READERS, FileRow, Malformed, place
from rlhf_core.schemas.data import DataSpec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import listed
from rlhf_core.training.data.chat import AT_ONCE, render_rows, template_arguments, turn_end
from rlhf_core.training.data.generated_rows import Record, Split, generated_rows
from rlhf_core.training.data.order import in_proportion
from rlhf_core.training.data.row_reader import MalformedRow, RowReader
from rlhf_core.training.types import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DataReport:
    """Report on the loading of one split."""

    source: str
    """The file or generator, or several files."""
    num_malformed: int
    """Number of invalid rows dropped (``data.malformed_rows = "drop"``)."""
    first_problem: str = ""
    """Problem of the first of them, with file and line."""
    digest: str = ""
    """Digest of the rows, once the ranks have compared them (``same_rows.py``)."""


@dataclass(frozen=True)
class EncodedPrompts:
    """Rows whose prompts fit, and their tokens, in the same order."""

    rows: list[Row]
    token_ids: list["array[int]"]
    """Four bytes per token: a list of Python's integers takes ten times as much, in every rank of a node."""
    num_overlong: int
    """Rows dropped because their prompt is longer than ``data.max_prompt_tokens``, or a completion longer than
    ``data.max_completion_tokens``."""
    num_malformed: int = 0
    """Conversations dropped because the chat template does not render them (``data.malformed_rows = "drop"``)."""
    first_problem: str = ""
    """Problem of the first of them, with file and line."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a completion besides the end token: of conversations, the one that ends a turn."""


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def load_rows(spec: RunSpec, split: Split) -> list[Row]:
    """Load the rows of a split; see :func:`load_data`."""
    return load_data(spec, split)[0]


def load_data(spec: RunSpec, split: Split, beat: Callable[[], None] = lambda: None) -> tuple[list[Row], DataReport]:
    """Read a split and fill its templates. The same on every rank: order and identities depend on the data alone.

    In templates, ``{prompt}``, ``{answer}``, ``{chosen}`` and ``{rejected}`` are the columns named by
    ``data.prompt_column`` and so on; other names are columns of those names. Other values than strings are converted
    with ``str``, except objects; a prompt that is a list of messages makes the row a conversation (``chat.py``).

    Args:
        beat: called every ``AT_ONCE`` rows.

    Raises:
        BadData: the file is missing or of an unknown kind, a row is invalid and ``data.malformed_rows`` is ``error``
            (the message names file and line), or no row of a source is left.
        BadConfig: the generator does not import, or a template is not well formed.
    """
    sources = spec.data.of_split(split)
    if not sources:
        raise BadData("no held-out data: set eval in a table [data.sources.NAME]")
    seen: Counter[str] = Counter()
    loaded = {name: _load_source(spec, split, name, seen, None, beat) for name in sources}
    reports = [report for _, report in loaded.values()]
    first = next((report.first_problem for report in reports if report.first_problem), "")
    report = DataReport(
        listed([report.source for report in reports], len(reports)), sum(one.num_malformed for one in reports), first
    )
    rows = {name: of_source for name, (of_source, _) in loaded.items()}
    if split == "eval":
        return in_proportion(rows), report
    return [row for of_source in rows.values() for row in of_source], report


def load_source(spec: RunSpec, split: Split, name: str, limit: int | None = None) -> list[Row]:
    """Rows of a single source, at most ``limit``; see :func:`load_data`."""
    return _load_source(spec, split, name, Counter(), limit, lambda: None)[0]


def _load_source(
    spec: RunSpec, split: Split, name: str, seen: Counter[str], limit: int | None, beat: Callable[[], None]
) -> tuple[list[Row], DataReport]:
    source = _source(spec.data, split, name)
    reader = RowReader(spec, name, seen)
    rows: list[Row] = []
    problems: list[str] = []
    for number, (where, content) in enumerate(itertools.islice(_records(spec, split, source), limit)):
        if number % AT_ONCE == 0:
            beat()
        try:
            if isinstance(content, Malformed):
                if content.ends_file:
                    raise BadData(f"{where}: {content.problem}")
                raise MalformedRow(content.problem)
            rows.append(reader.row(content, where))
        except MalformedRow as error:
            if spec.data.malformed_rows == "error":
                raise BadData(f"{where}: {error} {_DROP}") from None
            problems.append(f"{where}: {error}")
    if not rows:
        found = _all_malformed(problems) if problems else "it has no rows"
        raise BadData(f"{source}: {found}")
    return rows, DataReport(source, len(problems), problems[0] if problems else "")


_DROP = '(data.malformed_rows = "drop" skips such rows)'


def _all_malformed(problems: Sequence[str]) -> str:
    return f"all {len(problems)} rows are malformed; the first: {problems[0]}"


def _source(data: DataSpec, split: Split, name: str) -> str:
    of_name = data.source(name)
    source = data.generator or (of_name.train if split == "train" else of_name.eval)
    if not source:
        raise BadData("no held-out data: set data.eval to a file in the format of data.train")
    return source


# ---------------------------------------------------------------------------------------------------------------------
# Records


def _records(spec: RunSpec, split: Split, source: str) -> Iterator[Record]:
    if spec.data.generator:
        return generated_rows(source, split, spec.seed, spec.data.generator_args)
    path = Path(source)
    if path.is_dir():
        raise BadData(f"{path}: found a folder, expected a file ending in {', '.join(KINDS)} (data.{split})")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise BadData(f'{path}: found a file ending in "{path.suffix}"; expected one of {", ".join(KINDS)}')
    if not path.is_file():
        raise BadData(f"{path}: no such file (data.{split})")
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


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSpec,
    now: datetime | None = None,
    beat: Callable[[], None] = lambda: None,
) -> EncodedPrompts:
    """Render rows and tokenize their prompts. Rows that are too long are dropped or refused, according to
    ``data.overlong_prompts`` and ``data.overlong_completions``.

    A tokenizer that prepends a token (``<s>``) does so unless the prompt already begins with it or is a conversation,
    where the chat template decides.

    Args:
        now: time given to chat templates that write the date into prompts; None for the clock.
        beat: called every ``AT_ONCE`` rows, as a million of them take minutes.

    Raises:
        BadData: a row is too long or cannot be rendered and the policy is ``error``, a prompt has no tokens, or no row
            is left.
    """
    given = len(rows)
    arguments = template_arguments(data.template_args, now)
    rows, problems = render_rows(rows, tokenizer, arguments, beat)
    if problems and data.malformed_rows == "error":
        raise BadData(f"{problems[0]} {_DROP}")
    if given and not rows:
        raise BadData(_all_malformed(problems))
    completions = completion_lengths(rows, tokenizer, beat) if data.max_completion_tokens else [[] for _ in rows]
    kept = EncodedPrompts([], [], 0, len(problems), problems[0] if problems else "")
    num_overlong = 0
    for row, token_ids, lengths in zip(rows, prompt_tokens(rows, tokenizer, beat), completions, strict=True):
        if not token_ids:
            raise BadData(f"the prompt {row.prompt[:80]!r} has no tokens with this tokenizer")
        if _is_dropped(row, len(token_ids), lengths, data):
            num_overlong += 1
        else:
            kept.rows.append(row)
            kept.token_ids.append(token_ids)
    if rows and not kept.rows:
        raise BadData(
            f"all {len(rows)} prompts are longer than data.max_prompt_tokens = {data.max_prompt_tokens}, or their "
            f"completions than data.max_completion_tokens = {data.max_completion_tokens}; raise them"
        )
    return dataclasses.replace(kept, num_overlong=num_overlong, end_ids=_turn_ends(rows, tokenizer, arguments))


def _turn_ends(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any]
) -> tuple[int, ...]:
    end = turn_end(tokenizer, arguments) if any(row.chat is not None for row in rows) else None
    return () if end is None or end == tokenizer.eos_token_id else (end,)


def _is_dropped(row: Row, prompt_length: int, lengths: Sequence[int], data: DataSpec) -> bool:
    """True if a text of a row is too long, and such rows are dropped.

    Args:
        lengths: numbers of tokens of its completions; empty if they are not limited.

    Raises:
        BadData: a text is too long, and such rows are refused.
    """
    prompt = ("prompt", row.prompt, prompt_length, data.max_prompt_tokens, data.overlong_prompts)
    completions = [
        ("completion", text, length, data.max_completion_tokens, data.overlong_completions)
        for text, length in zip(completions_of(row), lengths, strict=False)
    ]
    for kind, text, length, most, policy in (prompt, *completions):
        if length > most:
            if policy == "error":
                raise BadData(
                    f"the {kind} {text[:80]!r}... has {length} tokens, more than data.max_{kind}_tokens = {most}; "
                    f'raise it, or skip such rows with data.overlong_{kind}s = "drop"'
                )
            return True
    return False


def completions_of(row: Row) -> list[str]:
    """Completions of a row that are trained on."""
    return [text for text in (row.target, row.chosen, row.rejected) if text]


def prompt_tokens(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", beat: Callable[[], None] = lambda: None
) -> list["array[int]"]:
    """Tokens of the prompts of rendered rows. An end token that the tokenizer appends is dropped, since a completion
    follows."""
    bos, end = tokenizer.bos_token, tokenizer.eos_token_id
    begins = [row.chat is not None or bool(bos and row.prompt.startswith(str(bos))) for row in rows]
    texts = [row.prompt for row in rows]
    found = [array("i") for _ in rows]
    for is_begun in (False, True):
        indices = [index for index, begun in enumerate(begins) if begun is is_begun]
        encoded = _encode([texts[index] for index in indices], tokenizer, beat, add_special_tokens=not is_begun)
        for index, tokens in zip(indices, encoded, strict=True):
            found[index] = tokens
    ended = [index for index, tokens in enumerate(found) if not begins[index] and len(tokens) > 1 and tokens[-1] == end]
    bare = _encode([texts[index] for index in ended], tokenizer, beat, add_special_tokens=False)
    for index, own in zip(ended, bare, strict=True):
        tokens = found[index]
        if tokens[len(tokens) - 1 - len(own) : -1] == own:
            found[index] = tokens[:-1]
    return found


def completion_lengths(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", beat: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """Numbers of tokens of the completions of rendered rows, end tokens included."""
    made = [(row, parts_of(text, row)) for row in rows for text in completions_of(row)]
    encoded = iter(continued_tokens([text for _, parts in made for text, _ in parts], tokenizer, beat))
    end = tokenizer.eos_token_id
    lengths = iter([len(_ended([token for _ in parts for token in next(encoded)], row, end)) for row, parts in made])
    return [[next(lengths) for _ in completions_of(row)] for row in rows]


def parts_of(text: str, row: Row) -> list[tuple[str, bool]]:
    """Parts of a completion of a row, which are tokenized one by one as a prompt and its completion are: what the model
    writes, which is learned, and what others write in between."""
    parts: list[tuple[str, bool]] = []
    done = 0
    for begin, end in row.chat.learned if row.chat is not None else ():
        parts += [(text[done:begin], False), (text[begin:end], True)]
        done = end
    return [part for part in [*parts, (text[done:], not done)] if part[0]] or [(text, True)]


def completion_tokens(text: str, row: Row, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokens of a completion of a row, with the end token; for a conversation, the end token of the chat template."""
    return learned_tokens(text, row, tokenizer)[0]


def learned_tokens(text: str, row: Row, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], tuple[bool, ...]]:
    """Those tokens, and whether each is learned; empty if all are."""
    parts = parts_of(text, row)
    encoded = continued_tokens([part for part, _ in parts], tokenizer)
    tokens = _ended([token for part in encoded for token in part], row, tokenizer.eos_token_id)
    if all(is_learned for _, is_learned in parts):
        return tokens, ()
    return tokens, tuple(learned for part, (_, learned) in zip(encoded, parts, strict=True) for _ in part)


def continued_tokens(
    texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", beat: Callable[[], None] = lambda: None
) -> list["array[int]"]:
    """Tokens of texts that continue another one, without the space that some tokenizers put in front of every text."""
    found = _encode(texts, tokenizer, beat, add_special_tokens=False)
    if not _puts_space_in_front(tokenizer):
        return found
    (before,) = _encode(["\n"], tokenizer, add_special_tokens=False)
    after = _encode([f"\n{text}" for text in texts], tokenizer, beat, add_special_tokens=False)
    return [
        tokens[len(before) :] if tokens[: len(before)] == before else alone
        for tokens, alone in zip(after, found, strict=True)
    ]


@lru_cache(maxsize=4)
def _puts_space_in_front(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """True if a text has other tokens alone than after a line break, as with SentencePiece in Llama 2."""
    before, alone, after = _encode(["\n", "a", "\na"], tokenizer, add_special_tokens=False)
    return after != before + alone


def _ended(tokens: list[int], row: Row, end: int) -> list[int]:
    return tokens if row.chat is not None or tokens[-1:] == [end] else [*tokens, end]


def _encode(
    texts: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    beat: Callable[[], None] = lambda: None,
    *,
    add_special_tokens: bool,
) -> list["array[int]"]:
    """Tokens of texts, in calls of at most ``AT_ONCE`` texts: for short texts, the calls take longer than their
    tokenization."""
    found: list[array[int]] = []
    for start in range(0, len(texts), AT_ONCE):
        beat()
        batch = list(texts[start : start + AT_ONCE])
        encoded = tokenizer(batch, add_special_tokens=add_special_tokens, return_attention_mask=False)["input_ids"]
        found += [array("i", tokens) for tokens in encoded]
    return found
