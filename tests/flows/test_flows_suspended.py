"""Controllers that are really suspended or killed: never two jobs of one attempt, and a cancelled run stays cancelled.

The agents are small programs that write the same files as real ones (``site_files.PRETENDED_AGENT``).
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from control_fakes import checked_run
from process_tools import until
from sites import Site, go, starts, state_of

from rlhf_core.launch.journal import read_record
from rlhf_core.machine.accounts import account
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.local import LocalScheduler
from rlhf_core.schemas.attempts import AttemptState, RunState

pytestmark = pytest.mark.end_to_end

LEASE_S = 3.0


@dataclass
class Controllers:
    """Controllers of one site, each in a process of its own."""

    site: Site
    logs: list[Path] = field(default_factory=list)

    def start(self, run_dir: RunDir, point: str = "", *, old: bool = False) -> "subprocess.Popen[str]":
        log = self.site.home / f"controller-{len(self.logs)}.log"
        self.logs.append(log)
        words = [run_dir.run_id, point, str(LEASE_S), *(["old"] if old else [])]
        return self.site.spawn([sys.executable, str(Path(__file__).with_name("real_controller.py")), *words], log=log)

    def output(self, number: int) -> str:
        return self.logs[number].read_text()


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[Controllers]:
    with Site(tmp_path / "home", pretended=True).running(services=False) as site:
        yield Controllers(site)
    scheduler = LocalScheduler()
    for job in scheduler.living():
        if (site.home / "runs" / job.run_id).exists():
            scheduler.cancel(job.submission)


def suspended(process: "subprocess.Popen[str]") -> bool:
    assert process.poll() is None
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def num_jobs(run_dir: RunDir) -> int:
    return len(starts(run_dir)) if (run_dir.root / "starts").exists() else 0


def taken_over(controllers: Controllers, *, old: bool) -> RunDir:
    """Suspend a controller just before it submits, for longer than its lease, and let a second one take the run over.

    Then the first one wakes up.
    """
    run_dir = checked_run(controllers.site.home / "runs")
    first = controllers.start(run_dir, "suspended before it submits", old=old)
    until(lambda: suspended(first), "the first controller is about to submit")
    second = controllers.start(run_dir)
    until(lambda: state_of(run_dir) is RunState.TRAINING, "the second one has submitted")
    before = {path: path.read_bytes() for path in (run_dir.attempt(1).submission, run_dir.attempt(1).placement)}
    lines = run_dir.control.read_text().splitlines()
    first.send_signal(signal.SIGCONT)
    until(lambda: old or first.poll() is not None, "the first one has noticed")
    if old:
        # Wait for the jobs, not for the controllers: a controller may have submitted and ended before its job starts.
        until(lambda: num_jobs(run_dir) > 1, "the first one has submitted too")
        return run_dir
    assert first.returncode == 1
    assert "LeaseLost" in controllers.output(0)
    assert {path: path.read_bytes() for path in before} == before
    assert run_dir.control.read_text().splitlines()[: len(lines)] == lines
    go(run_dir)
    assert second.wait(100) == 0, controllers.output(1)
    record = read_record(run_dir)
    assert record.state is RunState.COMPLETED
    stale = [line for line in run_dir.control.read_text().splitlines() if '"token":1,' in line]
    assert stale == [line for line in lines if '"token":1,' in line], "the first one has written nothing since"
    return run_dir


def test_a_controller_suspended_before_a_submission_and_replaced_submits_nothing(controllers: Controllers) -> None:
    assert starts(taken_over(controllers, old=False)) == ["1"]


def test_without_the_check_of_the_lease_there_are_two_jobs(controllers: Controllers) -> None:
    """Negative control: the former controller, which queried the lease only when it was time to renew it."""
    assert starts(taken_over(controllers, old=True)) == ["1", "1"]


def cancelled_and_killed(controllers: Controllers, *, old: bool) -> RunDir:
    """Kill a controller right after the scheduler has ended the job; the daemon's next one adopts the run."""
    run_dir = checked_run(controllers.site.home / "runs")
    first = controllers.start(run_dir, "killed when the scheduler was asked to cancel", old=old)
    assert first.wait(100) == -signal.SIGKILL
    assert starts(run_dir) == ["1"]
    assert state_of(run_dir) is RunState.TRAINING
    go(run_dir)  # in case an agent is started once more
    second = controllers.start(run_dir, old=old)
    assert second.wait(100) == (0 if old else 130), controllers.output(1)
    return run_dir


def test_a_run_whose_controller_was_killed_while_it_cancelled_is_cancelled(controllers: Controllers) -> None:
    run_dir = cancelled_and_killed(controllers, old=False)
    record = read_record(run_dir)
    assert (record.state, record.cause) == (RunState.CANCELLED, f"interrupted at the terminal (by {account()})")
    assert record.attempts[1].state is AttemptState.CANCELLED
    assert starts(run_dir) == ["1"]


def test_without_the_intent_in_the_journal_the_run_is_retried(controllers: Controllers) -> None:
    """Negative control: act first, record later."""
    run_dir = cancelled_and_killed(controllers, old=True)
    assert state_of(run_dir) is RunState.COMPLETED
    assert starts(run_dir) == ["1", "2"]
