"""The reconciler on a fake scheduler and a real history: its findings, its actions, and its limits."""

import dataclasses
import errno
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from control_fakes import FakeAgent, FakeJob, make_run, make_spec
from harness import ControllerHarness
from history_tools import dump, events_of, run_sql
from process_tools import until

from flows.reconcile import Turn
from rlhf_core.control import adopt
from rlhf_core.control.attempts.jobs import order_to_end
from rlhf_core.control.ingester import Ingester
from rlhf_core.control.reconcile import cleanup, loop
from rlhf_core.control.reconcile.actions import ActionResult, Reconciler
from rlhf_core.control.reconcile.facts import SILENT_AFTER_S
from rlhf_core.control.reconcile.once import poll_once, reconcile_once
from rlhf_core.control.run_folders import lease_name
from rlhf_core.control.steps import drive, steps
from rlhf_core.control.undriven import undriven_since
from rlhf_core.diagnosis.reconcile.decisions import ActionKind, ReconcileAction
from rlhf_core.errors import DatabaseUnavailable, LeaseLost, RunDirError, SchedulerError
from rlhf_core.files.whole import write_model
from rlhf_core.history import queries
from rlhf_core.history.queries.controllers import lease_holder
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.launch.lease import HeldLease, Owner
from rlhf_core.machine.accounts import user_name
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState, StageName
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checkpoint_files import BestCheckpoint
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.resources import Submission
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.site import RetentionSite

DEAD = f"anna@{os.uname().nodename}:{psutil.pids()[-1]}:1.00"
"""A process of this machine that is known to be gone: it began in 1970."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs for which a controller was started; none of these controllers ever takes its run."""
    found: list[str] = []

    class Gone:
        pid = 1

        def poll(self) -> int:
            return 0

    def start(run_id: str, site: object) -> Gone:
        found.append(run_id)
        return Gone()

    monkeypatch.setattr(adopt, "start", start)
    return found


@pytest.fixture
def reconciler(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> Reconciler:
    monkeypatch.setattr("rlhf_core.control.reconcile.actions.get_scheduler", lambda name: harness.scheduler)
    monkeypatch.setattr("rlhf_core.control.cancel.CANCEL_TIMEOUT_S", 0.0)
    return Reconciler(harness.site, harness.store, flow_runs=None, clock=harness.clock)


def training(harness: ControllerHarness) -> RunDir:
    """A run in training whose controller was killed: its lease names a dead process."""
    run_dir = harness.killed_in_training()
    harness.store.acquire_lease(run_dir.run_id, DEAD, 60)
    return run_dir


def completed(harness: ControllerHarness) -> RunDir:
    """A completed run with checkpoints 4, 8 and 10."""
    run_dir = harness.run()

    def agents(request: object) -> None:
        agent = FakeAgent(run_dir)
        agent.checkpoint(4)
        agent.checkpoint(8)
        agent.whole_run()

    harness.scheduler.on_submit = agents
    drive(harness.controller(run_dir))
    harness._stack.close()
    return run_dir


def failed(harness: ControllerHarness, steps: Sequence[int] = (4, 8, 10), spec: RunSpec | None = None) -> RunDir:
    """A failed run with checkpoints of these steps."""
    run_dir = harness.run(spec)
    for step in steps:
        FakeAgent(run_dir).checkpoint(step)
    with closing(Journal(run_dir, 1)) as journal:
        journal.move_run(RunState.FAILED, "it failed")
    Ingester(harness.site, harness.store).ingest()
    return run_dir


def kinds(actions: list[ReconcileAction]) -> list[ActionKind]:
    return [one.kind for one in actions]


def recorded_actions(harness: ControllerHarness, run_dir: RunDir) -> list[tuple[str, str]]:
    """Actions of the daemon recorded in the history."""
    return [
        (str(one["kind"]), str(one["message"]))
        for one in events_of(harness.store, run_dir.run_id)
        if str(one["kind"]).startswith("reconcile_")
    ]


def one_round(reconciler: Reconciler) -> list[ActionResult]:
    return reconciler.carry_out(reconciler.poll())


def test_a_run_that_only_another_user_can_write_is_noted(
    harness: ControllerHarness, reconciler: Reconciler, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = training(harness)
    with monkeypatch.context() as foreign:
        foreign.setattr(os, "geteuid", lambda: run_dir.root.stat().st_uid + 1)
        foreign.setattr(os, "access", lambda path, mode: False)
        (noted,) = one_round(reconciler)
    assert (noted.action.kind, started) == (ActionKind.NOTE, [])
    assert "can write its directory" in noted.action.reason
    one_round(reconciler)
    assert started == [run_dir.run_id], "control"


def test_no_controller_takes_a_run_that_it_cannot_write(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease stays with the users who can write it."""
    run_dir = training(harness)
    with monkeypatch.context() as foreign:
        foreign.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(RunDirError, match="cannot write it: only"):
            harness.controller(run_dir)
    holder = lease_holder(harness.store, run_dir.run_id)
    assert holder is not None
    assert holder.controller == DEAD


def test_a_run_whose_controller_is_gone_is_adopted(
    harness: ControllerHarness, reconciler: Reconciler, started: list[str]
) -> None:
    run_dir = training(harness)
    one_round(reconciler)
    assert started == [run_dir.run_id]
    assert recorded_actions(harness, run_dir)[0][0] == "reconcile_adopt"
    assert "is gone" in recorded_actions(harness, run_dir)[0][1]


def test_a_run_with_a_living_controller_is_left_alone(
    harness: ControllerHarness, reconciler: Reconciler, started: list[str]
) -> None:
    """Even if its lease has run out, as after a database outage."""
    run_dir = training(harness)
    harness.store.acquire_lease(run_dir.run_id, str(Owner.this_process()), -500, takeover=lambda owner: True)
    assert one_round(reconciler) == []
    assert started == []


def test_a_completed_run_without_a_controller_is_adopted_to_request_approval(
    harness: ControllerHarness, reconciler: Reconciler, started: list[str]
) -> None:
    """Its promotion is not in the history yet: only its spec shows that an approval is to be requested."""
    run_dir = harness.good_run(make_spec(promote={"when": "approved"}))

    for step in steps(harness.controller(run_dir)):
        if step.name == StageName.PROMOTE:
            break  # the controller is killed here
        step.run()
    harness._stack.close()
    harness.store.acquire_lease(run_dir.run_id, DEAD, 60)
    assert read_record(run_dir).promotion is None
    one_round(reconciler)
    assert started == [run_dir.run_id]
    completed(harness)
    one_round(reconciler)
    assert started == [run_dir.run_id] * 2, "a run without a request for approval gets none"


def test_the_log_of_an_adopted_run_has_its_stages_and_decisions(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = harness.run()
    harness.scheduler.on_submit = lambda request: FakeAgent(run_dir).whole_run()
    monkeypatch.setattr(adopt, "load_site", lambda: harness.site)
    assert adopt.main(run_dir.run_id) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d train attempt 1$", printed, re.MULTILINE), printed


def test_an_adopted_run_continues_with_its_job_and_ends(harness: ControllerHarness, reconciler: Reconciler) -> None:
    run_dir = training(harness)
    FakeAgent(run_dir).whole_run()
    drive(harness.controller(run_dir))
    harness._stack.close()
    assert read_record(run_dir).state is RunState.COMPLETED
    assert len(harness.scheduler.submitted) == 1
    assert reconciler.poll() == []


def test_a_request_to_end_a_run_without_a_controller_is_carried_out(
    harness: ControllerHarness, reconciler: Reconciler
) -> None:
    run_dir = training(harness)
    write_model(run_dir.cancel_request, AgentCommand(kind="cancel", reason="enough", time=utc_now()))
    (result,) = one_round(reconciler)
    assert result.done
    assert read_record(run_dir).state is RunState.CANCELLED
    assert harness.scheduler.living() == []
    assert one_round(reconciler) == []


def test_the_reconciler_leaves_a_request_to_save_to_a_controller(
    harness: ControllerHarness, reconciler: Reconciler, started: list[str]
) -> None:
    """It may take an hour, in which no other run would be looked after. A later request to end at once does not."""
    run_dir = training(harness)
    write_model(run_dir.cancel_request, order_to_end("enough", save=True))
    assert kinds(reconciler.poll()) == [ActionKind.ADOPT]
    other = training(harness)
    one_round(reconciler)
    assert sorted(started) == sorted([run_dir.run_id, other.run_id])
    write_model(run_dir.cancel_request, order_to_end("enough", save=False))
    one_round(reconciler)
    assert read_record(run_dir).state is RunState.CANCELLED


def test_the_job_of_a_run_that_has_ended_is_cancelled_after_a_while(
    harness: ControllerHarness, reconciler: Reconciler
) -> None:
    run_dir = completed(harness)
    assert reconciler.poll() == [], "its agents may take a moment to leave"
    later = Reconciler(harness.site, harness.store, flow_runs=None, now=lambda: utc_now() + timedelta(seconds=90))
    (result,) = one_round(later)
    assert (result.action.kind, result.done) == (ActionKind.CANCEL_JOB, True)
    assert harness.scheduler.cancelled == ["101"]
    assert recorded_actions(harness, run_dir)[0][0] == "reconcile_cancel_job"
    assert one_round(later) == []


def test_jobs_of_other_sites_are_never_touched(
    harness: ControllerHarness, reconciler: Reconciler, tmp_path: Path
) -> None:
    """Neither those of a site with a history of its own, nor those of a site that shares this history."""
    other = dataclasses.replace(harness.site, runs_dir=tmp_path / "others")
    sharing = make_run(other.runs_dir)
    Ingester(other, harness.store).ingest()
    assert sharing.run_id in harness.store.run_ids()
    journal = Journal(sharing, 1)
    journal.move_run(RunState.FAILED, "it failed")
    journal.close()
    Ingester(other, harness.store).ingest()
    for number, run_id in enumerate((sharing.run_id, "else-20260101-000000-aaaaaa", "not a run of ours")):
        submission = Submission(attempt=1, scheduler="local", job_id=str(900 + number), command=())
        harness.scheduler.jobs[submission.job_id] = FakeJob(run_id, submission)
    later = Reconciler(harness.site, harness.store, flow_runs=None, now=lambda: utc_now() + timedelta(hours=2))
    assert one_round(later) == []
    assert harness.scheduler.cancelled == []
    (result,) = one_round(Reconciler(other, harness.store, flow_runs=None, now=lambda: utc_now() + timedelta(hours=2)))
    assert result.action.job_id == "900", "the control: its own site would"


@pytest.mark.parametrize(("expired_s", "is_replaced"), [(SILENT_AFTER_S - 60, False), (SILENT_AFTER_S + 60, True)])
def test_a_controller_that_is_stopped_is_replaced(
    harness: ControllerHarness, reconciler: Reconciler, started: list[str], expired_s: float, is_replaced: bool
) -> None:
    """By Ctrl-Z, for instance. Before, it kept its run for as long as its process existed."""
    run_dir = harness.killed_in_training()
    stopped = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 19)"])
    try:
        until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
        owner = Owner(user_name(), os.uname().nodename, stopped.pid, psutil.Process(stopped.pid).create_time())
        harness.store.acquire_lease(run_dir.run_id, str(owner), -expired_s)
        one_round(reconciler)
        assert started == [], "the machine may have been suspended: both had no time to renew anything"
        assert ([*undriven_since(harness.store, [run_dir.run_id])] == [run_dir.run_id]) is is_replaced
        harness.clock.now += 31
        one_round(reconciler)
        assert started == ([run_dir.run_id] if is_replaced else [])
    finally:
        stopped.kill()
        stopped.wait()


def test_a_lost_folder_of_runs_is_not_taken_for_lost_runs(harness: ControllerHarness, reconciler: Reconciler) -> None:
    run_dir = training(harness)
    harness.site.runs_dir.rename(harness.site.home / "away")
    assert reconciler.poll() == []
    harness.clock.now += 3600
    assert reconciler.poll() == []
    harness.site.runs_dir.mkdir()
    for _ in range(2):
        assert reconciler.poll() == [], "the mount point of a file system that is away"
        harness.clock.now += 3600
    harness.site.runs_dir.rmdir()
    (harness.site.home / "away").rename(harness.site.runs_dir)
    (action,) = reconciler.poll()
    assert (action.kind, action.run_id) == (ActionKind.ADOPT, run_dir.run_id)


def test_a_run_whose_directory_is_gone_is_closed_and_its_job_ended(
    harness: ControllerHarness, reconciler: Reconciler, started: list[str]
) -> None:
    run_dir = training(harness)
    assert kinds(reconciler.poll()) == [ActionKind.ADOPT]
    aside = harness.site.home / "aside"
    run_dir.root.rename(aside)
    for passed_s in (0, 599):
        harness.clock.now += passed_s
        assert reconciler.poll() == [], "it may come back"
    harness.clock.now += 2
    results = one_round(reconciler)
    assert [result.action.kind for result in results] == [ActionKind.CLOSE_RUN, ActionKind.CANCEL_JOB]
    assert harness.scheduler.cancelled == ["101"]
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert (shown.run["state"], shown.attempts[0]["state"]) == ("failed", "lost")
    assert shown.run["message"] == f"the run directory is gone: {run_dir.root}, and no controller was driving it"
    assert shown.stages[-1]["state"] == "failed"
    assert one_round(reconciler) == [], "once"
    # The directory was only moved: its own files are authoritative, and the run continues.
    aside.rename(run_dir.root)
    Ingester(harness.site, harness.store).ingest()
    assert queries.show_run(harness.store, run_dir.run_id).run["state"] == "training"
    assert kinds(reconciler.poll()) == [ActionKind.ADOPT]


def test_an_unresponsive_scheduler_causes_no_action(harness: ControllerHarness, reconciler: Reconciler) -> None:
    completed(harness)

    def silent() -> list[object]:
        raise SchedulerError("away")

    harness.scheduler.living = silent  # type: ignore[method-assign,assignment]
    later = Reconciler(harness.site, harness.store, flow_runs=None, now=lambda: utc_now() + timedelta(hours=2))
    assert one_round(later) == []


def test_each_outage_and_each_damage_is_warned_of_once(
    harness: ControllerHarness, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = training(harness)
    journal = run_dir.control.read_text()
    warnings: list[str] = []
    later = Reconciler(harness.site, harness.store, flow_runs=None, clock=harness.clock, warn=warnings.append)
    for _ in range(2):
        damage_the_journal(run_dir)
        with monkeypatch.context() as away:
            away.setattr(harness.scheduler, "living", Mock(side_effect=SchedulerError("away")))
            later.poll()
            later.poll()
        run_dir.control.write_text(journal)
        later.poll()
    assert warnings[0] == "away"
    assert warnings[1].startswith(f"{run_dir.run_id}: ")
    assert warnings[2:] == warnings[:2]


def test_a_daemon_that_was_replaced_while_suspended_does_nothing(harness: ControllerHarness) -> None:
    """It checks its lease before each action: its clock and its other thread may not have noticed the loss yet."""
    name, owner = lease_name(harness.site.runs_dir), str(Owner.this_process())
    lease = HeldLease(harness.store, name, owner, harness.store.acquire_lease(name, owner, 60))
    assert loop.is_held(lease)
    harness.store.acquire_lease(name, "next@elsewhere:1:1.00", 60, takeover=lambda owner: True)
    lease.keep()  # the control: the lease was just renewed, and the daemon has not noticed
    assert not loop.is_held(lease)


def damage_the_journal(run_dir: RunDir) -> None:
    texts = run_dir.control.read_text().splitlines(keepends=True)
    run_dir.control.write_text("".join([texts[0], "x" + texts[1], *texts[2:]]))


@pytest.mark.parametrize("damage", [lambda run_dir: run_dir.spec.write_text("{"), damage_the_journal])
def test_damaged_run_directories_do_not_affect_the_others(
    harness: ControllerHarness, reconciler: Reconciler, started: list[str], damage: Callable[[RunDir], object]
) -> None:
    damaged, run_dir = training(harness), training(harness)
    damage(damaged)
    one_round(reconciler)
    assert started == [run_dir.run_id]
    assert harness.scheduler.cancelled == [], "the job of an unreadable run is left to the users"


def test_a_damaged_journal_is_reported_once_and_the_other_runs_are_read(harness: ControllerHarness) -> None:
    damaged, run_dir = training(harness), training(harness)
    damage_the_journal(damaged)
    messages: list[str] = []
    ingester = Ingester(harness.site, harness.store, messages.append)
    for step in (3, 4):
        FakeAgent(run_dir).step(step)
        FakeAgent(damaged).step(step)
        ingester.ingest()
        rows = run_sql(harness.store, "SELECT run_id, max(step) FROM metrics GROUP BY run_id ORDER BY run_id").rows
        assert rows == sorted([[run_dir.run_id, step], [damaged.run_id, step]])
    (complaint,) = messages
    assert f"{damaged.control}, line 2 cannot be read" in complaint


def test_a_folder_of_runs_that_cannot_be_listed_does_not_end_the_daemon(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlisted(runs: Path) -> list[RunDir]:
        raise OSError(errno.ESTALE, "Stale file handle", str(runs))

    run_dir = training(harness)
    monkeypatch.setattr("rlhf_core.control.ingester.run_dirs", unlisted)
    messages: list[str] = []
    ingester = Ingester(harness.site, harness.store, messages.append)
    for step in (3, 4):
        FakeAgent(run_dir).step(step)
        assert ingester.ingest() == 1
    assert messages == [f"{harness.site.runs_dir}: cannot be listed: Stale file handle"]


# ---------------------------------------------------------------------------------------------------------------------
# Retention


def with_retention(harness: ControllerHarness, days: int, limit_s: float = math.inf) -> Reconciler:
    site = dataclasses.replace(harness.site, retention=RetentionSite(checkpoints_days=days))
    now = utc_now() + timedelta(days=8)
    return Reconciler(site, harness.store, flow_runs=None, retention_s=limit_s, clock=harness.clock, now=lambda: now)


@pytest.mark.usefixtures("reconciler")
def test_old_checkpoints_are_removed_and_the_history_remembers_them(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    harness.scheduler.end_all()
    assert with_retention(harness, 0).poll(retention=True) == []
    reconciler = with_retention(harness, 7)
    assert [one.step for one in reconciler.poll(retention=True)] == [4, 8]
    assert [one.step for one in run_dir.checkpoints()] == [4, 8, 10], "looking removes nothing"
    reconciler.carry_out(reconciler.poll(retention=True))
    assert [one.step for one in run_dir.checkpoints()] == [10]
    rows = run_sql(harness.store, "SELECT step, removed_at IS NOT NULL FROM checkpoints ORDER BY step").rows
    assert [list(map(int, row)) for row in rows] == [[4, 1], [8, 1], [10, 0]]
    assert reconciler.poll(retention=True) == []


@pytest.mark.usefixtures("reconciler")
def test_the_best_checkpoint_of_a_run_that_failed_before_its_evaluation_is_kept(harness: ControllerHarness) -> None:
    """Its step is written only in the newest checkpoint, and the run may be resumed to evaluate and promote it."""
    run_dir = failed(harness)
    newest = run_dir.checkpoints()[-1]
    manifest = newest.manifest()
    assert manifest is not None
    best = BestCheckpoint(step=4, metric="eval/greedy", value=0.8)
    write_model(newest.complete, manifest.model_copy(update={"best": best}))
    assert [one.step for one in with_retention(harness, 7).poll(retention=True)] == [8]


@pytest.mark.usefixtures("reconciler")
def test_a_run_resumed_before_its_turn_keeps_its_checkpoints(harness: ControllerHarness) -> None:
    run_dir = failed(harness)
    reconciler = with_retention(harness, 7)
    actions = reconciler.poll(retention=True)
    assert [one.step for one in actions] == [4, 8]
    with closing(Journal(run_dir, 2)) as journal:
        journal.move_run(RunState.PREFLIGHT, "resumed")
    reconciler.carry_out(actions)
    assert [one.step for one in run_dir.checkpoints()] == [4, 8, 10]


@pytest.mark.usefixtures("reconciler")
def test_removals_are_interrupted_for_the_next_round(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here each takes two thirds of the time between rounds."""
    runs = [failed(harness), failed(harness)]
    now_s, rounds = [0.0], list[bool]()
    interval_s = 0.06
    old = cleanup.removed

    def slow(run_dir: RunDir, folder: Path) -> tuple[bool, str]:
        now_s[0] += interval_s * 2 / 3
        return old(run_dir, folder)

    monkeypatch.setattr("rlhf_core.control.reconcile.actions.removed", slow)
    monkeypatch.setattr(loop, "time", Mock(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(loop, "is_held", lambda lease: True)
    monkeypatch.setattr(loop, "Reconciler", lambda *_, **__: with_retention(harness, 7))
    stop = threading.Event()

    def carry_out(reconciler: Reconciler, may: Callable[[], bool], retention: bool) -> Sequence[ActionResult]:
        rounds.append(retention)
        results = loop.plain_round(reconciler, may, retention)
        if len(rounds) == 5:
            stop.set()
        return results

    prefect = harness.site.prefect.model_copy(update={"reconcile_s": interval_s})
    site = dataclasses.replace(harness.site, prefect=prefect)
    loop._Rounds(site, None, carry_out, ()).run(harness.store, Mock(), stop, threading.Event())
    assert rounds == [False, True, False, True, False]
    assert [[one.step for one in run_dir.checkpoints()] for run_dir in runs] == [[10], [10]]


@pytest.mark.usefixtures("reconciler")
def test_a_run_with_nothing_left_to_remove_is_not_read_again(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, retention read the files of all runs that ever ended, once an hour."""
    run_dir = completed(harness)
    harness.scheduler.end_all()
    read: list[str] = []
    old = cleanup._old_steps

    def counted(run: RunDir, *rest: Any) -> list[int]:
        read.append(run.run_id)
        return old(run, *rest)

    monkeypatch.setattr(cleanup, "_old_steps", counted)
    reconciler = with_retention(harness, 6)
    reconciler.carry_out(reconciler.poll(retention=True))
    for expected in (2, 2):
        assert reconciler.poll(retention=True) == []
        assert len(read) == expected
    assert with_retention(harness, 6).poll(retention=True) == []
    assert len(read) == 3, "the control: another process has to look for itself"
    assert [one.step for one in run_dir.checkpoints()] == [10]


@pytest.mark.usefixtures("reconciler")
def test_a_long_search_for_checkpoints_continues_in_the_next_round(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the first round after each start of the daemon read all runs that ever ended; repairs had to wait."""
    found = sorted(failed(harness).run_id for _ in range(5))
    old = cleanup._old_steps

    def slow(run: RunDir, *rest: Any) -> list[int]:
        harness.clock.now += 2 / 3
        return old(run, *rest)

    monkeypatch.setattr(cleanup, "_old_steps", slow)
    reconciler = with_retention(harness, 7, limit_s=1.0)
    for expected in (found[:2], found[2:4], found[4:], found[:2]):
        assert list(dict.fromkeys(one.run_id for one in reconciler.poll(retention=True))) == expected
        assert reconciler.retention.is_complete is (expected == found[4:])


@pytest.mark.usefixtures("reconciler")
def test_removals_that_a_round_does_not_reach_are_the_first_of_the_next(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the next round began where the search had stopped, and left the others for an hour."""
    runs = sorted((failed(harness) for _ in range(5)), key=lambda run_dir: run_dir.run_id)
    old = cleanup._old_steps

    def slow(run: RunDir, *rest: Any) -> list[int]:
        harness.clock.now += 2 / 3
        return old(run, *rest)

    monkeypatch.setattr(cleanup, "_old_steps", slow)
    reconciler = with_retention(harness, 7, limit_s=1.0)  # two runs, which have four old checkpoints
    num_left = []
    for _ in range(4):
        permissions = iter([True, True, True])
        reconciler.carry_out(reconciler.poll(retention=True), partial(next, permissions, False))
        num_left.append(sum(len(run_dir.checkpoints()) - 1 for run_dir in runs))
        assert reconciler.retention.is_complete is (num_left[-1] == 0)
    assert num_left == [7, 4, 1, 0]


@pytest.mark.usefixtures("reconciler")
def test_checkpoints_of_another_user_are_left_alone(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed(harness)
    harness.scheduler.end_all()
    reconciler = with_retention(harness, 7)
    with monkeypatch.context() as foreign:
        foreign.setattr(cleanup, "foreign_owner", lambda root: "ben")
        assert reconciler.poll(retention=True) == []
    assert len(reconciler.poll(retention=True)) == 2


@pytest.mark.usefixtures("reconciler")
def test_set_aside_checkpoints_are_removed_with_the_others(harness: ControllerHarness, tmp_path: Path) -> None:
    run_dir = completed(harness)
    harness.scheduler.end_all()
    run_dir.put_damaged_aside("step-000008", 1, 2)
    run_dir.put_aside_newer_than("step-000004", 1)
    (tmp_path / "elsewhere").mkdir()
    run_dir.damaged(1, 3).symlink_to(tmp_path / "elsewhere")
    reconciler = with_retention(harness, 9)
    assert [one.folder for one in reconciler.poll(retention=True) if one.folder] == [], "8 days old"
    reconciler = with_retention(harness, 7)
    found = [one for one in reconciler.poll(retention=True) if one.folder]
    assert [(one.kind, one.folder) for one in found] == [
        (ActionKind.REMOVE_PUT_ASIDE, "aside-1"),
        (ActionKind.REMOVE_PUT_ASIDE, "damaged-1.2"),
    ]
    reconciler.carry_out(found)
    assert run_dir.put_aside_folders() == [run_dir.damaged(1, 3)], "a link is never followed"


@pytest.mark.usefixtures("reconciler")
@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_leftovers_of_an_ended_run_are_removed_with_the_others(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch, has_checkpoints: bool
) -> None:
    run_dir = failed(harness, steps=(4, 8, 10) if has_checkpoints else ())
    leftovers = [".aside-1.ab.gone", ".step-000004.ab.gone", ".step-000012.partial"]
    for name in leftovers:
        (run_dir.checkpoints_dir / name / "model").mkdir(parents=True)
    reconciler = with_retention(harness, 7)
    found = [one for one in reconciler.poll(retention=True) if one.folder]
    assert [(one.kind, one.folder) for one in found] == [(ActionKind.REMOVE_PUT_ASIDE, name) for name in leftovers]
    with monkeypatch.context() as refusing:
        refusing.setattr("shutil.rmtree", lambda *_, **__: None)
        assert [one.done for one in reconciler.carry_out(found[:1])] == [False]
    assert run_dir.leftovers()[0].name == leftovers[0]
    os.utime(run_dir.leftovers()[0])  # as the removal of some of its files does
    assert [one.folder for one in reconciler.poll(retention=True) if one.folder] == leftovers
    assert all(one.done for one in reconciler.carry_out(found))
    assert run_dir.leftovers() == []


@pytest.mark.usefixtures("reconciler")
def test_a_link_is_never_followed(harness: ControllerHarness, tmp_path: Path) -> None:
    run_dir = completed(harness)
    harness.scheduler.end_all()
    elsewhere = tmp_path / "elsewhere"
    run_dir.checkpoint(4).root.rename(elsewhere)
    run_dir.checkpoint(4).root.symlink_to(elsewhere)
    (run_dir.checkpoint(8).root / "model").symlink_to(elsewhere)
    reconciler = with_retention(harness, 7)
    reconciler.carry_out(reconciler.poll(retention=True))
    assert not run_dir.checkpoint(8).root.exists()
    assert run_dir.checkpoint(4).root.is_symlink()
    assert (elsewhere / "COMPLETE").is_file()


@pytest.mark.usefixtures("reconciler")
@pytest.mark.parametrize("reads", ["model", "tokenizer", "reward", "reference", "link", "resumable"])
def test_what_another_run_reads_is_kept(harness: ControllerHarness, tmp_path: Path, reads: str) -> None:
    run_dir = failed(harness)
    folder = run_dir.checkpoint(4).model
    if reads == "link":
        (tmp_path / "link").symlink_to(run_dir.root.parent)
        folder = tmp_path / "link" / folder.relative_to(run_dir.root.parent)
    own = {"path": str(tmp_path / "model"), "config": {}, "tokenizer": ""}
    sections: dict[str, dict[str, Any]] = {
        "tokenizer": {"model": {**own, "tokenizer": str(folder)}},
        "reward": {"reward": {"models": {"rm": {"path": str(folder)}}}},
        "reference": {"grpo": {"measure_kl": True}},
    }
    spec = make_spec(**sections.get(reads, {"model": {**own, "path": str(folder)}}))
    if reads == "reference":
        spec = with_changes(spec, {"loops.main.reference": str(folder)})
    if reads == "resumable":
        failed(harness, (), spec)
    else:
        harness.run(spec)
    Ingester(harness.site, harness.store).ingest()
    found = [one for one in with_retention(harness, 7).poll(retention=True) if one.kind is ActionKind.REMOVE_CHECKPOINT]
    assert [one.step for one in found if one.run_id == run_dir.run_id] == [8]


# ---------------------------------------------------------------------------------------------------------------------
# By hand, and the daemon


@pytest.mark.usefixtures("reconciler")
def test_reconciling_by_hand_needs_an_idle_daemon(harness: ControllerHarness, started: list[str]) -> None:
    run_dir = training(harness)
    assert kinds(list(poll_once(harness.site, harness.store, None, print))) == [ActionKind.ADOPT]
    assert started == []
    token = harness.store.acquire_lease(lease_name(harness.site.runs_dir), "daemon@elsewhere:1:1.00", 60)
    with pytest.raises(LeaseLost, match=r"daemon of this site \(daemon on elsewhere, .* reconciles every"):
        reconcile_once(harness.site, harness.store, None, print)
    assert started == []
    harness.store.release_lease(lease_name(harness.site.runs_dir), "daemon@elsewhere:1:1.00", token)
    reconcile_once(harness.site, harness.store, None, print)
    assert started == [run_dir.run_id]
    reconcile_once(harness.site, harness.store, None, print)  # the lease was given back


def wait_for(condition: threading.Event) -> None:
    assert condition.wait(60), "it did not happen within a minute"


@pytest.mark.usefixtures("reconciler")
def test_the_error_of_a_round_is_raised_again_for_later_callers() -> None:
    """The flow run of a round gets the error first.

    The daemon must see it too, instead of counting the round as done.
    """
    begun: list[bool] = []

    def work() -> list[ActionResult]:
        begun.append(True)
        raise DatabaseUnavailable("it is away")

    turn = Turn(work)
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable):
            turn()
    assert begun == [True]


def test_of_two_daemons_one_acts_until_it_goes(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    acting, acted = [], threading.Condition()
    stops = {name: threading.Event() for name in ("first", "second")}
    monkeypatch.setattr(loop, "RETRY_INTERVAL_S", 0.05)
    owners = {"first": "a@elsewhere:1:1.00", "second": "b@elsewhere:2:1.00"}
    monkeypatch.setattr(loop.Owner, "this_process", lambda: owners[threading.current_thread().name])

    def act(site: object, store: object, lease: loop.HeldLease, stop: threading.Event, rounds: object) -> None:
        with acted:
            acting.append(next(name for name, one in stops.items() if one is stop))
            acted.notify_all()
        stop.wait()
        lease.release()

    monkeypatch.setattr(loop, "_act", act)
    waits = threading.Event()

    def logged(text: str, *values: object) -> None:
        if "waiting for its lease" in text % values:
            waits.set()

    monkeypatch.setattr(loop.log, "info", logged)
    threads = []
    for name, stop in stops.items():
        threads.append(threading.Thread(target=loop.run, args=(harness.site, stop, None), name=name, daemon=True))
        threads[-1].start()
        with acted:
            assert acted.wait_for(lambda: acting, timeout=60)
    assert waits.wait(60), "the second one has asked for the lease"
    assert acting == ["first"]
    stops["first"].set()
    with acted:
        assert acted.wait_for(lambda: len(acting) == 2, timeout=60)
    assert acting == ["first", "second"]
    stops["second"].set()
    for thread in threads:
        thread.join(60)


@pytest.mark.usefixtures("reconciler")
def test_the_daemon_reads_adopts_and_outlives_damage(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch, started: list[str]
) -> None:
    orphan, damaged, unreadable = training(harness), training(harness), training(harness)
    damaged.spec.write_text("{")
    damage_the_journal(unreadable)
    fresh = harness.run()  # which the history does not know
    harness.scheduler.jobs.clear()
    stop, done, read = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(Ingester, "ingest", _then(Ingester.ingest, read))
    first_round = _then(loop.plain_round, done)

    def carry_out(*arguments: object) -> object:
        if done.is_set():
            stop.wait(60)  # no controller takes its run here: a second round would start another
        return first_round(*arguments)  # type: ignore[operator]

    thread = threading.Thread(target=loop.run, args=(harness.site, stop, None, carry_out), daemon=True)
    thread.start()
    wait_for(done)
    wait_for(read)
    stop.set()
    thread.join(60)
    assert started == [orphan.run_id]
    assert fresh.run_id in harness.store.run_ids()
    # The daemon released its lease: no other has to wait for it.
    harness.store.acquire_lease(lease_name(harness.site.runs_dir), "next@elsewhere:1:1.00", 60)


def _then(work: object, done: threading.Event) -> object:
    def both(*arguments: object, **named: object) -> object:
        try:
            return work(*arguments, **named)  # type: ignore[operator]
        finally:
            done.set()

    return both


def test_the_ingester_skips_unchanged_runs(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = training(harness)
    ingester = Ingester(harness.site, harness.store)
    ingester.ingest()
    assert ingester.ingest() == 0
    FakeAgent(run_dir).step(3)
    assert ingester.ingest() == 1
    assert run_sql(harness.store, "SELECT max(step) FROM metrics").rows == [[3]]
    assert ingester.ingest() == 0


def test_rows_that_a_restored_backup_lacks_are_read_again(harness: ControllerHarness) -> None:
    """Before, a daemon that stayed up never read them again, because their files had not changed."""
    ended, run_dir = failed(harness), training(harness)
    ingester = Ingester(harness.site, harness.store)
    ingester.ingest()
    before = dump(harness.store)
    assert ingester.ingest() == 0
    harness.store.clear()
    assert ingester.ingest() == 2
    assert sorted(harness.store.run_ids()) == sorted([ended.run_id, run_dir.run_id])
    assert dump(harness.store) == before
    assert ingester.ingest() == 0


def test_rows_that_a_restored_backup_has_in_an_older_state_are_read_again(harness: ControllerHarness) -> None:
    run_dir = failed(harness)
    ingester = Ingester(harness.site, harness.store)
    ingester.ingest()
    ingester.ingest()
    harness.store.forget(run_dir.run_id)
    assert ingester.ingest() == 1
    assert run_sql(harness.store, "SELECT state FROM runs").rows == [["failed"]]
