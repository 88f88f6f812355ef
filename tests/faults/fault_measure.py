"""Outcome of a fault: read from the files of the run, and compared with the truth about it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fault_cases import Expected, Fault
from fault_inject import Truth
from fault_runs import at, engines, events, steps

from rlhf_core.control.views.timeline import all_decisions, all_incidents
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.checkpoint import checksum
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.failures import Action, Decision, Incident

_SIGNS = {"suspect", "verdict", "worker_exited", "killed", "incident"}
DEATH_LIMIT_S = 5.0
HANG_MARGIN_S = 2.0
RELAYED_MARGIN_S = 5.0
"""Margin for a program that does not beat itself: its sources may report their last sign seconds after its last
step."""
SILENCE_LIMIT_S = 25.0
"""An agent is lost after 15 s (agent 0) or 20 s; the other agents report it at once."""
SOON_LIMIT_S = 30.0
"""Limit at default floors, from the fault to the decision."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One finished case: one line of the results file."""

    scenario: str
    number: int
    row: str
    control: bool
    found: bool
    """A failure was seen or decided about between this fault and the next; for a control, this is a false alarm."""
    found_s: float | None
    """Time from the fault to its first sign: a suspicion, a noticed exit, an incident."""
    limit_s: float | None = None
    """Permitted silence before a hang."""
    decided_s: float | None
    """Time from the fault to the decision."""
    in_time: bool | None = None
    """``found_s`` is within its target; null if there is none."""
    blame_right: bool | None = None
    """null if no single rank or node is to blame."""
    class_right: bool | None
    kind: str
    """Failure kind that the run assigned to it."""
    action: str
    action_right: bool | None
    again_s: float | None = None
    """Time from the fault to the next step that was made."""
    cold_s: float | None = None
    """Cold start of the same run; see :func:`_cold_start`."""
    again_in_time: bool | None = None
    steps_lost: int | None = None
    same_numbers: bool | None = None
    """The last checkpoint equals the undisturbed run's; null if that is not required."""
    submitted_twice: int
    """Number of the run's jobs known to the scheduler beyond one for each attempt."""
    state: str
    """Final state of the run, or the reason why it has none."""
    message: str
    """Message of the incident; without one, the reason of the decision."""
    scheduler: str = ""
    """Scheduler of the run."""


def measure(
    scenario: str,
    number: int,
    fault: Fault,
    truth: Truth,
    until: float,
    run: RunDir,
    state: str,
    same: bool | None,
    jobs: int,
) -> Row:
    """Measure one case.

    Args:
        until: When the next fault struck, or the end, in seconds since the epoch.
        state: State of the run at its end.
        same: True if its final parameters are those of the undisturbed run; null if it has none.
        jobs: Number of the run's jobs known to the scheduler.
    """
    expected = fault.expected
    begin, end = at(truth.time), at(until)
    incident = _incident(run, begin, end, expected)
    decision = _decision(run, begin, end, incident)
    sign, limit_s = _first_sign(run, begin, end)
    if expected.limit == "silence":
        sign = None  # only the incident is a sign of the agent; a rank that is observed meanwhile is none
    signs = [time for time in (sign, incident.seen_at if incident else None) if time is not None]
    found_s = (min(signs) - begin).total_seconds() if incident is not None and truth.moment_known else None
    decided_s = (decision.decided_at - begin).total_seconds() if decision and truth.moment_known else None
    again_s = _again(run, begin, end) if decision is None or decision.action is not Action.STOP else None
    cold_s = _cold_start(run)
    is_failure = bool(expected.kinds)
    kind = incident.failure_kind.value if incident else ""
    action = decision.action.value if decision else ""
    # A cancellation is no incident: the run reports that it was cancelled, and ends.
    cancelled = is_failure and state == "cancelled" and incident is None
    if cancelled:
        kind, action = "user_cancel", "stop"
    harmless = incident is None and passed_by(expected, state)
    return Row(
        scenario=scenario,
        number=number,
        row=fault.row,
        control=not is_failure,
        found=incident is not None or decision is not None or cancelled or harmless,
        found_s=found_s,
        limit_s=limit_s,
        decided_s=decided_s,
        in_time=_in_time(expected, found_s, limit_s, decided_s),
        blame_right=_blame_right(expected, incident, truth) if is_failure and expected.blame else None,
        class_right=(kind or "none") in expected.kinds if is_failure else None,
        kind=kind,
        action=action,
        action_right=action in expected.actions if expected.actions else None,
        again_s=again_s,
        cold_s=cold_s,
        again_in_time=_again_in_time(run, begin, end, decision, found_s, again_s, cold_s),
        steps_lost=_steps_lost(run, begin) if is_failure else None,
        same_numbers=same if expected.same_numbers else None,
        submitted_twice=jobs - len(run.attempts()),
        state=state,
        message=incident.message if incident else decision.reason if decision else "",
    )


def passed_by(expected: Expected, state: str) -> bool:
    """True for a run that ended well with nothing found, if the fault may have been harmless."""
    return state == "completed" and "none" in expected.kinds and "" in expected.actions


def measure_gone(
    scenario: str, fault: Fault, truth: Truth, history_record: dict[str, Any], jobs: int, job_left: bool
) -> Row:
    """Measure the case of a run whose directory is gone: only the history has records of it.

    Args:
        history_record: output of ``rlhf show --json``.
        jobs: Number of the run's jobs known to the scheduler.
        job_left: True if one of them is still active.
    """
    state, message = history_record["run"]["state"], history_record["run"]["message"]
    closed = state == "failed" and "the run directory is gone" in message
    found_s = datetime.fromisoformat(history_record["run"]["ended_at"]).timestamp() - truth.time if closed else None
    decision = (history_record["decisions"] or [{"action": ""}])[-1]
    incident = (history_record["incidents"] or [{"failure_kind": ""}])[-1]
    return Row(
        scenario=scenario,
        number=0,
        row=fault.row,
        control=False,
        found=closed,
        found_s=found_s,
        decided_s=found_s,
        class_right=incident["failure_kind"] in fault.expected.kinds,
        kind=incident["failure_kind"],
        action=decision["action"],
        action_right=decision["action"] in fault.expected.actions,
        submitted_twice=jobs - len(history_record["attempts"]),
        state="its job is still at work" if job_left else state,
        message=message,
    )


def same_parameters(run: RunDir, reference: dict[str, str]) -> bool | None:
    """True if the newest checkpoint equals, bit for bit, that of the undisturbed run at the same step."""
    newest = run.newest_checkpoint()
    if newest is None or str(newest.step) not in reference:
        return None
    return checksum(newest.model / "model.safetensors").sha256 == reference[str(newest.step)]


def _incident(run: RunDir, begin: datetime, end: datetime, expected: Expected) -> Incident | None:
    """Final incident of a fault: the controller's follows the agents' and takes the scheduler's state into account. If
    one fault leads to another (a killed rank, the checkpoint that it cannot resume from), the expected one is
    chosen."""
    found = [incident for incident in all_incidents(run, read_record(run)) if begin <= incident.seen_at < end]
    if not found:
        return None
    first = next((incident for incident in found if incident.failure_kind in expected.kinds), found[0])
    return [one for one in found if (one.attempt, one.restart) == (first.attempt, first.restart)][-1]


def _decision(run: RunDir, begin: datetime, end: datetime, incident: Incident | None) -> Decision | None:
    found = [decision for decision in all_decisions(run, read_record(run)) if begin <= decision.decided_at < end]
    if not found:
        return None
    about = (incident.attempt, incident.restart) if incident else (found[0].attempt, found[0].restart)
    mine = [one for one in found if (one.attempt, one.restart) == about]
    return mine[-1] if mine else None


def _first_sign(run: RunDir, begin: datetime, end: datetime) -> tuple[datetime | None, float | None]:
    """Time of the first sign of a fault, and the silence that its suspicion permits."""
    found = [event for _, event in events(run) if event.kind in _SIGNS and begin <= event.time < end]
    matches = [re.search(r"([\d.]+) s are allowed", event.message) for event in found if event.kind == "suspect"]
    limits = [float(match[1]) for match in matches if match is not None]
    return (found[0].time if found else None), (limits[0] if limits else None)


def _in_time(expected: Expected, found_s: float | None, limit_s: float | None, decided_s: float | None) -> bool | None:
    if not expected.limit or found_s is None:
        return None
    if expected.limit == "soon":
        return decided_s is not None and decided_s <= SOON_LIMIT_S
    if expected.limit in ("death", "silence"):
        return found_s <= (DEATH_LIMIT_S if expected.limit == "death" else SILENCE_LIMIT_S)
    if expected.limit == "relayed":
        # Without a limit, it was proven to stand still before the permitted silence was over.
        return limit_s is None or found_s <= limit_s + RELAYED_MARGIN_S
    return limit_s is not None and found_s <= limit_s + HANG_MARGIN_S


def _blame_right(expected: Expected, incident: Incident | None, truth: Truth) -> bool:
    if incident is None:
        return False
    nodes_right = incident.suspect_nodes == (truth.node,)
    return nodes_right and (expected.blame == "node" or incident.suspect_ranks == (truth.rank,))


def _again(run: RunDir, begin: datetime, end: datetime) -> float | None:
    """Seconds until a start of the workers after the fault makes a step; otherwise until the next step at all."""
    before = [(restart.attempt, restart.restart) for restart, line in steps(run) if line.time < begin]
    newest = max(before, default=(0, 0))
    after = [(restart, line.time) for restart, line in steps(run) if begin <= line.time < end]
    later = [time for restart, time in after if (restart.attempt, restart.restart) > newest]
    times: Sequence[datetime] = later or [time for _, time in after]
    return (min(times) - begin).total_seconds() if times else None


def _steps_lost(run: RunDir, begin: datetime) -> int | None:
    """Steps that were made before and had to be repeated."""
    before = [((restart.attempt, restart.restart), line.step) for restart, line in steps(run) if line.time < begin]
    if not before:
        return None
    newest, reached = max(before)
    again = [
        ((restart.attempt, restart.restart), line.step)
        for restart, line in steps(run)
        if (restart.attempt, restart.restart) > newest and line.time >= begin
    ]
    return max(0, reached - min(again)[1] + 1) if again else None


def _cold_start(run: RunDir) -> float | None:
    """Time from the first sign of an agent to the first step; with engines, to the first step that they sampled for."""
    started = [event.time for _, event in events(run) if event.kind == "agent_started"]
    has_engines = bool(engines(run))
    first = [line.time for _, line in steps(run) if not has_engines or "time/rollout_s" in line.metrics]
    return (min(first) - min(started)).total_seconds() if started and first else None


def _again_in_time(
    run: RunDir,
    begin: datetime,
    end: datetime,
    decision: Decision | None,
    found_s: float | None,
    again_s: float | None,
    cold_s: float | None,
) -> bool | None:
    """True if training was back in time, counted from the detection of the fault, which has a target of its own."""
    if decision is None or found_s is None or again_s is None or cold_s is None or decision.action is Action.STOP:
        return None
    # Two simultaneous faults may need both: an agent is lost, and the new attempt finds a damaged checkpoint.
    is_new = any(
        begin <= one.decided_at < end and one.action is Action.NEW_ATTEMPT
        for one in all_decisions(run, read_record(run))
    )
    return again_s - found_s <= again_limit_s(cold_s, is_new=is_new)


def again_limit_s(cold_s: float, *, is_new: bool) -> float:
    """Longest time from the detection of a fault until training continues.

    Args:
        cold_s: cold start of the run, in seconds.
        is_new: a new attempt was made; otherwise the workers were restarted in place.
    """
    return cold_s + 30 if is_new else 1.5 * cold_s + 5
