"""Scan of data files in one pass, row by row, without a library."""

import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rlhf_core.files.data_rows import KINDS, READERS, Malformed, absent_value, first_answer, label_of, pair_problem
from rlhf_core.files.reading import open_regular
from rlhf_core.preflight.facts import BadRows, DataFile, LineProblem
from rlhf_core.preflight.missing_paths import missing
from rlhf_core.preflight.templates import named_columns
from rlhf_core.schemas.data import DataKind, RowSource
from rlhf_core.schemas.run import RunSpec

SHOWN = 5
"""Number of problems of each kind that are shown; all are counted."""


def scan_files(spec: RunSpec, files: Mapping[str, str], tick: Callable[[], None] = lambda: None) -> dict[str, DataFile]:
    """Scan files of rows.

    Args:
        files: settings that name them, and their paths; some or all of ``spec.data.files``.
    """
    tables = spec.data.tables
    return {
        setting: scan(
            Path(path),
            tables[setting.rpartition(".")[0]],
            tick,
            read_elsewhere=is_read_elsewhere(spec, setting),
            kinds=spec.data_kinds,
        )
        for setting, path in files.items()
    }


def is_read_elsewhere(spec: RunSpec, setting: str) -> bool:
    """Return True if a setting names training data that another program reads in its own format."""
    return setting == "data.train" and spec.trainer.kind == "command"


def scan(
    path: Path,
    data: RowSource,
    tick: Callable[[], None] = lambda: None,
    *,
    read_elsewhere: bool = False,
    kinds: AbstractSet[DataKind] = frozenset({"answer"}),
) -> DataFile:
    """Read a data file.

    Args:
        tick: called every few thousand rows; may raise to stop.
        read_elsewhere: True if another program reads the file in its own format: it may be a folder or have any suffix,
            and its rows need not have the configured columns.
        kinds: data that the loops need from each row besides its prompt.
    """
    suffix = path.suffix.lower()
    # Unlike those of Path, these are false where nothing can be looked up, as in a folder of another user.
    is_dir, exists = os.path.isdir(path), os.path.exists(path)  # noqa: PTH110, PTH112
    if read_elsewhere and (is_dir or (exists and suffix not in KINDS)):
        return DataFile(path, scanned=False)
    if is_dir:
        return DataFile(path, problem=f"found a folder, expected a file ending in {', '.join(KINDS)}")
    if exists and suffix not in KINDS:
        return DataFile(path, problem=f'found a file ending in "{path.suffix}", expected one of {", ".join(KINDS)}')
    try:
        with open_regular(path, follow_link=True) as file:  # opening a FIFO would block
            start = file.read(4)
    except FileNotFoundError:
        return DataFile(path, problem=missing(path, "file"))
    except OSError as error:
        return DataFile(path, problem=error.strerror or str(error))
    if suffix == ".parquet":
        problem = "" if start == b"PAR1" else "not a Parquet file: it does not begin with PAR1"
        return DataFile(path, problem=problem, scanned=False)
    found = _PromptScan(data) if read_elsewhere else _Scan(data, kinds)
    for count, (line, row) in enumerate(READERS[suffix](path)):
        if isinstance(row, Malformed) and row.ends_file:
            return DataFile(path, problem=f"line {line}: {row.problem}")
        found.add(line, row)
        if count % 4096 == 0:
            tick()
    return found.result(path)


class _First:
    """Counter of the problems of one kind that keeps the first few."""

    def __init__(self) -> None:
        self.problems: list[LineProblem] = []
        self.count = 0

    def add(self, line: int, message: str = "") -> None:
        self.count += 1
        if len(self.problems) < SHOWN:
            self.problems.append(LineProblem(line, message))

    def rows(self) -> BadRows:
        return BadRows(self.count, tuple(self.problems))


class _Scan:
    def __init__(self, data: RowSource, kinds: AbstractSet[DataKind]) -> None:
        self._data = data
        self._pairs = "pair" in kinds
        self._labels = "label" in kinds
        self._answers_needed = "answer" in kinds
        self._needed = sorted({column for columns in named_columns(data, kinds).values() for column in columns})
        self._columns: set[str] = set()
        self._num_rows = 0
        self._malformed = _First()
        self._lacking = {column: _First() for column in self._needed}
        self._empty_prompts = _First()
        self._empty_answers = _First()
        self._blank_prompts = _First()
        self._duplicates = _First()
        self._contradictions = _First()
        self._answers: dict[bytes, bytes] = {}

    def add(self, line: int, row: Mapping[str, Any] | Malformed) -> None:
        if isinstance(row, Malformed):
            self._malformed.add(line, row.problem)
            return
        self._num_rows += 1
        self._columns.update(row)
        whole = True
        for column in self._needed:
            if column not in row:
                self._lacking[column].add(line, f'no column "{column}"')
                whole = False
            elif absent := absent_value(row[column]):
                self._malformed.add(line, f'column "{column}" is {absent}')
                whole = False
        if whole:
            self._add_whole(line, row)

    def _add_whole(self, line: int, row: Mapping[str, Any]) -> None:
        data = self._data
        if self._labels and label_of(row[data.label_column]) is None:
            self._malformed.add(line, f'expected true or false in column "{data.label_column}"')
            return
        whole = row[data.messages_column] if data.messages_column else None
        first = first_answer(whole) if isinstance(whole, list) else None
        if isinstance(whole, list) and first:
            row = {**row, data.prompt_column: whole[:first], data.answer_column: whole[first:]}
        elif data.messages_column:
            message = f'expected messages of the user, then of the model, in column "{data.messages_column}"'
            self._malformed.add(line, message)
            return
        given = row.get(data.prompt_column)
        if given in (None, "", []):
            # In a pair without a prompt column, both completions contain the prompt.
            given = row[data.chosen_column] if self._pairs else ""
        prompt = str(given)
        tools = row.get(data.tools_column) if data.tools_column else None
        learned = [str(row[data.answer_column])] if self._answers_needed else []
        if self._pairs:
            pair = row[data.chosen_column], row[data.rejected_column]
            if problem := pair_problem(*pair):
                self._malformed.add(line, problem)
                return
            learned += map(str, pair)
        try:
            # The same question with other tools is another prompt.
            encoded, answer = f"{prompt}{tools or ''}".encode(), "\0".join(learned).encode()
        except UnicodeEncodeError:
            self._malformed.add(line, "a text contains an unpaired surrogate, which is not valid Unicode")
            return
        if not prompt:
            self._empty_prompts.add(line)
        elif prompt.isspace():
            self._blank_prompts.add(line)
        if self._answers_needed and not learned[0]:
            self._empty_answers.add(line)
        key, answered = _hash(encoded), _hash(answer)
        if key in self._answers and self._answers[key] == answered:
            self._duplicates.add(line)
        elif key in self._answers:
            # These may have several completions per prompt.
            if not self._pairs and not self._labels and not self._data.messages_column:
                self._contradictions.add(line)
        else:
            self._answers[key] = answered

    def result(self, path: Path) -> DataFile:
        # A column that no row has is a wrong setting, reported once; one that only some rows lack is a problem of these
        # rows.
        partial = [first for column, first in self._lacking.items() if column in self._columns]
        kinds = [self._malformed, *partial]
        problems = sorted((problem for kind in kinds for problem in kind.problems), key=lambda problem: problem.line)
        return DataFile(
            path,
            num_rows=self._num_rows,
            columns=frozenset(self._columns),
            malformed=BadRows(sum(kind.count for kind in kinds), tuple(problems[:SHOWN])),
            empty_prompts=self._empty_prompts.rows(),
            empty_answers=self._empty_answers.rows(),
            blank_prompts=self._blank_prompts.rows(),
            duplicates=self._duplicates.rows(),
            contradictions=self._contradictions.rows(),
            prompt_hashes=frozenset(self._answers),
        )


class _PromptScan(_Scan):
    """Scan of rows that another program reads: only the prompt column is used, if present."""

    def __init__(self, data: RowSource) -> None:
        super().__init__(data, frozenset())
        self._needed = []

    def _add_whole(self, line: int, row: Mapping[str, Any]) -> None:
        prompt = row.get(self._data.prompt_column)
        if isinstance(prompt, str) and prompt:
            self._answers[_hash(prompt.encode(errors="surrogatepass"))] = b""


def _hash(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).digest()
