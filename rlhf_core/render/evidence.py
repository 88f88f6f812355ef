"""Excerpts of an incident's evidence: stacks and ends of logs, those of the suspect ranks first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlhf_core.files.appended import read_tail
from rlhf_core.files.reading import read_document
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.text.redaction import masked

MAX_STACKS, STACK_LINES = 3, 24
"""Stacks per incident, and lines taken from the top of each."""

MAX_LOGS, LOG_LINES = 2, 15
"""Logs per incident, and lines taken from the end of each."""

MAX_LINE = 200
"""Longest line of a stack or log, in characters."""

_TAIL_BYTES = 16 << 10
_RANKS = TypeAdapter(tuple[RankStatus, ...])


@dataclass(frozen=True)
class Excerpt:
    """Some lines of a file."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class EvidenceExcerpts:
    """The readable part of an evidence folder. Files that cannot be read are left out."""

    folder: Path
    files: tuple[Path, ...]
    """All files in it, sorted."""
    stacks: tuple[Excerpt, ...]
    """Tops of stacks."""
    logs: tuple[Excerpt, ...]
    """Ends of logs."""


def read_evidence(folder: Path, suspect_ranks: Sequence[int]) -> EvidenceExcerpts:
    """Read the excerpts of an evidence folder; empty if the folder is gone."""
    files = _files(folder)
    suspects = set(_places(folder, suspect_ranks))
    stacks = [Excerpt(path.name, _head(path)) for path in _first(files, "stack", suspects)[:MAX_STACKS]]
    logs = [
        Excerpt(path.name, _shortened(read_tail(path, _TAIL_BYTES))[-LOG_LINES:])
        for path in _first(files, "log", suspects)[:MAX_LOGS]
    ]
    return EvidenceExcerpts(folder, tuple(files), tuple(stacks), tuple(logs))


def read_incident_evidence(run_dir: RunDir, evidence_dir: str, suspect_ranks: Sequence[int]) -> EvidenceExcerpts | None:
    """Read the evidence of an incident; None if it has none, or names a folder outside its run."""
    folder = (run_dir.root / evidence_dir).absolute()
    # The folder's name comes from a file of the run, which must not make this open anything else.
    if not evidence_dir or not folder.resolve().is_relative_to(run_dir.root.resolve()):
        return None
    return read_evidence(folder, suspect_ranks)


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.rglob("*") if path.is_file())
    except OSError:
        return []


def _first(files: Sequence[Path], kind: str, suspects: set[str]) -> list[Path]:
    """Files of one kind (``<kind>-<node>-<local rank>.txt``), those of the suspects first."""
    of_kind = (path for path in files if path.name.startswith(f"{kind}-") and path.suffix == ".txt")
    found = [path for path in of_kind if _has_content(path)]  # ranks other than the first print nothing
    return sorted(found, key=lambda path: path.stem.removeprefix(f"{kind}-") not in suspects)


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _places(folder: Path, ranks: Sequence[int]) -> Iterator[str]:
    """``<node>-<local rank>`` of each of these ranks, as recorded by the agents."""
    for path in folder.glob("ranks-*.json"):
        try:
            ranks_of_node = _RANKS.validate_json(read_document(path))
        except (OSError, ValidationError):
            continue
        node = path.stem.removeprefix("ranks-")
        yield from (f"{node}-{one.local_rank}" for one in ranks_of_node if one.rank in ranks)


def _head(path: Path) -> tuple[str, ...]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            found = _shortened(file.read(_TAIL_BYTES))
    except OSError:
        return ()
    more = len(found) - STACK_LINES
    return (*found[:STACK_LINES], f"... {more} more lines") if more > 0 else found


def _shortened(text: str) -> tuple[str, ...]:
    # Older versions wrote unmasked files. Mask before cutting: half a secret would not be recognised.
    lines = masked(text).rstrip().splitlines()
    return tuple(line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3]}..." for line in lines)
