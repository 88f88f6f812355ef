"""The reconciler of a site: compares run directories, history, Prefect and the queue, and repairs disagreements.

:mod:`rlhf_core.diagnosis.reconcile.decisions` makes the decisions; this module gathers the facts for them and carries
out the actions. Every action is harmless if repeated: a second reconciler, or one that was killed halfway, does no
damage. Runs of other sites, which may share the history or the cluster, are not touched.
"""

import logging
import math
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from rlhf_core.condition_log import ConditionLog
from rlhf_core.config.site import Site
from rlhf_core.control import adopt, run_folders
from rlhf_core.control.cancel import cancel_run
from rlhf_core.control.gone_directory import GONE
from rlhf_core.control.reconcile.cleanup import CheckpointSearch, removed
from rlhf_core.control.reconcile.facts import foreign_owner, lease_state, run_facts
from rlhf_core.control.reconcile.flow_runs import FlowRuns, FlowRunSnapshot, NotRegistered
from rlhf_core.diagnosis.reconcile.decisions import ActionKind, ReconcileAction, decide
from rlhf_core.diagnosis.reconcile.facts import FLOW_ENDS, JobFacts, LeaseState, RunFacts, World
from rlhf_core.errors import HistoryError, RlhfError, SchedulerError
from rlhf_core.files.appended import append_lines
from rlhf_core.files.lookups import is_there
from rlhf_core.files.whole import read_model
from rlhf_core.history.queries import open_runs
from rlhf_core.history.queries.open_runs import OpenRun
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import RunRecord, read_record
from rlhf_core.run_dir.run import RunDir, is_run_id, run_dirs
from rlhf_core.scheduler import get_scheduler
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import AgentCommand, ReconcileNote
from rlhf_core.schemas.resources import Submission
from rlhf_core.survival import Survived
from rlhf_core.watchdog.gone_run import close_gone, identity
from rlhf_core.watchdog.watcher import record

log = logging.getLogger("rlhf.daemon")

RECENT = timedelta(days=1)
"""Time for which a run that has ended is still compared with Prefect and the queue."""

ROUTINE = frozenset({ActionKind.INGEST, ActionKind.NOTE})
"""Actions that occur in every round or change nothing: a round without any others creates no flow run."""


@dataclass(frozen=True)
class ActionResult:
    """An action that was carried out or attempted."""

    action: ReconcileAction
    done: bool
    message: str
    """Outcome, for the log."""


class Reconciler:
    """Reconciler of one process, for as long as it runs: it remembers since when something has been missing or
    silent."""

    def __init__(
        self,
        site: Site,
        store: HistoryStore,
        *,
        flow_runs: FlowRuns | None,
        retention_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
        warn: Callable[[str], None] = lambda text: log.warning("%s", text),
    ) -> None:
        """Create a reconciler that remembers nothing yet.

        Args:
            flow_runs: those of the site's Prefect server, which may be unavailable at present; None if the site has
                none.
            retention_s: longest time that one round looks for checkpoints to be removed.
            warn: called with each problem that leaves something unknown, once until it has ended or changes.
        """
        self._site = site
        self._store = store
        self._flow_runs = flow_runs
        self._clock = clock
        self._now = now
        self._scheduler = get_scheduler(site.scheduler)
        self._missing_since: dict[str, float] = {}
        self._runs_with_runs: tuple[int, int] | None = None
        """Identity of the folder of run directories when a run was last seen in it."""
        self._silent_since: dict[str, float] = {}
        self._away_since: float | None = None
        self._problems = ConditionLog(warn)
        """Conditions by their run, or an empty text, and what they are about."""
        self._adopters: dict[str, subprocess.Popen[bytes]] = {}
        self._standings: dict[str, OpenRun] = {}
        self._seen: FlowRunSnapshot | None = None
        """Prefect's answer in this round; None if it did not answer."""
        self._published: set[tuple[str, str, str]] = set()
        """Run, its end and the state of its promotion, for everything that Prefect is known to have."""
        self._submissions: dict[str, Submission] = {}
        self.retention = CheckpointSearch(site, store, retention_s, clock)

    def poll(self, *, retention: bool = False) -> list[ReconcileAction]:
        """The actions that are due now.

        Args:
            retention: also look for checkpoints to be removed.

        Raises:
            HistoryError: the history does not answer: the owners of the runs are unknown, and nothing may be done.
        """
        try:
            world = self._world()
        except HistoryError:
            self._silent_since.clear()
            raise
        actions = decide(world)
        if retention:
            actions += self.retention.removals(world, self._now())
        return actions

    def carry_out(
        self, actions: Iterable[ReconcileAction], may: Callable[[], bool] = lambda: True
    ) -> list[ActionResult]:
        """Carry out the actions one after the other; a failed one is retried in the next round.

        Args:
            may: called before each action; False ends the round: another process reconciles this site now, or the next
                round is due.
        """
        results: list[ActionResult] = []
        failed: set[str] = set()
        pending = iter(actions)
        for action in pending:
            if not may():
                self.retention.put_off([action, *pending])
                break
            if action.kind is ActionKind.END_FLOW_RUN and action.run_id in failed:
                continue  # Prefect does not record a run as cancelled while its job may still be running
            result = self._do(action)
            if not result.done and action.kind is ActionKind.CANCEL_RUN:
                failed.add(action.run_id)
            if result.action.kind not in ROUTINE:
                log.info("%s %s: %s; %s", action.kind.value, action.subject, action.reason, result.message)
                self._record(result)
            results.append(result)
        return results

    # -----------------------------------------------------------------------------------------------------------------
    # Facts

    def _world(self) -> World:
        now = self._now()
        jobs = self._jobs()
        run_ids = {job.run_id for job in jobs}
        self._standings = open_runs.find(self._store, now, since=now - RECENT, run_ids=run_ids)
        self._seen = self._poll_prefect(now)
        seen = self._seen or FlowRunSnapshot()
        mentioned = {one.run_id for one in seen.flow_runs if one.state not in FLOW_ENDS and one.run_id}
        self._standings |= open_runs.find(self._store, now, run_ids=mentioned)
        for folder in run_folders.without_daemon(self._site.runs_dir, self._standings.values(), self._store):
            self._problems.log_change(f"{folder} has open runs and no known daemon: {run_folders.ADVICE}", ("", folder))
        runs = {}
        for run_id in sorted(self._standings.keys() | run_ids | mentioned):
            run = self._run(run_id, self._standings.get(run_id), now)
            if run is not None:
                runs[run_id] = run
        silent = [run_id for run_id, run in runs.items() if run.holder is LeaseState.SILENT]
        self._silent_since = {run_id: self._silent_since.get(run_id, self._clock()) for run_id in silent}
        for run_id, since in self._silent_since.items():
            runs[run_id] = replace(runs[run_id], silent_s=self._clock() - since)
        return World(
            runs=runs,
            flow_runs=seen.flow_runs,
            task_runs=seen.task_runs,
            jobs=jobs,
            prefect_away_s=self._prefect_away_s(),
        )

    def _jobs(self) -> list[JobFacts]:
        try:
            living = self._scheduler.living()
        except SchedulerError as error:
            self._problems.log_change(str(error), ("", "scheduler"))
            return []
        self._problems.end(("", "scheduler"))
        self._submissions = {one.submission.job_id: one.submission for one in living}
        return [
            JobFacts(one.submission.job_id, one.run_id, one.submission.attempt)
            for one in living
            if is_run_id(one.run_id)
        ]

    def _poll_prefect(self, now: datetime) -> FlowRunSnapshot | None:
        """Poll Prefect. Returns None if the server does not answer or the site has none."""
        if self._flow_runs is None or not self._flow_runs.answers():
            return None
        driven_by = {
            one.controllers[-1].flow_run_id
            for one in self._standings.values()
            if one.controllers and one.controllers[-1].flow_run_id
        }
        with Survived(but=(HistoryError,)) as found:  # its errors are of many kinds; each means no answer
            seen = self._flow_runs.poll(
                self._standings.keys(), driven_by, lambda ids: open_runs.runs_of_flow_runs(self._store, set(ids)), now
            )
            self._problems.end(("", "prefect"))
            return seen
        self._problems.log_change(found.problem, ("", "prefect"))
        return None

    def _prefect_away_s(self) -> float:
        if self._flow_runs is None:
            return math.inf
        if self._seen is not None:
            self._away_since = None
            return 0.0
        self._away_since = self._clock() if self._away_since is None else self._away_since
        return max(self._clock() - self._away_since, 1e-3)

    def _run(self, run_id: str, standing: OpenRun | None, now: datetime) -> RunFacts | None:
        """Facts about a run of this site; None for a run of another site, and while its file system does not
        respond."""
        if standing is not None and not run_folders.is_same(Path(standing.run_dir).parent, self._site.runs_dir):
            return None
        try:
            run_dir = RunDir.of(self._site.runs_dir, run_id)
            if not is_there(run_dir.spec):
                return self._missing(run_id, standing)
            written = read_record(run_dir)
            request = read_model(run_dir.cancel_request, AgentCommand)
            stored = run_dir.read_spec()
            owner = foreign_owner(run_dir.root)
        except (RlhfError, OSError) as error:
            self._problems.log_change(f"{run_id}: {error}", (run_id, "damaged"))
            return None
        self._problems.end((run_id, "damaged"))
        self._missing_since.pop(run_id, None)
        self._runs_with_runs = identity(self._site.runs_dir)
        reason = (request.reason or "rlhf cancel") if request is not None and request.kind == "cancel" else ""
        facts = replace(run_facts(run_id, standing, written, reason, stored, now), foreign_owner=owner)
        return replace(facts, unpublished=self._num_unpublished(run_dir, written)) if facts.ended else facts

    def _num_unpublished(self, run_dir: RunDir, written: RunRecord) -> int:
        """Number of events and artifacts of an ended run that Prefect lacks. Prefect is asked until it has them all."""
        end = _end_of(run_dir, written)
        if end in self._published or self._flow_runs is None or self._seen is None:
            return 0
        with Survived() as found:  # an error of Prefect's client or of a file system: the next round retries
            missing = self._flow_runs.num_unpublished(run_dir, self._store, self._known_flow_runs())
            if not missing:
                self._published.add(end)
            self._problems.end((run_dir.run_id, "events"))
            return missing
        self._problems.log_change(f"{run_dir.run_id}: {found.problem}", (run_dir.run_id, "events"))
        return 0

    def _known_flow_runs(self) -> set[str]:
        return {one.flow_run_id for one in self._seen.flow_runs} if self._seen is not None else set()

    def _missing(self, run_id: str, standing: OpenRun | None) -> RunFacts | None:
        # A run without a row belongs to another site.
        if standing is None or not self._has_its_file_system():
            self._missing_since.pop(run_id, None)
            return None
        since = self._missing_since.setdefault(run_id, self._clock())
        holder, _ = lease_state(standing, self._now())
        missing_s = max(self._clock() - since, 1e-3)
        return RunFacts(run_id, RunState(standing.state), standing.state, holder, standing.holder, missing_s=missing_s)

    def _has_its_file_system(self) -> bool:
        """True if the folder of run directories is the one in which runs were last seen, or contains runs: a mount
        point is an empty folder while its file system is not mounted."""
        present = identity(self._site.runs_dir)
        return present is not None and (present == self._runs_with_runs or bool(run_dirs(self._site.runs_dir)))

    # -----------------------------------------------------------------------------------------------------------------
    # Actions

    def _do(self, action: ReconcileAction) -> ActionResult:
        with Survived() as found:  # an error of Prefect's client, for example: the next round retries
            return ActionResult(action, *self._carry_out(action))
        return ActionResult(action, False, found.message)

    def _carry_out(self, action: ReconcileAction) -> tuple[bool, str]:
        """Carry out an action. Returns True if it is done, and its outcome for the log."""
        match action.kind:
            case ActionKind.INGEST:
                behind = record(self._run_dir(action), self._store)
                return not behind, behind or "read"
            case ActionKind.ADOPT:
                return True, self._adopt(action.run_id)
            case ActionKind.CANCEL_RUN:
                ended = cancel_run(self._run_dir(action), self._site, self._store, action.reason, log=log.info)
                return ended.job_ended, ended.message
            case ActionKind.CLOSE_RUN:
                cause = f"{GONE}: {self._run_dir(action).root}, and no controller was driving it"
                closed = close_gone(action.run_id, self._store, cause, self._now())
                return True, "closed as failed" if closed else "it had ended"
            case ActionKind.CANCEL_JOB:
                gone = self._scheduler.cancel(self._submissions[action.job_id])
                return gone, "ended" if gone else "part of it is still running"
            case ActionKind.END_FLOW_RUN:
                return True, self._end_flow_run(action)
            case ActionKind.END_TASK_RUN:
                assert action.flow_state is not None
                self._prefect.end_task_run(action.task_run_id, action.flow_state, action.reason)
                return True, f"it is {action.flow_state.value.capitalize()} now"
            case ActionKind.PUBLISH:
                return True, self._publish(self._run_dir(action))
            case ActionKind.REMOVE_CHECKPOINT:
                return removed(self._run_dir(action), self._run_dir(action).checkpoint(action.step).root)
            case ActionKind.REMOVE_PUT_ASIDE:
                return removed(self._run_dir(action), self._run_dir(action).checkpoints_dir / action.folder)
            case ActionKind.NOTE:
                self._problems.log_change(f"{action.run_id}: {action.reason}", (action.run_id, action.flow_run_id))
                return True, "left alone"

    def _run_dir(self, action: ReconcileAction) -> RunDir:
        """The directory of the run that an action concerns; some actions concern no run."""
        return RunDir.of(self._site.runs_dir, action.run_id)

    @property
    def _prefect(self) -> FlowRuns:
        """The flow runs in Prefect, for actions that only occur if Prefect has answered."""
        assert self._flow_runs is not None
        return self._flow_runs

    def _adopt(self, run_id: str) -> str:
        if self._seen is not None:
            standing = self._standings.get(run_id)
            ended = sum(one.run_id == run_id and one.state in FLOW_ENDS for one in self._seen.flow_runs)
            # The same situation gives the same key, so that two rounds, or two reconcilers, create only one flow run.
            key = f"rlhf-adopt-{run_id}-{standing.token if standing is not None else 0}-{ended}"
            try:
                adopting = f"flow run {self._prefect.adopt(run_id, key)}"
                self._problems.end(("", "resume"))
                return adopting
            except NotRegistered as error:
                self._problems.log_change(str(error), ("", "resume"))
        present = self._adopters.get(run_id)
        if present is not None and present.poll() is None:
            return f"process {present.pid} is about to take it"
        self._adopters[run_id] = adopt.start(run_id, self._site)
        return f"process {self._adopters[run_id].pid}, without Prefect"

    def _end_flow_run(self, action: ReconcileAction) -> str:
        assert self._seen is not None
        assert action.flow_state is not None
        (seen,) = (one for one in self._seen.flow_runs if one.flow_run_id == action.flow_run_id)
        if self._prefect.end_flow_run(action.flow_run_id, action.flow_state, seen.changed_at, action.reason):
            return f"it is {action.flow_state.value.capitalize()} now"
        return "its state has changed meanwhile; left alone"

    def _publish(self, run_dir: RunDir) -> str:
        end = _end_of(run_dir, read_record(run_dir))
        published = self._prefect.publish(run_dir, self._store, self._known_flow_runs())
        # Not checked again: the server shows them only seconds later, and an automation acts on every copy sent to it.
        self._published.add(end)
        return f"published: {', '.join(published) or 'nothing is missing any more'}"

    def _record(self, result: ActionResult) -> None:
        """Record a result in the run directory, from where it reaches the history. Without a directory, it is only
        logged."""
        action = result.action
        run_dir = RunDir.find(self._site.runs_dir, action.run_id)
        if run_dir is None:
            return
        data = {
            "job_id": action.job_id,
            "flow_run_id": action.flow_run_id,
            "task_run_id": action.task_run_id,
            "step": str(action.step or ""),
        }
        note = ReconcileNote(
            time=self._now(),
            kind=action.kind.value,
            message=f"{action.reason}; {result.message}",
            attempt=action.attempt or None,
            data={name: value for name, value in data.items() if value},
        )
        with suppress(OSError):
            append_lines(run_dir.housekeeping, note)
        with suppress(RlhfError):
            record(run_dir, self._store)


def _end_of(run_dir: RunDir, written: RunRecord) -> tuple[str, str, str]:
    """The end of a run, as far as it is published: its id, state and state of promotion."""
    promotion = written.promotion.state.value if written.promotion is not None else ""
    return run_dir.run_id, written.state.value, promotion
