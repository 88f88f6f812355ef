"""A controller in a process of its own on the local scheduler, which suspends or kills itself at a given point.

``python real_controller.py RUN POINT LEASE_S [old]``: exit code and message are those of `rlhf resume`. With ``old`` it
behaves as controllers did before: it does not check the lease before it acts, and records a cancellation only
afterwards.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rlhf_core.config.site import load_site
from rlhf_core.control import cancel
from rlhf_core.control.controller import Controller, Observer, opened
from rlhf_core.control.steps import drive
from rlhf_core.errors import RlhfError
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.local import LocalScheduler
from rlhf_core.schemas.journal import CancelStarted
from rlhf_core.watchdog.watcher import AttemptSnapshot


class Impatient(Observer):
    """A user who presses Ctrl-C as soon as the job runs."""

    stop = False

    def polled(self, snapshot: AttemptSnapshot) -> None:
        self.stop = snapshot.progress.role is not None

    def stop_requested(self) -> bool:
        return self.stop


def then(effect: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Wrap an effect so that a signal is sent to this process right after it."""

    def both(*arguments: Any, **keywords: Any) -> Any:
        answer = effect(*arguments, **keywords)
        os.kill(os.getpid(), number)
        return answer

    return both


def as_it_was() -> None:
    """Restore the old behaviour, without the checks under test."""
    append = Journal.append

    def append_without_intent(journal: Journal, event: Any) -> None:
        if not isinstance(event, CancelStarted):
            journal._keep_lease = lambda: None
            append(journal, event)

    Journal.append = append_without_intent  # type: ignore[method-assign]
    Controller.require_lease = lambda self: None  # type: ignore[method-assign]


def main(run_id: str, point: str, lease_s: float) -> int:
    site = load_site()
    observer = Observer()
    if point == "suspended before it submits":
        LocalScheduler.find = then(LocalScheduler.find, signal.SIGSTOP)  # type: ignore[method-assign]
    if point == "killed when the scheduler was asked to cancel":
        observer = Impatient()
        cancel.CANCEL_TIMEOUT_S = 0.0
        LocalScheduler.cancel = then(LocalScheduler.cancel, signal.SIGKILL)  # type: ignore[method-assign]
    try:
        with (
            HistoryStore(site.database_url) as store,
            opened(RunDir.of(site.runs_dir, run_id), site, store, observer, lease_s=lease_s) as controller,
        ):
            controller.poll_s = 0.2
            drive(controller)
    except RlhfError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    if "old" in sys.argv:
        as_it_was()
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
