"""A controller at work on a run: what it holds (directory, history, lease, journal), how it begins and lets go."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlhf_core.config import loading as config
from rlhf_core.config.site import Site
from rlhf_core.control.site_names import for_site
from rlhf_core.control.snapshots import kept_with
from rlhf_core.errors import DatabaseUnavailable, RunDirError
from rlhf_core.files.whole import read_model
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.launch.lease import TTL_S, HeldLease, Owner, acquire
from rlhf_core.launch.prepare import absolute_paths, git_revision, prepare, program_revision
from rlhf_core.machine.accounts import account
from rlhf_core.presets import PRESETS
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler import get_scheduler
from rlhf_core.scheduler.base import Scheduler
from rlhf_core.schemas.journal import ControllerStarted
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.stored_spec import StoredSpec
from rlhf_core.watchdog.missing_run import Presence
from rlhf_core.watchdog.watcher import AttemptSnapshot, Watcher, record

if TYPE_CHECKING:
    from rlhf_core.control.promotion import Question

LEASE_RETRY_INTERVAL_S = 2.0
"""Pause before a database that does not answer is asked again for the lease."""


class Observer(Protocol):
    """Receiver of what a controller does and finds, such as the progress display."""

    def follow(self, spec: RunSpec) -> None:
        """Follow a run with this spec from now on: a trial, or again the run itself."""

    def stage_started(self, title: str) -> None:
        """A stage begins."""

    def polled(self, snapshot: AttemptSnapshot) -> None:
        """An attempt was polled."""

    def log(self, text: str) -> None:
        """Show a message to the user."""

    def stop_requested(self) -> bool:
        """True if the user has asked to end the run (Ctrl-C)."""


class Quiet:
    """Observer that shows nothing."""

    def follow(self, spec: RunSpec) -> None:
        """Not shown."""

    def stage_started(self, title: str) -> None:
        """Not shown."""

    def polled(self, snapshot: AttemptSnapshot) -> None:
        """Not shown."""

    def log(self, text: str) -> None:
        """Not shown."""

    def stop_requested(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class FlowRunLink:
    """The Prefect flow run that a controller is; all empty without Prefect."""

    id: str = ""
    url: str = ""
    """Its page, as a browser of the site reaches it."""
    created: datetime | None = None
    """Time of the request: the same whenever the flow run is retried."""
    adopts: bool = False
    """True if the reconciler made it for a run that had lost its controller, and no user has retried it since. No user
    asked to go on then: budgets of retries go on where they were, and a request to end the run still counts."""

    def run_id(self, name: str) -> str:
        """The id of the run that it makes. Always the same, so that it can never make a second one."""
        moment = self.created or datetime.min
        return f"{name}-{moment:%Y%m%d-%H%M%S}-{self._mark}"

    def run_dir(self, runs: Path) -> RunDir | None:
        """The run that it has made, if it has.

        This is asked of the run directories, which are whole or not there, never of the history: the first row of a
        run is written long after its directory, and a flow run can be killed in between.
        """
        for path in sorted(runs.glob(f"*-{self._mark}")) if self.id else ():
            run_dir = RunDir(path)
            try:
                if run_dir.read_spec().flow_run_id == self.id:
                    return run_dir
            except RunDirError:
                continue  # damaged, or of a newer version: not known to be ours
        return None

    @property
    def _mark(self) -> str:
        return blake2b(self.id.encode(), digest_size=3).hexdigest()


class CancelRequested(Exception):
    """The run is to be ended, by request of a user."""

    def __init__(self, reason: str, *, save: bool = False) -> None:
        super().__init__(reason)
        self.save = save
        """True if a checkpoint is to be written first."""


@dataclass
class Controller:
    """One controller at work on one run."""

    run_dir: RunDir
    stored: StoredSpec
    site: Site
    scheduler: Scheduler
    store: HistoryStore
    journal: Journal
    lease: HeldLease
    observer: Observer = field(default_factory=Quiet)
    resumed_at: int = 0
    """Newest attempt when the user asked to go on with the run; 0 for a new run. The budget of retries begins with it,
    and what follows it is not waited for."""
    resumed: bool = False
    """True if the user asked to go on with the run."""
    lease_lost: bool = False
    poll_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    show_question: Callable[["Question"], AbstractContextManager[None]] = lambda question: nullcontext()
    """Shows the question about a promotion for as long as the block lasts; an answer goes to
    :func:`rlhf_core.launch.promote.give_answer`. By itself the controller only says how to answer."""
    is_recorded: bool = False
    """True if the journal says that this controller has the run."""
    _watcher: Watcher | None = None
    _watched: int = 0
    _missing: str = ""

    def __post_init__(self) -> None:
        self.presence = Presence(self.run_dir, lambda: self.clock())
        """True if the run directory is there."""

    @property
    def spec(self) -> RunSpec:
        """The spec of the run."""
        return self.stored.spec

    def check(self) -> None:
        """Keep the lease, and see whether the run is to be ended. Called about every half second.

        Raises:
            LeaseLost: another controller has the run.
            RunDirGone: its directory is gone.
        """
        self.lease.keep()
        self.lacks_directory()
        if self.observer.stop_requested():
            raise CancelRequested(f"interrupted at the terminal (by {account()})")
        request = read_model(self.run_dir.cancel_request, AgentCommand)
        if request is not None:
            raise CancelRequested(request.reason or "rlhf cancel", save=request.kind == "stop_after_step")

    def require_lease(self) -> None:
        """Ask the database whether the run is still this controller's, before its scheduler is asked to do something.

        While the database does not answer and the lease may have run out, another controller may have the run: it is
        waited for then, with nothing done.

        Raises:
            LeaseLost: another controller has the run.
            CancelRequested: it is to be ended, which was asked while the database was waited for.
        """
        told = False
        while True:
            try:
                self.lease.require()
            except DatabaseUnavailable as error:
                if not told:
                    told = True
                    self.observer.log(f"waiting for the database, which says whose run this is: {error}")
                self.wait(LEASE_RETRY_INTERVAL_S)
            else:
                return

    def wait(self, seconds: float) -> None:
        """Sleep, checking on the way."""
        until = self.clock() + seconds
        while True:
            self.check()
            rest = until - self.clock()
            if rest <= 0:
                return
            self.sleep(min(rest, 0.5))

    def lacks_directory(self) -> bool:
        """True if the run directory is not there just now. Nothing that is seen without it counts.

        Raises:
            RunDirGone: it has been missing for so long that it is taken for gone.
            RunDirError: its file system has been away for too long.
        """
        problem = self.presence.problem(max(self.journal.record.attempts, default=0))
        if problem and not self._missing:
            self.observer.log(f"{problem}; nothing is decided until it is back, or known to be gone")
        self._missing = problem
        return bool(problem)

    def await_directory(self) -> None:
        """Return once the run directory is there. Raises what :meth:`lacks_directory` raises."""
        while self.lacks_directory():
            self.wait(self.poll_s)

    def watcher(self, number: int) -> Watcher:
        """The watchdog of an attempt; the same one for as long as the attempt is looked at."""
        if self._watcher is None or self._watched != number:
            attempt = self.journal.record.attempts[number]
            self._watcher = Watcher(
                self.run_dir, attempt.placement, attempt.submission, self.scheduler, self.store, self.clock
            )
            self._watched = number
        return self._watcher

    def record_controller(self, flow_run: FlowRunLink) -> None:
        """Write down, once, who drives the run from here, so that either is found from the other.

        Raises:
            RunDirError: the journal cannot be written.
        """
        if not self.is_recorded:
            controller = str(Owner.this_process())
            self.journal.append(
                ControllerStarted(controller=controller, flow_run_id=flow_run.id, flow_run_url=flow_run.url)
            )
            self.is_recorded = True
            self.record()

    def record(self) -> str:
        """Bring the history up to date; why that was not possible, or an empty text."""
        return record(self.run_dir, self.store)


def resolve(source: str, overrides: Sequence[str] = (), name: str = "", folder: Path | None = None) -> RunSpec:
    """The spec that a config file, its overrides and a name mean, with absolute paths.

    Raises:
        BadConfig: with every problem found.
    """
    named = [*overrides, f'name="{name}"'] if name else list(overrides)
    return absolute_paths(config.load(source, named), folder or Path.cwd())


def new_run(
    source: str,
    overrides: Sequence[str],
    site: Site,
    name: str = "",
    *,
    folder: Path | None = None,
    owner: str = "",
    tags: Sequence[str] = (),
    flow_run: FlowRunLink | None = None,
) -> RunDir:
    """Make a run from a config file. Nothing is started.

    Args:
        folder: where relative paths begin. Default: the current folder.
        owner: who asked. Default: the user of this process.
        tags: words to find it by.
        flow_run: the Prefect flow run that makes it.

    Raises:
        BadConfig: the config cannot be used.
        BadInput: the site's scheduler is none.
        RunDirError: the run directory cannot be made.
    """
    spec = resolve(source, overrides, name, folder)
    get_scheduler(site.scheduler)  # a run that can never start is not made
    kept = kept_with(source)
    # A preset belongs to the program. A deployment of one is begun in no folder of a user's.
    of_preset = program_revision() if source in PRESETS and not git_revision(folder or Path.cwd()) else None
    return prepare(
        for_site(spec, site),
        site.runs_dir,
        config_source=str(source),
        overrides=overrides,
        folder=kept.code if kept is not None else folder,
        revision=kept.revision if kept is not None else of_preset,
        owner=owner,
        tags=tags,
        run_id=flow_run.run_id(spec.name) if flow_run is not None and flow_run.id else "",
        flow_run_id=flow_run.id if flow_run is not None else "",
    )


@contextmanager
def opened(
    run_dir: RunDir,
    site: Site,
    store: HistoryStore,
    observer: Observer | None = None,
    *,
    resumed: bool = False,
    flow_run: FlowRunLink | None = FlowRunLink(),
    on_wait: Callable[[str, float], None] = lambda owner, seconds: None,
    timeout_s: float = TTL_S + 5,
    fail_if_held: bool = False,
    lease_s: float = TTL_S,
) -> Iterator[Controller]:
    """Be the controller of a run for as long as the block lasts.

    Args:
        observer: receives what the controller does and finds.
        resumed: the user asked to go on with the run.
        flow_run: the Prefect flow run that this controller is; None where :meth:`record_controller` is called
            later.
        on_wait: told when another controller's lease has to run out first, and how long that may take (seconds).
        timeout_s: how long to wait for that.
        fail_if_held: not to wait for a controller that is seen to be alive.
        lease_s: how long the lease holds where this process does not renew it, as when it is suspended (seconds).

    Raises:
        RunDirError: the run directory is missing or damaged.
        LeaseLost: another controller drives the run.
    """
    stored = run_dir.read_spec()
    scheduler = get_scheduler(site.scheduler)
    record(run_dir, store)
    above = read_record(run_dir).token
    lease = acquire(
        store,
        run_dir.run_id,
        on_wait=on_wait,
        above=above,
        timeout_s=timeout_s,
        fail_if_held=fail_if_held,
        ttl_s=lease_s,
    )
    lease.start()
    try:
        journal = Journal(run_dir, lease.token, keep_lease=lease.keep)
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
        observer=observer or Quiet(),
        resumed_at=max(journal.record.attempts, default=0) if resumed else 0,
        resumed=resumed,
    )
    try:
        if resumed or journal.record.ended:
            run_dir.cancel_request.unlink(missing_ok=True)  # it was about an earlier life of the run
        if flow_run is not None:
            controller.record_controller(flow_run)
        yield controller
    finally:
        close(controller)


def close(controller: Controller) -> None:
    """Let go of the run: the history is brought up to date, the journal closed, the lease given back."""
    lost = controller.lease_lost or controller.lease.lost
    if not lost:
        behind = controller.record()
        if behind:
            controller.observer.log(
                f"the history is behind: {behind.rstrip('.')}. Nothing is lost; "
                f"`rlhf db rebuild` reads the run directories again"
            )
    controller.lease.release()
    controller.journal.close(lease_lost=lost)
