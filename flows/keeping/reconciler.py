"""The reconciler of a site: looks at run directories, history, Prefect and the queue, and mends what disagrees.

What is to be done is decided by :mod:`rlhf_core.diagnosis.reconcile`; here are the facts it needs and the deeds. Every
deed is harmless when it was done before: a second reconciler, or one that was killed on the way, does no damage. Runs
of other sites, which may share the history or the cluster, are not touched.
"""

import logging
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flows.cancelling import cancel_run
from flows.keeping import adopting, flow_runs, task_runs
from flows.promoting.promotion import is_due
from flows.site.server import server_answers
from flows.view import late
from flows.view.events import FlowRun, Happening, happenings, tell, unknown_to_the_server
from flows.view.story import Story, read_story
from rlhf_core.config import Site
from rlhf_core.diagnosis.reconcile import (
    FLOW_ENDS,
    Action,
    ActionKind,
    FlowRunFacts,
    Holder,
    JobFacts,
    RunFacts,
    TaskRunFacts,
    World,
    decide,
)
from rlhf_core.diagnosis.retention import Scored, removable
from rlhf_core.errors import HistoryError, RlhfError, SchedulerError
from rlhf_core.history.queries import open_runs
from rlhf_core.history.queries.open_runs import OpenRun
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import RunRecord, read_record
from rlhf_core.launch.lease import TTL_S, Owner
from rlhf_core.run_dir import LineWriter, RunDir, is_run_id, read_model, remove_tree, run_dirs
from rlhf_core.scheduler import get_scheduler
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.journal import ControllerStarted
from rlhf_core.schemas.reports import AgentCommand, EvaluationReport, KeeperNote
from rlhf_core.schemas.resources import Submission
from rlhf_core.schemas.run import StoredSpec
from rlhf_core.watchdog.missing import close_missing, identity
from rlhf_core.watchdog.watch import record

log = logging.getLogger("rlhf.keeper")

RECENT = timedelta(days=1)
"""How long a run that has ended is still compared with Prefect and the queue."""

QUIET = frozenset({ActionKind.INGEST, ActionKind.NOTE})
"""What is done all the time, or is nothing done: it makes no flow run."""


@dataclass(frozen=True)
class Deed:
    """An action that was carried out, or tried."""

    action: Action
    done: bool
    said: str
    """How it went."""


@dataclass
class _Prefect:
    """What Prefect said in this round."""

    flow_runs: Sequence[FlowRunFacts] = ()
    task_runs: Sequence[TaskRunFacts] = ()
    answers: bool = False
    controllers: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Untold:
    """What Prefect was not told of a run."""

    flow_run: FlowRun
    """In whose name it is told; without an id where nothing is to be told."""
    story: Story
    events: Sequence[Happening]


class Reconciler:
    """One for as long as a process reconciles: it remembers since when something is missing or silent."""

    def __init__(
        self,
        site: Site,
        store: HistoryStore,
        *,
        has_prefect: bool,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Remember nothing yet.

        Args:
            has_prefect: whether the site has a Prefect server, be it away just now.
        """
        self._site = site
        self._store = store
        self._has_prefect = has_prefect
        self._clock = clock
        self._now = now
        self._scheduler = get_scheduler(site.scheduler)
        self._missing_since: dict[str, float] = {}
        self._runs_with_runs: tuple[int, int] | None = None
        """Identity of the folder of run directories when a run was last seen in it."""
        self._watched_since: float | None = None
        self._away_since: float | None = None
        self._noted: set[tuple[str, str, str]] = set()
        self._adopters: dict[str, subprocess.Popen[bytes]] = {}
        self._standings: dict[str, OpenRun] = {}
        self._prefect = _Prefect()
        self._told: set[tuple[str, str, str]] = set()
        """Run, its end and where its promotion stands, of what Prefect is known to have been told."""
        self._submissions: dict[str, Submission] = {}

    def look(self, *, retention: bool = False) -> list[Action]:
        """What is to be done now.

        Args:
            retention: also look for checkpoints that may go.

        Raises:
            HistoryError: the history does not answer: nobody knows who drives what, and nothing must be done.
        """
        try:
            world = self._world()
        except HistoryError:
            self._watched_since = None
            raise
        actions = decide(world)
        if retention:
            actions += self._removals(world)
        return actions

    def carry_out(self, actions: Iterable[Action], may: Callable[[], bool] = lambda: True) -> list[Deed]:
        """Do it, one after the other; what fails is tried again in the next round.

        Args:
            may: asked before each; False ends the round, because somebody else reconciles this site now.
        """
        deeds: list[Deed] = []
        failed: set[str] = set()
        for action in actions:
            if not may():
                break
            if action.kind is ActionKind.END_FLOW_RUN and action.run_id in failed:
                continue  # Prefect is not told that a run was cancelled while its job may be at work
            deed = self._do(action)
            if not deed.done and action.kind is ActionKind.CANCEL_RUN:
                failed.add(action.run_id)
            if deed.action.kind not in QUIET:
                log.info("%s %s: %s; %s", action.kind.value, _about(action), action.reason, deed.said)
                self._write_down(deed)
            deeds.append(deed)
        return deeds

    # -----------------------------------------------------------------------------------------------------------------
    # Facts

    def _world(self) -> World:
        now = self._now()
        jobs = self._jobs()
        run_ids = {job.run_id for job in jobs}
        self._standings = open_runs.find(self._store, now, since=now - RECENT, run_ids=run_ids)
        self._watched_since = self._clock() if self._watched_since is None else self._watched_since
        self._prefect = self._ask_prefect(now)
        mentioned = {one.run_id for one in self._prefect.flow_runs if one.state not in FLOW_ENDS and one.run_id}
        self._standings |= open_runs.find(self._store, now, run_ids=mentioned)
        runs = {}
        for run_id in sorted(self._standings.keys() | run_ids | mentioned):
            run = self._run(run_id, self._standings.get(run_id), now)
            if run is not None:
                runs[run_id] = run
        return World(
            runs=runs,
            flow_runs=self._prefect.flow_runs,
            task_runs=self._prefect.task_runs,
            jobs=jobs,
            prefect_away_s=self._prefect_away_s(),
            watched_s=self._clock() - self._watched_since,
        )

    def _jobs(self) -> list[JobFacts]:
        try:
            living = self._scheduler.living()
        except SchedulerError as error:
            self._note_once("", "scheduler", str(error))
            return []
        self._submissions = {one.submission.job_id: one.submission for one in living}
        return [
            JobFacts(one.submission.job_id, one.run_id, one.submission.attempt)
            for one in living
            if is_run_id(one.run_id)
        ]

    def _ask_prefect(self, now: datetime) -> _Prefect:
        if not self._has_prefect or not server_answers():
            return _Prefect()
        driven_by = {
            one.controllers[-1].flow_run_id
            for one in self._standings.values()
            if one.controllers and one.controllers[-1].flow_run_id
        }
        try:
            seen = flow_runs.look(self._standings.keys(), driven_by)
        except Exception as error:  # noqa: BLE001 - whatever its client raises, Prefect says nothing then
            self._note_once("", "prefect", f"{type(error).__name__}: {error}")
            return _Prefect()
        controllers = open_runs.runs_of_flow_runs(self._store, {str(one.id) for one in seen.flow_runs})
        found = flow_runs.facts(seen, controllers, self._site.prefect.pool, now)
        run_ids = {one.flow_run_id: one.run_id for one in found}
        open_ones = task_runs.facts(seen.task_runs, run_ids, self._site.runs_dir)
        return _Prefect(found, open_ones, True, controllers)

    def _prefect_away_s(self) -> float:
        if not self._has_prefect:
            return math.inf
        if self._prefect.answers:
            self._away_since = None
            return 0.0
        self._away_since = self._clock() if self._away_since is None else self._away_since
        return max(self._clock() - self._away_since, 1e-3)

    def _run(self, run_id: str, standing: OpenRun | None, now: datetime) -> RunFacts | None:
        """Facts about a run of this site; None for one of another, and while its file system does not answer."""
        if standing is not None and Path(standing.run_dir).parent != self._site.runs_dir:
            return None
        try:
            run_dir = RunDir.of(self._site.runs_dir, run_id)
            if not run_dir.spec.is_file():
                return self._missing(run_id, standing)
            written = read_record(run_dir)
            request = read_model(run_dir.cancel_request, AgentCommand)
            stored = run_dir.read_spec()
        except (RlhfError, OSError) as error:
            self._note_once(run_id, "damaged", str(error))
            return None
        self._missing_since.pop(run_id, None)
        self._runs_with_runs = identity(self._site.runs_dir)
        reason = (request.reason or "rlhf cancel") if request is not None else ""
        facts = _facts(run_id, standing, written, reason, stored, now)
        return replace(facts, untold=self._num_untold(run_dir, stored, written)) if facts.ended else facts

    def _num_untold(self, run_dir: RunDir, stored: StoredSpec, written: RunRecord) -> int:
        """How many events and pages of a run that has ended Prefect lacks. It is asked until it has them all."""
        whole = _whole(run_dir, written)
        if whole in self._told:
            return 0
        try:
            untold = self._untold(run_dir, stored)
            missing = len(untold.events) + (len(late.behind(untold.story)) if untold.flow_run.id else 0)
        except Exception as error:  # noqa: BLE001 - of Prefect's client, or a file system: the next round asks again
            self._note_once(run_dir.run_id, "events", f"{type(error).__name__}: {error}")
            return 0
        if self._prefect.answers and not missing:
            self._told.add(whole)
        return missing

    def _untold(self, run_dir: RunDir, stored: StoredSpec) -> "_Untold":
        """What nobody has told this server, and the flow run in whose name it is told: the newest that drove the run
        and that this server knows. Nothing of a run that was told to another server, or to none."""
        story = read_story(run_dir)
        known = {one.flow_run_id for one in self._prefect.flow_runs}
        # Not the newest controller: that may have been without Prefect, because its server was away.
        drove = [line.event.flow_run_id for line in story.lines if isinstance(line.event, ControllerStarted)]
        flow_run = FlowRun(next((one for one in reversed(drove) if one in known), ""), run_dir.run_id)
        events = unknown_to_the_server(happenings(story, stored, flow_run)) if flow_run.id else []
        return _Untold(flow_run, story, events)

    def _missing(self, run_id: str, standing: OpenRun | None) -> RunFacts | None:
        # Without a row, the run is another site's.
        if standing is None or not self._has_its_file_system():
            self._missing_since.pop(run_id, None)
            return None
        since = self._missing_since.setdefault(run_id, self._clock())
        holder, _ = _holder(standing, self._now())
        missing_s = max(self._clock() - since, 1e-3)
        return RunFacts(run_id, RunState(standing.state), standing.state, holder, standing.holder, missing_s=missing_s)

    def _has_its_file_system(self) -> bool:
        """True if the folder of run directories is the one that runs were seen in, or has some: a mount point is an
        empty folder while its file system is away."""
        present = identity(self._site.runs_dir)
        return present is not None and (present == self._runs_with_runs or bool(run_dirs(self._site.runs_dir)))

    # -----------------------------------------------------------------------------------------------------------------
    # Deeds

    def _do(self, action: Action) -> Deed:
        try:
            return self._deed(action)
        except (RlhfError, OSError) as error:
            return Deed(action, False, str(error))
        except Exception as error:  # noqa: BLE001 - of Prefect's client: the next round tries again
            return Deed(action, False, f"{type(error).__name__}: {error}")

    def _deed(self, action: Action) -> Deed:
        match action.kind:
            case ActionKind.INGEST:
                behind = record(self._run_dir(action), self._store)
                return Deed(action, not behind, behind or "read")
            case ActionKind.ADOPT:
                return self._adopt(action)
            case ActionKind.CANCEL_RUN:
                ended = cancel_run(self._run_dir(action), self._site, self._store, action.reason, say=log.info)
                return Deed(action, ended.job_ended, ended.message)
            case ActionKind.CLOSE_RUN:
                cause = f"the run directory is gone: {self._run_dir(action).root}, and no controller was at work on it"
                closed = close_missing(action.run_id, self._store, cause, self._now())
                return Deed(action, True, "closed as failed" if closed else "it had ended")
            case ActionKind.CANCEL_JOB:
                gone = self._scheduler.cancel(self._submissions[action.job_id])
                return Deed(action, gone, "ended" if gone else "something of it is still at work")
            case ActionKind.END_FLOW_RUN:
                return self._end_flow_run(action)
            case ActionKind.END_TASK_RUN:
                assert action.flow_state is not None
                task_runs.end(action.task_run_id, action.flow_state, action.reason)
                return Deed(action, True, f"it is {action.flow_state.value.capitalize()} now")
            case ActionKind.TELL:
                return self._tell(action, self._run_dir(action))
            case ActionKind.REMOVE_CHECKPOINT:
                remove_tree(self._run_dir(action).checkpoint(action.step).root)
                return Deed(action, True, "removed")
            case ActionKind.REMOVE_PUT_ASIDE:
                remove_tree(self._run_dir(action).checkpoints_dir / action.folder)
                return Deed(action, True, "removed")
            case ActionKind.NOTE:
                self._note_once(action.run_id, action.flow_run_id, action.reason)
                return Deed(action, True, "left alone")

    def _run_dir(self, action: Action) -> RunDir:
        """The directory of the run that an action is about; not every action is about one."""
        return RunDir.of(self._site.runs_dir, action.run_id)

    def _adopt(self, action: Action) -> Deed:
        run_id = action.run_id
        if self._prefect.answers:
            standing = self._standings.get(run_id)
            ended = sum(one.run_id == run_id and one.state in FLOW_ENDS for one in self._prefect.flow_runs)
            # The same situation gives the same key: two rounds, or two reconcilers, make one flow run of it.
            key = f"rlhf-adopt-{run_id}-{standing.token if standing is not None else 0}-{ended}"
            try:
                return Deed(action, True, f"flow run {flow_runs.adopt(run_id, key)}")
            except flow_runs.ObjectNotFound:
                self._note_once("", "resume", f"the deployment {flow_runs.RESUME_DEPLOYMENT} is not registered")
        present = self._adopters.get(run_id)
        if present is not None and present.poll() is None:
            return Deed(action, True, f"process {present.pid} is about to take it")
        self._adopters[run_id] = adopting.start(run_id, self._site)
        return Deed(action, True, f"process {self._adopters[run_id].pid}, without Prefect")

    def _end_flow_run(self, action: Action) -> Deed:
        (seen,) = (one for one in self._prefect.flow_runs if one.flow_run_id == action.flow_run_id)
        assert action.flow_state is not None
        if flow_runs.end(action.flow_run_id, action.flow_state, seen.changed_at, action.reason):
            return Deed(action, True, f"it is {action.flow_state.value.capitalize()} now")
        return Deed(action, True, "its state has changed meanwhile; left alone")

    def _tell(self, action: Action, run_dir: RunDir) -> Deed:
        whole = _whole(run_dir, read_record(run_dir))
        untold = self._untold(run_dir, run_dir.read_spec())
        told = [one.name for one in untold.events]
        if untold.events:
            tell(untold.events, action.run_id, untold.flow_run)
        if untold.flow_run.id:
            told += [f"page {what}" for what in late.renew(untold.story, self._store, untold.flow_run)]
        # Not asked again: the server shows them some seconds later, and an automation acts on each that it is sent.
        self._told.add(whole)
        return Deed(action, True, f"told now: {', '.join(told) or 'nothing is missing any more'}")

    def _write_down(self, deed: Deed) -> None:
        """Into the run directory, from where it reaches the history; where there is none, the log has it."""
        action = deed.action
        run_dir = RunDir.find(self._site.runs_dir, action.run_id)
        if run_dir is None:
            return
        data = {
            "job_id": action.job_id,
            "flow_run_id": action.flow_run_id,
            "task_run_id": action.task_run_id,
            "step": str(action.step or ""),
        }
        note = KeeperNote(
            time=self._now(),
            kind=action.kind.value,
            message=f"{action.reason}; {deed.said}",
            attempt=action.attempt or None,
            data={name: value for name, value in data.items() if value},
        )
        with suppress(OSError):
            writer = LineWriter(run_dir.housekeeping)
            try:
                writer.write(note)
            finally:
                writer.close()
        with suppress(RlhfError):
            record(run_dir, self._store)

    def _note_once(self, run_id: str, about: str, text: str) -> None:
        if (run_id, about, text) not in self._noted:
            self._noted.add((run_id, about, text))
            log.warning("%s", f"{run_id}: {text}" if run_id else text)

    # -----------------------------------------------------------------------------------------------------------------
    # Retention

    def _removals(self, world: World) -> Iterator[Action]:
        days = self._site.retention.checkpoints_days
        if not days:
            return
        now = self._now()
        candidates = open_runs.with_checkpoints(self._store, now - timedelta(days=days))
        begun_from = self._begun_from(world) if candidates else []
        for run_id, (path, ended_at) in candidates.items():
            run_dir = RunDir.find(self._site.runs_dir, run_id)
            if Path(path).parent != self._site.runs_dir or run_dir is None or run_dir.checkpoints_dir.is_symlink():
                continue
            standing = open_runs.find(self._store, now, run_ids=[run_id])[run_id]
            with suppress(RlhfError, OSError):
                for step in self._old_steps(run_dir, standing, ended_at, begun_from, now):
                    reason = f"older than {days} days, and neither the newest, the best, promoted nor in use"
                    yield Action(ActionKind.REMOVE_CHECKPOINT, run_id, reason, step=step)
                for name in self._old_put_aside(run_dir, ended_at, now - timedelta(days=days)):
                    reason = f"put aside, damaged or given up, and older than {days} days"
                    yield Action(ActionKind.REMOVE_PUT_ASIDE, run_id, reason, folder=name)

    @staticmethod
    def _old_put_aside(run_dir: RunDir, ended_at: datetime, latest: datetime) -> list[str]:
        """Folders of checkpoints that were put aside; of a run that was gone on with, none may go yet."""
        if not read_record(run_dir).ended or ended_at >= latest:
            return []
        folders = [path for path in run_dir.put_aside_folders() if not path.is_symlink()]
        return [path.name for path in folders if datetime.fromtimestamp(path.stat().st_mtime, UTC) < latest]

    def _old_steps(
        self, run_dir: RunDir, standing: OpenRun, ended_at: datetime, begun_from: Sequence[Path], now: datetime
    ) -> list[int]:
        if not read_record(run_dir).ended:
            return []  # gone on with since; the history will know soon
        folders = [one for one in run_dir.checkpoints() if not one.root.is_symlink()]
        manifests = {one.step: manifest for one in folders if (manifest := one.manifest()) is not None}
        reports = [read_model(path, EvaluationReport) for path in run_dir.evaluations_dir.glob("*.json")]
        return removable(
            {step: manifest.time for step, manifest in manifests.items()},
            [
                Scored(one.name, one.checkpoint_step, one.value)
                for one in reports
                if one is not None and math.isfinite(one.value)
            ],
            (standing.promotion, standing.promoted_step) if standing.promotion else None,
            {one.step for one in folders if any(path.is_relative_to(one.root) for path in begun_from)},
            ended_at=ended_at,
            days=self._site.retention.checkpoints_days,
            now=now,
        )

    def _begun_from(self, world: World) -> list[Path]:
        """Model folders that runs at work begin from."""
        found: list[Path] = []
        for run in world.runs.values():
            if not run.ended and not run.missing_s:
                with suppress(RlhfError, OSError):
                    model = RunDir.of(self._site.runs_dir, run.run_id).read_spec().spec.model.path
                    found += [Path(model)] if model else []
        return found


def _whole(run_dir: RunDir, written: RunRecord) -> tuple[str, str, str]:
    """What there is to be told of the end of a run."""
    promotion = written.promotion.state.value if written.promotion is not None else ""
    return run_dir.run_id, written.state.value, promotion


def _facts(
    run_id: str, standing: OpenRun | None, written: RunRecord, cancel_asked: str, stored: StoredSpec, now: datetime
) -> RunFacts:
    submissions = {number: one.submission for number, one in written.attempts.items()}
    newest = standing.controllers[-1] if standing is not None and standing.controllers else None
    holder, undriven_s = _holder(standing, now)
    ended_at = standing.ended_at if standing is not None else None
    return RunFacts(
        run_id=run_id,
        state=written.state,
        recorded=standing.state if standing is not None else "",
        holder=holder,
        owner=standing.holder if standing is not None else "",
        undriven_s=undriven_s,
        num_controllers=sum(
            one.started_at > now - timedelta(hours=1) for one in (standing.controllers if standing is not None else ())
        ),
        controller_started_at=newest.started_at if newest is not None else None,
        flow_run_id=newest.flow_run_id if newest is not None else "",
        attempt=max(written.attempts, default=0),
        jobs={number: one.job_id for number, one in submissions.items() if one is not None},
        ended_s=(now - ended_at).total_seconds() if ended_at is not None else 0.0,
        cancel_asked=cancel_asked,
        trial_of=stored.trial_of,
        promotion_due=is_due(stored, written),
    )


def _holder(standing: OpenRun | None, now: datetime) -> tuple[Holder, float]:
    """Who has the lease, and how long nobody has driven the run."""
    if standing is None:
        return Holder.FREE, 0.0
    if standing.expired_s is None:
        return Holder.FREE, (now - standing.created_at).total_seconds()
    if not standing.holder:
        return Holder.FREE, standing.expired_s
    owner = Owner.parse(standing.holder)
    if owner is not None and owner.is_here():
        # One that lives and cannot reach the database keeps its run, also when its lease has run out.
        if not owner.is_known_dead():
            return Holder.LIVING, 0.0
        return Holder.DEAD, max(standing.expired_s + TTL_S, 0.0)
    return (Holder.LIVING, 0.0) if standing.expired_s < 0 else (Holder.SILENT, standing.expired_s)


def _about(action: Action) -> str:
    parts = [action.run_id, action.job_id and f"job {action.job_id}", action.flow_run_id]
    parts.append(f"task run {action.task_run_id}" if action.task_run_id else "")
    parts.append(f"checkpoint {action.step}" if action.step else "")
    return " ".join(part for part in parts if part)
