"""The controller of a run: the resources it holds (directory, history, lease, journal), its start and its shutdown."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_core.condition_log import ConditionLog
from rlhf_core.config.site import Site
from rlhf_core.control.driving_flow_run import NO_FLOW_RUN, DrivingFlowRun
from rlhf_core.errors import DatabaseUnavailable, RunDirError
from rlhf_core.files.whole import read_model
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.launch.lease import TTL_S, HeldLease, IfHeld, Owner, acquire
from rlhf_core.machine.accounts import account, user_name
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler import get_scheduler
from rlhf_core.scheduler.base import Scheduler
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.journal import ControllerStarted
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.stored_spec import StoredSpec
from rlhf_core.watchdog.gone_run import AWAY_S, Presence
from rlhf_core.watchdog.watcher import AttemptSnapshot, Watcher, record

if TYPE_CHECKING:
    from rlhf_core.control.promotion import Question

LEASE_RETRY_INTERVAL_S = 2.0
"""Pause before asking an unresponsive database for the lease again."""


class Observer:
    """Receiver of the events and findings of a controller, such as the progress display. This one ignores them."""

    def follow(self, spec: RunSpec) -> None:
        """Switch to a run with this spec: a trial, or back to the run itself."""

    def stage_started(self, title: str) -> None:
        """A stage begins."""

    def polled(self, snapshot: AttemptSnapshot) -> None:
        """An attempt was polled."""

    def log(self, text: str) -> None:
        """Show a message to the user."""

    def stop_requested(self) -> bool:
        """True if the user has asked to end the run (Ctrl-C)."""
        return False


class CancelRequested(Exception):
    """A user asked to end the run."""

    def __init__(self, reason: str, *, save: bool = False) -> None:
        super().__init__(reason)
        self.save = save
        """True to write a checkpoint first."""


@dataclass
class Controller:
    """The controller of one run."""

    run_dir: RunDir
    stored: StoredSpec
    site: Site
    scheduler: Scheduler
    store: HistoryStore
    journal: Journal
    lease: HeldLease
    observer: Observer = field(default_factory=Observer)
    resumed_at: int = 0
    """Newest attempt when the user resumed the run; 0 for a new run. The next attempt starts without a back-off."""
    resumed: bool = False
    """True if the user resumed the run."""
    poll_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    show_question: Callable[["Question"], AbstractContextManager[None]] = lambda question: nullcontext()
    """Shows the approval request for as long as the block lasts; the answer goes to
    :func:`rlhf_core.launch.promote.give_answer`. By default, the controller only logs how to answer."""
    is_recorded: bool = False
    """True once the journal records this controller as the one that drives the run."""
    _watcher: Watcher | None = None
    _watched: int = 0
    _missing: str = ""

    def __post_init__(self) -> None:
        self.presence = Presence(self.run_dir, lambda: self.clock())
        """Shows whether the run directory exists."""

    @property
    def spec(self) -> RunSpec:
        """The spec of the run."""
        return self.stored.spec

    @property
    def slurm(self) -> SlurmSpec:
        """Options of its jobs, those of the site included."""
        return self.spec.slurm.over(self.site.slurm)

    def check(self) -> None:
        """Renew the lease and check for a cancel request. Called about every half second.

        Raises:
            LeaseLost: another controller has the run.
            RunDirGone: its directory is gone.
        """
        self.lease.keep()
        self.lacks_directory()
        if self.observer.stop_requested():
            raise CancelRequested(f"interrupted at the terminal (by {account()})")
        with suppress(OSError):  # read again at the next check; lacks_directory() counts how long this lasts
            self.raise_if_cancelled()

    def raise_if_cancelled(self) -> None:
        """Raise if the run is being cancelled. Its job may have been ended without waiting for this controller.

        Raises:
            CancelRequested: a user asked to end the run.
        """
        request = read_model(self.run_dir.cancel_request, AgentCommand)
        if request is not None:
            raise CancelRequested(request.reason or "rlhf cancel", save=request.kind == "stop_after_step")

    def require_lease(self) -> None:
        """Confirm with the database that this controller still owns the run, before the scheduler is asked to act.

        If the database does not respond and the lease may have expired, another controller may have taken the run. This
        method then waits for the database and does nothing else.

        Raises:
            LeaseLost: another controller has the run.
            CancelRequested: a user asked to end the run during that wait.
        """
        outage = ConditionLog(self.observer.log)
        while True:
            try:
                self.lease.require()
            except DatabaseUnavailable as error:
                outage.log_once(f"waiting for the database to confirm that this controller still owns the run: {error}")
                self.wait(LEASE_RETRY_INTERVAL_S)
            else:
                return

    def wait(self, seconds: float) -> None:
        """Sleep, and keep checking meanwhile."""
        until = self.clock() + seconds
        while True:
            self.check()
            rest = until - self.clock()
            if rest <= 0:
                return
            self.sleep(min(rest, 0.5))

    def lacks_directory(self) -> bool:
        """True if the run directory is missing right now. Observations made without it do not count.

        Raises:
            RunDirGone: it has been missing for so long that it counts as gone.
            RunDirError: its file system has been unavailable for too long.
        """
        problem = self.presence.problem(self.journal.record.last_number)
        if problem and not self._missing:
            self.observer.log(f"{problem}; making no decisions until it is back or known to be gone")
        self._missing = problem
        return bool(problem)

    def await_directory(self) -> None:
        """Wait for the run directory to be there. Raises the errors of :meth:`lacks_directory`."""
        while self.lacks_directory():
            self.wait(self.poll_s)

    def watcher(self, number: int) -> Watcher:
        """The watchdog of an attempt; repeated calls for the same attempt return the same one."""
        if self._watcher is None or self._watched != number:
            attempt = self.journal.record.attempts[number]
            self._watcher = Watcher(
                self.run_dir,
                attempt.placement,
                attempt.submission,
                self.scheduler,
                self.store,
                self.clock,
                self.spec.supervise.join_s,
            )
            self._watched = number
        return self._watcher

    def poll(self, number: int) -> AttemptSnapshot:
        """Poll an attempt. Waits while its files cannot be read, and raises the errors of :meth:`wait`.

        Raises:
            RunDirError: they could not be read for too long.
        """
        failing_since: float | None = None
        while True:
            try:
                return self.watcher(number).poll()
            except OSError as error:
                problem = f"{error.filename or self.run_dir.root} could not be read ({error.strerror})"
            now = self.clock()
            if failing_since is None:
                failing_since = now
                if not self.lacks_directory():  # otherwise, that has told the user
                    self.observer.log(f"{problem}; making no decisions until it can be read")
            elif now - failing_since > AWAY_S:
                raise self.presence.unreadable(problem, now - failing_since)
            self.wait(self.poll_s)

    def record_controller(self, flow_run: DrivingFlowRun) -> None:
        """Record, once, the controller and flow run that drive the run, so that each can be found from the other.

        Raises:
            RunDirError: the journal cannot be written.
        """
        if not self.is_recorded:
            controller = str(Owner.this_process())
            self.journal.append(
                ControllerStarted(
                    controller=controller, flow_run_id=flow_run.id, flow_run_url=flow_run.url, resumed=self.resumed
                )
            )
            self.is_recorded = True
            self.record()

    def record(self) -> str:
        """Bring the history up to date. Returns the problem that prevented it, or an empty text."""
        return record(self.run_dir, self.store)


@contextmanager
def opened(
    run_dir: RunDir,
    site: Site,
    store: HistoryStore,
    observer: Observer | None = None,
    *,
    resumed: bool = False,
    flow_run: DrivingFlowRun | None = NO_FLOW_RUN,
    on_wait: Callable[[str, float], None] = lambda owner, seconds: None,
    if_held: IfHeld = IfHeld.WAIT,
    lease_s: float = TTL_S,
) -> Iterator[Controller]:
    """Act as the controller of a run for as long as the block lasts.

    Args:
        observer: receives the events and findings of the controller.
        resumed: the user resumed the run.
        flow_run: the Prefect flow run of this controller; None if :meth:`record_controller` is called later.
        on_wait: called with the longest possible wait in seconds, if another controller's lease has to expire first.
        if_held: response to a controller that holds it.
        lease_s: lifetime of the lease in seconds if this process does not renew it, for example while suspended.

    Raises:
        RunDirError: the run directory is missing or damaged, or this process cannot write it.
        LeaseLost: another controller drives the run.
    """
    stored = run_dir.read_spec()
    _require_writable(run_dir)
    scheduler = get_scheduler(site.scheduler)
    record(run_dir, store)
    above = read_record(run_dir).token
    lease = acquire(store, run_dir.run_id, on_wait=on_wait, above=above, if_held=if_held, ttl_s=lease_s)
    lease.start()
    try:
        journal = Journal(run_dir, lease.token, keep_lease=lease.keep, on_loss=lease.lose)
    except BaseException:
        lease.release()
        raise
    controller = Controller(
        run_dir=run_dir,
        stored=stored,
        site=site,
        scheduler=scheduler,
        store=store,
        journal=journal,
        lease=lease,
        observer=observer or Observer(),
        resumed_at=journal.record.last_number if resumed else 0,
        resumed=resumed,
    )
    try:
        if resumed or journal.record.ended:
            run_dir.cancel_request.unlink(missing_ok=True)  # it was meant for an earlier controller of the run
        if flow_run is not None:
            controller.record_controller(flow_run)
        yield controller
    finally:
        close(controller)


def _require_writable(run_dir: RunDir) -> None:
    """Make sure that this process can drive the run, before it takes the lease from one that can.

    Raises:
        RunDirError: this process cannot write its files.
    """
    for path in (run_dir.root, run_dir.control):
        if path.exists() and not os.access(path, os.W_OK):
            owner = user_name(path.stat().st_uid)
            raise RunDirError(
                f"{path} belongs to {owner}, and {account()} cannot write it: only {owner} can drive or end this run"
            )


def close(controller: Controller) -> None:
    """Release the run: bring the history up to date, close the journal, return the lease."""
    lost = controller.lease.lost
    with ExitStack() as released:
        released.callback(controller.lease.release)
        # Before another controller has the run, and a reserve of its own.
        released.callback(controller.journal.close, lease_lost=lost)
        problem = "" if lost else controller.record()
        if problem:
            controller.observer.log(
                f"the history is out of date: {problem.rstrip('.')}. Nothing is lost; "
                f"`rlhf db rebuild` restores it from the run directories"
            )
