"""A run directory that is moved away during a run: its job is real, with a helper that has left its parents and its
controller. The job is ended by its marker, and the history closes the run with an explanation."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from control_fakes import make_run
from process_tools import is_alive, until
from typer.testing import CliRunner

from rlhf_core.cli.main import app
from rlhf_core.config.site import Site, load_site
from rlhf_core.control.controller import Controller, opened
from rlhf_core.control.gone_directory import abandon
from rlhf_core.errors import RunDirGone
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.lease import IfHeld
from rlhf_core.launch.start import job_request, record_plan, submit_once
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role, RunState
from rlhf_core.schemas.resources import JOB_VARIABLE, GroupPlan, Placement, in_order, job_marker
from rlhf_core.watchdog.watcher import record

pytestmark = pytest.mark.end_to_end

JOB = """
import os, subprocess, sys, time
folder = sys.argv[1]
subprocess.run(["sh", "-c", f"setsid sleep 100 >/dev/null 2>&1 & echo $! > {folder}/daemon.pid"], check=True)
open(f"{folder}/up", "w").close()
time.sleep(100)
"""


class Case:
    """Run on the local scheduler whose directory is then moved."""

    def __init__(self, site: Site, store: HistoryStore, stack: ExitStack, pids: Path) -> None:
        self.site, self.store = site, store
        self.run_dir = make_run(site.runs_dir)
        self.controller: Controller = stack.enter_context(opened(self.run_dir, site, store, if_held=IfHeld.FAIL))
        for state in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING):
            self.controller.journal.move_run(state, "a test")
        placement = Placement(attempt=1, num_nodes=1, phases=in_order(GroupPlan.on_all_nodes(Role.TRAINER, 1, 1)))
        record_plan(self.run_dir, placement, self.controller.journal)
        request = job_request(self.run_dir, self.controller.stored.spec, placement, site)
        command = (sys.executable, "-c", JOB, str(pids))
        request = replace(request, command=command)
        assert submit_once(self.run_dir, request, self.controller.scheduler, self.controller.journal) is not None
        until((pids / "up").exists)
        record(self.run_dir, store)
        self.aside = site.runs_dir.parent / "aside"
        self.run_dir.root.rename(self.aside)

    def processes(self) -> set[int]:
        """Processes that carry the marker of the attempt."""
        marker, found = job_marker(self.run_dir.run_id, 1), set()
        for process in psutil.process_iter():
            try:
                if process.environ().get(JOB_VARIABLE) == marker and is_alive(process.pid):
                    found.add(process.pid)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    site = load_site()
    site.home.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, HistoryStore(site.database_url) as store:
        made = Case(site, store, stack, tmp_path)
        yield made
        for pid in made.processes():
            psutil.Process(pid).kill()


def test_the_controller_ends_everything_of_the_job_and_closes_the_run(case: Case, tmp_path: Path) -> None:
    before = case.processes()
    assert int((tmp_path / "daemon.pid").read_text()) in before
    assert len(before) >= 3, "the controller of the job, its agent, and the detached helper"
    outcome = str(abandon(case.controller, RunDirGone(f"{case.run_dir.root} has been missing for 31 s")))
    assert "was ended" in outcome
    assert not case.processes()
    shown = queries.show_run(case.store, case.run_dir.run_id).run
    assert shown["state"] == "failed"
    assert "the run directory is gone" in shown["message"]
    assert not case.run_dir.root.exists()


def test_cancel_without_a_controller_finds_the_job_by_its_marker(case: Case) -> None:
    """The command used to report that the directory was gone, while training continued."""
    assert case.processes()
    done = CliRunner().invoke(app, ["cancel", case.run_dir.run_id, "--reason", "it was moved"])
    assert done.exit_code == 0, done.output
    assert "is gone; the run is closed as failed; ended by its marker: job " in done.output.replace("\n", " ")
    assert not case.processes()
    shown = queries.show_run(case.store, case.run_dir.run_id).run
    assert (shown["state"], "it was moved" in shown["message"]) == ("failed", True)
    # Moved back, the run can be resumed: its files are unchanged.
    case.aside.rename(case.run_dir.root)
    assert RunDir(case.run_dir.root).read_spec().run_id == case.run_dir.run_id
    again = CliRunner().invoke(app, ["cancel", "no-such-run"])
    assert again.exit_code != 0, "control: an unknown run"


def test_processes_of_another_run_are_left_alone(case: Case) -> None:
    """Control: processes with another marker survive."""
    marked = {**dict(psutil.Process().environ()), JOB_VARIABLE: job_marker("someone-else-20260101-000000-abcdef", 1)}
    other = subprocess.Popen(["sleep", "100"], env=marked)
    try:
        assert CliRunner().invoke(app, ["cancel", case.run_dir.run_id]).exit_code == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
