"""Begins and ends the work of a controller on a run: directory, history, lease, journal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flows.stages import Observer, Quiet, Session, close
from rlhf_core import config
from rlhf_core.config import Site
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.launch.lease import TTL_S, acquire
from rlhf_core.launch.prepare import absolute_paths, prepare
from rlhf_core.run_dir import RunDir
from rlhf_core.scheduler import get_scheduler
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.watch import record


def resolve(source: str, overrides: Sequence[str] = (), name: str = "", folder: Path | None = None) -> RunSpec:
    """The spec that a config file, its overrides and a name mean, with absolute paths.

    Raises:
        BadConfig: with every problem found.
    """
    named = [*overrides, f'name="{name}"'] if name else list(overrides)
    return absolute_paths(config.load(source, named), folder or Path.cwd())


def new_run(source: str, overrides: Sequence[str], site: Site, name: str = "") -> RunDir:
    """Make a run from a config file. Nothing is started.

    Raises:
        BadConfig: the config cannot be used.
        BadInput: the site's scheduler is none.
        RunDirError: the run directory cannot be made.
    """
    spec = resolve(source, overrides, name)
    get_scheduler(site.scheduler)  # a run that can never start is not made
    return prepare(spec, site.runs_dir, config_source=str(source), overrides=overrides)


@contextmanager
def opened(
    run_dir: RunDir,
    site: Site,
    store: HistoryStore,
    observer: Observer | None = None,
    *,
    resumed: bool = False,
    on_wait: Callable[[str, float], None] = lambda owner, seconds: None,
    patience_s: float = TTL_S + 5,
) -> Iterator[Session]:
    """Be the controller of a run for as long as the block lasts.

    Args:
        observer: who looks on.
        resumed: a person asked to go on with the run.
        on_wait: told when another controller's lease has to run out first, and how long that may take (seconds).
        patience_s: how long to wait for that.

    Raises:
        RunDirError: the run directory is missing or damaged.
        LeaseLost: another controller drives the run.
    """
    stored = run_dir.read_spec()
    scheduler = get_scheduler(site.scheduler)
    record(run_dir, store)
    above = read_record(run_dir).token
    lease = acquire(store, run_dir.run_id, on_wait=on_wait, above=above, patience_s=patience_s)
    try:
        journal = Journal(run_dir, lease.token)
    except BaseException:
        lease.release()
        raise
    session = Session(
        run_dir=run_dir,
        stored=stored,
        site=site,
        scheduler=scheduler,
        store=store,
        journal=journal,
        lease=lease,
        observer=observer or Quiet(),
        resumed_at=max(journal.record.attempts, default=0) if resumed else 0,
    )
    try:
        yield session
    finally:
        close(session)
