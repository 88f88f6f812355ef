"""Data of a report: rows of the history, and from the run directory the data without rows (samples, model size)."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rlhf_core.errors import JournalDamaged
from rlhf_core.files.appended import read_models
from rlhf_core.history import queries, saved_queries
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.evidence import EvidenceExcerpts, read_incident_evidence
from rlhf_core.render.markup import as_time
from rlhf_core.render.series import Curve, Point, is_finite
from rlhf_core.render.timeline import Timeline, timeline_from_rows
from rlhf_core.run_dir.journal import read_journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.evaluation import EvaluationSample
from rlhf_core.schemas.failures import Action
from rlhf_core.schemas.journal import PromotionMoved
from rlhf_core.schemas.reports import SampleLine
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import PRUNED_METRICS

Rows = Sequence[Mapping[str, Any]]
Found = TypeVar("Found")
RowT = TypeVar("RowT", bound=Mapping[str, Any])

MAX_WITH_EVIDENCE = 20
"""Number of newest incidents whose stacks and logs are included in the report."""


@dataclass(frozen=True)
class FiniteScore:
    """The result of an evaluation whose value and interval are finite."""

    name: str
    when: str
    metric: str
    point: Point


@dataclass(frozen=True, kw_only=True)
class ReportData(RunDetails):
    """Data of one run: its details, and what only a report shows."""

    timeline: Timeline
    curves: Mapping[str, Curve]
    """Effective metrics: after a rewind, the last attempt's value of each step."""
    spec: RunSpec | None
    """Spec of the run; None if this version cannot read it."""
    tables: Mapping[tuple[str, str], Sequence[EvaluationSample]]
    """Sample tables of the evaluations, by when (before, after) and name (greedy, sampled)."""
    samples: Sequence[SampleLine]
    """Completions sampled in training, by step."""
    num_parameters: int | None
    """Parameters of the model; None if the run directory contains no model."""
    notes: Sequence[str]
    """Sentences about data that could not be read."""
    probes: Rows = ()
    """Measurements of the nodes before training: saved query ``probe-speeds``."""
    evidence: Mapping[str, EvidenceExcerpts] = field(default_factory=dict)
    """Stacks and logs of the newest incidents, by ``evidence_dir``."""
    promotion_moves: Rows = ()
    """Changes of the promotion, from the journal: time, state, by, reason and path of each."""

    @property
    def finite_scores(self) -> list[FiniteScore]:
        """Results of the evaluations, without those that are not finite."""
        return [
            FiniteScore(row["name"], row["when"], row["metric"], Point(row["checkpoint_step"], value, low, high))
            for row in self.evaluations
            if is_finite(value := row["value"])
            and is_finite(low := row["ci_low"])
            and is_finite(high := row["ci_high"])
        ]

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.run["run_id"]

    @property
    def state(self) -> str:
        """State of the run."""
        return self.run["state"]

    @property
    def last_seen(self) -> datetime:
        """The last time recorded in the history; used as the end of anything that has not ended."""
        rows: list[Mapping[str, Any]] = [self.run, *self.stages, *self.restarts, *self.checkpoints]
        names = ("created_at", "progress_at", "started_at", "ended_at", "completed_at")
        times = [time for row in rows for name in names if (time := as_time(row.get(name))) is not None]
        return max([*times, *(one.incident.seen_at for one in self.timeline.incidents)])

    def restarts_in_place(self, attempt: int | None = None) -> int:
        """Number of restarts inside an allocation. ``restarts`` counts starts for any reason, including the
        evaluator's."""
        made = [one.decision for one in self.timeline.decisions]
        return sum(one.action is Action.RESTART_IN_PLACE and attempt in (None, one.attempt) for one in made)

    @property
    def warm_start_steps(self) -> int:
        """Steps of the warm start before the main loop."""
        return self.spec.warm_start_steps if self.spec else 0


def gather(store: HistoryStore, run_dir: RunDir) -> ReportData:
    """Read a run. Without its directory, the report lacks training samples and model size, and says so. The same holds
    for files that cannot be read: a run directory may belong to another user.

    Raises:
        UnknownRun: the history does not have the run.
    """
    run_id = run_dir.run_id
    details = queries.show_run(store, run_id)
    run = details.run
    notes = []
    if not run_dir.root.is_dir():
        notes.append(
            f"The run directory {run_dir.root} is gone: samples of training and the model's size are left out."
        )
    if run["missing_steps"]:
        notes.append(f"The run left {run['missing_steps']}; the curves have gaps there.")
    if run["metrics_pruned"]:
        notes.append(f"{PRUNED_METRICS}.")
    try:
        spec = RunSpec.model_validate(run["spec"])
    except ValidationError:
        spec = None
        notes.append(
            f"The settings are left out, because version {run['package_version']} wrote them in a form this one does "
            "not read."
        )
    timeline = timeline_from_rows(run_dir, run, details.incidents, details.decisions, details.restarts)
    return ReportData(
        **vars(details),
        timeline=timeline,
        curves=queries.curve(store, run_id),
        spec=spec,
        tables={
            (row["when"], row["name"]): _sample_table(store, run_id, row["when"], row["name"])
            for row in details.evaluations
        },
        evidence=_evidence(run_dir, timeline),
        samples=_readable(lambda: _training_samples(run_dir), [], "Samples of training are", notes),
        num_parameters=_readable(lambda: _num_parameters(run_dir), None, "The model's size is", notes),
        notes=notes,
        probes=_probes(store, run_id),
        promotion_moves=_readable(lambda: _promotion_moves(run_dir), [], "Changes of the promotion are", notes),
    )


def _readable(read: Callable[[], Found], missing: Found, name: str, notes: list[str]) -> Found:
    """Read a part of the run directory; if that fails, add a note and return the value for a missing part."""
    try:
        return read()
    except (OSError, JournalDamaged) as error:
        notes.append(f"{name} left out: {error}.")
        return missing


def find_row(rows: Iterable[RowT], **wanted: object) -> RowT | None:
    """The last row that has all the wanted values; None if there is none."""
    matching = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    return matching[-1] if matching else None


def _probes(store: HistoryStore, run_id: str) -> list[Mapping[str, Any]]:
    answer = saved_queries.run(store, saved_queries.find("probe-speeds"), {"run": run_id})
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


def _evidence(run_dir: RunDir, timeline: Timeline) -> Mapping[str, EvidenceExcerpts]:
    found = (one.incident for one in timeline.incidents[-MAX_WITH_EVIDENCE:])
    read = {one.evidence_dir: read_incident_evidence(run_dir, one.evidence_dir, one.suspect_ranks) for one in found}
    return {folder: evidence for folder, evidence in read.items() if evidence is not None}


def _promotion_moves(run_dir: RunDir) -> list[Mapping[str, Any]]:
    return [
        {"time": line.time.isoformat(), **line.event.model_dump(mode="json")}
        for line in read_journal(run_dir.control)
        if isinstance(line.event, PromotionMoved)
    ]


def _sample_table(store: HistoryStore, run_id: str, when: str, name: str) -> list[EvaluationSample]:
    columns = set(EvaluationSample.model_fields) - {"score"}
    return [
        EvaluationSample(
            **{column: row[column] for column in columns}, score=math.nan if row["score"] is None else row["score"]
        )
        for row in queries.evaluation_samples(store, run_id, when, name)
    ]


def _training_samples(run_dir: RunDir) -> list[SampleLine]:
    """Sampled completions; for a step repeated after a rewind, those of the last time."""
    of_step: dict[int, list[SampleLine]] = {}
    for restart in run_dir.restarts():
        here: dict[int, list[SampleLine]] = {}
        for line in read_models(restart.samples, SampleLine):
            here.setdefault(line.step, []).append(line)
        of_step |= here
    return [line for step in sorted(of_step) for line in of_step[step]]


def _num_parameters(run_dir: RunDir) -> int | None:
    """Number of parameters in the newest whole weights of the run, from the headers of their files. A checkpoint of an
    adapter has none: the base model is elsewhere."""
    for folder in [*(checkpoint.model for checkpoint in reversed(run_dir.checkpoints())), run_dir.initial_model]:
        files = sorted(folder.glob("model*.safetensors"))
        if files:
            with suppress(ValueError, LookupError, TypeError, AttributeError):  # damaged: look further
                return sum(map(_count_elements, files))
    return None


_MAX_HEADER_BYTES = 100_000_000
"""Limit of the format; the length in a damaged file may be anything."""


def _count_elements(path: Path) -> int:
    """Number of elements in a safetensors file, whose first 8 bytes give the length of the JSON header that follows."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
