"""The controller's journal (``control.jsonl``): every decision is written to it before it takes effect, and the run's
state is read back from it.

The state of a run is a fold over its journal, so a controller needs no database to know its position: if it is killed
at any point, the next one continues from there.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from rlhf_core.errors import IllegalMove, JournalDamaged, LeaseLost, RunDirError
from rlhf_core.files.appended import LineWriter
from rlhf_core.files.whole import Reserve, is_disk_full
from rlhf_core.run_dir.journal import remove_unfinished_line, scan_journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import (
    ATTEMPT_ENDS,
    ATTEMPT_MOVES,
    PROMOTION_BEGINNINGS,
    PROMOTION_MOVES,
    RUN_ENDS,
    RUN_MOVES,
    AttemptState,
    PromotionState,
    RunState,
    StageName,
    StageState,
)
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckResult
from rlhf_core.schemas.failures import Decision, FailureKind, Incident
from rlhf_core.schemas.journal import (
    AttemptMoved,
    AttemptPlanned,
    AttemptSubmitted,
    CancelStarted,
    ChecksMade,
    ControlEvent,
    ControllerStarted,
    DecisionMade,
    IncidentFound,
    JournalLine,
    PromotionMoved,
    RunMoved,
    StageEnded,
    StageStarted,
    TrialPlanned,
)
from rlhf_core.schemas.resources import Placement, Submission


@dataclass
class StageRecord:
    """One stage, as recorded in the journal."""

    index: int
    name: StageName
    attempt: int
    started_at: datetime
    state: StageState = StageState.RUNNING
    ended_at: datetime | None = None
    message: str = ""
    """A remark; for a trial, its name."""


@dataclass
class AttemptRecord:
    """One attempt, as recorded in the journal."""

    placement: Placement
    state: AttemptState = AttemptState.PLANNED
    submission: Submission | None = None
    failure_kind: FailureKind | None = None
    cause: str = ""
    incident: Incident | None = None
    """The controller's own finding; agents write theirs to the incident folders."""
    decision: Decision | None = None
    ended_at: datetime | None = None
    """Time at which the controller saw that it had ended."""

    @property
    def ended(self) -> bool:
        """True if no part of it is running."""
        return self.state in ATTEMPT_ENDS


@dataclass(frozen=True)
class PromotionRecord:
    """State of the promotion of the model, as recorded in the journal."""

    state: PromotionState
    checkpoint_step: int
    requested_at: datetime
    """Time at which the promotion was requested; the approval deadline counts from here."""
    by: str = ""
    reason: str = ""
    path: str = ""

    @property
    def open(self) -> bool:
        """True if a controller still has to wait for the answer or write the model."""
        return self.state in (PromotionState.WAITING, PromotionState.APPROVED)


@dataclass
class RunRecord:
    """A whole run, as recorded in its journal."""

    state: RunState = RunState.PENDING
    cause: str = ""
    next_sequence: int = 0
    token: int = 0
    """Highest fencing token seen: lines with a lower one come from a controller that had lost the run."""
    stages: list[StageRecord] = field(default_factory=list)
    attempts: dict[int, AttemptRecord] = field(default_factory=dict)
    checks: tuple[CheckResult, ...] = ()
    trials: dict[str, str] = field(default_factory=dict)
    """Id of each trial, by the check that it serves."""
    promotion: PromotionRecord | None = None
    """None if no promotion was requested or made."""
    cancelling: str | None = None
    """Reason why the run is being ended; set while a controller has started ending it and has not finished."""
    first_attempt: int = 1
    """First attempt since a user last started or resumed the run; budgets count from here."""

    @property
    def ended(self) -> bool:
        """True if no part of the run is running."""
        return self.state in RUN_ENDS

    @property
    def last_number(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return max(self.attempts, default=0)

    @property
    def last_attempt(self) -> AttemptRecord | None:
        """The newest attempt, if there is one."""
        return self.attempts.get(self.last_number)

    def open_stage(self) -> StageRecord | None:
        """The stage that has begun and not ended."""
        return next((stage for stage in reversed(self.stages) if stage.state is StageState.RUNNING), None)

    def stage_state(self, name: StageName, attempt: int) -> StageState | None:
        """Latest outcome of a stage of an attempt; None if it was never begun."""
        found = [stage for stage in self.stages if (stage.name, stage.attempt) == (name, attempt)]
        return found[-1].state if found else None

    def apply(self, line: JournalLine) -> None:
        """Apply one line. Lines from a controller that had lost its lease do not count."""
        self.next_sequence = max(self.next_sequence, line.sequence + 1)
        if line.token < self.token:
            return
        self.token = line.token
        match line.event:
            case RunMoved(state=state, cause=cause):
                if self.ended and state is RunState.PREFLIGHT:
                    self.first_attempt = self.last_number + 1
                self.state, self.cause = state, cause
                if self.ended:
                    self.cancelling = None
            case ControllerStarted(resumed=True):
                self.first_attempt = max(self.first_attempt, self.last_number)
            case StageStarted(stage_index=index, name=name, attempt=attempt):
                self.stages.append(StageRecord(index, name, attempt, line.time))
            case StageEnded(stage_index=index, state=stage_state, message=message):
                for stage in self.stages:
                    if stage.index == index:
                        stage.state, stage.ended_at, stage.message = stage_state, line.time, message
            case ChecksMade(results=results):
                self.checks = results
            case CancelStarted(reason=reason):
                self.cancelling = reason
            case TrialPlanned(check_id=check_id, run_id=trial):
                self.trials[check_id] = trial
            case AttemptPlanned(placement=placement):
                self.attempts.setdefault(placement.attempt, AttemptRecord(placement))
            case AttemptSubmitted(submission=submission) if submission.attempt in self.attempts:
                self.attempts[submission.attempt].submission = submission
            case AttemptMoved(attempt=number, state=attempt_state, cause=cause, failure_kind=kind) if (
                number in self.attempts
            ):
                record = self.attempts[number]
                record.state, record.cause, record.failure_kind = attempt_state, cause, kind
                record.ended_at = line.time if record.ended else None
            case IncidentFound(incident=incident) if incident.attempt in self.attempts:
                self.attempts[incident.attempt].incident = incident
            case DecisionMade(decision=decision) if decision.attempt in self.attempts:
                self.attempts[decision.attempt].decision = decision
            case PromotionMoved(state=promotion_state, checkpoint_step=step, by=by, reason=reason, path=path):
                requested_at = line.time
                if self.promotion is not None and promotion_state is not PromotionState.WAITING:
                    requested_at = self.promotion.requested_at
                self.promotion = PromotionRecord(promotion_state, step, requested_at, by, reason, path)
            case _:
                pass


def fold(lines: Iterable[JournalLine]) -> RunRecord:
    """Fold a whole journal into the state of its run."""
    record = RunRecord()
    for line in lines:
        record.apply(line)
    return record


def read_record(run_dir: RunDir) -> RunRecord:
    """Read a run's current state from its journal. For readers; a controller uses its own :class:`Journal`.

    Raises:
        JournalDamaged: a line cannot be read.
    """
    return fold(found.line for found in scan_journal(run_dir.control))


class Journal:
    """Writer of a run's journal, which marks each line with the fencing token of the controller's lease.

    Args:
        keep_lease: called before each line; raises if the lease was lost, so that neither the line is written nor the
            action it announces is taken.
        on_loss: called with the error if the journal has lines from a newer lease, before it is raised.

    Raises:
        LeaseLost: the journal has lines from a newer lease.
        JournalDamaged: a line cannot be read.
    """

    def __init__(
        self,
        run_dir: RunDir,
        token: int,
        keep_lease: Callable[[], None] = lambda: None,
        on_loss: Callable[[LeaseLost], None] = lambda error: None,
    ) -> None:
        self._run_dir = run_dir
        self._token = token
        self._keep_lease = keep_lease
        self._on_loss = on_loss
        self.record = read_record(run_dir)
        self._require_newest(self.record.token)
        remove_unfinished_line(run_dir.control)
        self._writer = LineWriter(run_dir.control)
        self._reserve = Reserve(run_dir.control_reserve)
        self._reserve.hold()

    def append(self, event: ControlEvent) -> None:
        """Write one line and sync it to disk before returning.

        Raises:
            RunDirError: it cannot be written, even after freeing the reserved space.
            LeaseLost: another controller has the run.
        """
        self._keep_lease()
        line = JournalLine(sequence=self.record.next_sequence, token=self._token, time=utc_now(), event=event)
        try:
            self._read_others()
            self._write(line)
        except OSError as error:
            if not is_disk_full(error):
                raise RunDirError(f"cannot write {self._run_dir.control}: {error.strerror}") from None
            self._write_on_full_disk(line)
        self.record.apply(line)

    def move_run(self, state: RunState, cause: str) -> None:
        """Move the run to a state, unless it is in that state already.

        Raises:
            IllegalMove: the table of moves does not allow it.
        """
        if state is self.record.state:
            return
        if state not in RUN_MOVES[self.record.state]:
            raise IllegalMove(
                f"run {self._run_dir.run_id} is {self.record.state.value} and cannot become {state.value}"
            )
        self.append(RunMoved(state=state, cause=cause))

    def move_attempt(
        self, number: int, state: AttemptState, cause: str, failure_kind: FailureKind | None = None
    ) -> None:
        """Move an attempt to a state, unless it is in that state already.

        Raises:
            IllegalMove: the table of moves does not allow it.
        """
        present = self.record.attempts[number].state
        if state is present:
            return
        if state not in ATTEMPT_MOVES[present]:
            raise IllegalMove(
                f"attempt {number} of {self._run_dir.run_id} is {present.value} and cannot become {state.value}"
            )
        self.append(AttemptMoved(attempt=number, state=state, cause=cause, failure_kind=failure_kind))

    def move_promotion(self, event: PromotionMoved) -> None:
        """Begin the promotion, or move it to its next state.

        Raises:
            IllegalMove: the table of moves does not allow it.
        """
        present = self.record.promotion
        allowed = PROMOTION_BEGINNINGS if present is None else PROMOTION_MOVES[present.state]
        if event.state not in allowed:
            found = "not begun" if present is None else present.state.value
            raise IllegalMove(
                f"the promotion of {self._run_dir.run_id} is {found} and cannot become {event.state.value}"
            )
        self.append(event)

    def begin_stage(self, name: StageName, attempt: int) -> int:
        """Begin a stage and return its index; a stage that a killed controller left open is continued."""
        present = self.record.open_stage()
        if present is not None and (present.name, present.attempt) == (name, attempt):
            return present.index
        if present is not None:
            self.end_stage(present.index, StageState.FAILED, "its controller ended before the stage")
        index = max((stage.index for stage in self.record.stages), default=-1) + 1
        self.append(StageStarted(stage_index=index, name=name, attempt=attempt))
        return index

    def end_stage(self, index: int, state: StageState, message: str = "") -> None:
        """End a stage."""
        self.append(StageEnded(stage_index=index, state=state, message=message))

    def close(self, *, lease_lost: bool = False) -> None:
        """Close the file and free the reserve; without the lease, the reserve belongs to another controller."""
        self._writer.close()
        if not lease_lost:
            self._reserve.free()

    def _require_newest(self, token: int) -> None:
        if token > self._token:
            run_id = self._run_dir.run_id
            error = LeaseLost(
                f"the journal of {run_id} was last written under lease {token}, this controller holds lease "
                f"{self._token}: another controller owns the run. Watch it with `rlhf watch {run_id}`"
            )
            self._on_loss(error)
            raise error

    def _read_others(self) -> None:
        """Read what others have written since the last line of this controller. The database does not show the lease of
        a controller that uses another one, such as a backup restored beside it.

        Raises:
            LeaseLost: a line is from a newer lease.
        """
        with suppress(JournalDamaged):  # this controller knows what it wrote; the next reader reports the damage
            for found in scan_journal(self._run_dir.control, self._writer.end):
                self._require_newest(found.line.token)

    def _write(self, line: JournalLine) -> None:
        self._writer.write(line)
        self._writer.sync()

    def _write_on_full_disk(self, line: JournalLine) -> None:
        self._reserve.free()
        try:
            self._writer.close()
            remove_unfinished_line(self._run_dir.control)
            self._writer = LineWriter(self._run_dir.control)
            self._write(line)
        except OSError as error:
            raise RunDirError(
                f"cannot write {self._run_dir.control}: {error.strerror}. Make room on that file system, then "
                f"`rlhf resume {self._run_dir.run_id}`"
            ) from None
