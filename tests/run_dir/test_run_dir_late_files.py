"""Files that another node creates after a failed lookup, on a file system that caches the failure."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control_fakes import NODE, Clock, FakeAgent, FakeScheduler, make_run, make_spec
from nfs_client import NfsClient, nfs

from rlhf_core.config.site import Site
from rlhf_core.control import node_probe
from rlhf_core.control.attempts.jobs import give_order, order_to_end
from rlhf_core.control.node_probe import PROBES, probe_nodes
from rlhf_core.files import reading
from rlhf_core.files.appended import FilePosition, read_on
from rlhf_core.files.lookups import is_there, paths_in
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.run_dir.run import RunDir, run_dirs
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.watchdog import evidence
from rlhf_core.watchdog.gone_run import GONE_S, Presence
from rlhf_core.watchdog.watcher import OUTCOME_TIMEOUT_S, Watcher
from rlhf_core.worker.agent.leader import Leader
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.nodes import facts as node_facts

__all__ = ["nfs"]


@pytest.fixture
def run_dir(tmp_path: Path, nfs: NfsClient) -> RunDir:
    with nfs.elsewhere():
        run_dir = make_run(tmp_path / "runs")
        placement = Placement(attempt=1, num_nodes=1, phases=())
        write_model(run_dir.attempt(1).placement, placement)
        return run_dir


def test_the_stand_in_remembers_what_was_missing(tmp_path: Path, nfs: NfsClient) -> None:
    """Control of this file: without a second lookup the file stays invisible, and opening its folder reveals it."""
    path = tmp_path / "new" / "outcome.json"
    assert not path.exists()
    with nfs.elsewhere():
        path.parent.mkdir()
        path.write_text("{}")
    assert not path.exists()
    assert not path.parent.is_dir()
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    assert [one.name for one in tmp_path.iterdir()] == ["new"]
    assert path.read_bytes() == b"{}"


def watcher(run_dir: RunDir, scheduler: FakeScheduler, clock: Clock) -> Watcher:
    submission = Submission(attempt=1, scheduler="local", job_id="101", command=())
    placement = read_model(run_dir.attempt(1).placement, Placement)
    assert placement is not None
    return Watcher(run_dir, placement, submission, scheduler, None, clock)


def test_an_attempt_whose_outcome_appears_in_time_is_not_lost(run_dir: RunDir, nfs: NfsClient) -> None:
    """Its job is over, and a node writes the outcome just before the watcher stops waiting for it."""
    clock = Clock()
    one = watcher(run_dir, FakeScheduler(), clock)  # it knows no job: this one has ended
    assert one.poll().verdict.state is AttemptState.RUNNING
    with nfs.elsewhere():
        FakeAgent(run_dir).end(AttemptState.COMPLETED)
    clock.now += OUTCOME_TIMEOUT_S + 1
    assert one.poll().verdict.state is AttemptState.COMPLETED


def test_an_attempt_without_an_outcome_is_lost_at_the_same_time_as_before(run_dir: RunDir) -> None:
    """Control: a second lookup finds nothing, and does not prolong the wait."""
    clock = Clock()
    one = watcher(run_dir, FakeScheduler(), clock)
    one.poll()
    clock.now += OUTCOME_TIMEOUT_S - 0.1
    assert one.poll().verdict.state is AttemptState.RUNNING
    clock.now += 0.2
    assert one.poll().verdict.state is AttemptState.LOST


def test_the_probe_of_the_nodes_sees_their_report(
    tmp_path: Path, nfs: NfsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_probe, "OUTCOME_S", 2.0)
    site = Site(home=tmp_path, runs_dir=tmp_path / "runs", database_url="", scheduler="local", compute_python="python")
    scheduler = FakeScheduler()
    num_polls = 0

    def on_status() -> None:
        nonlocal num_polls
        num_polls += 1
        if num_polls != 2:
            return
        scheduler.end_all()
        with nfs.elsewhere():
            (folder,) = (site.runs_dir / PROBES).iterdir()
            agent = FakeAgent(RunDir(folder))
            agent.probe(unfit=NODE)
            agent.end(AttemptState.FAILED)

    scheduler.on_status = on_status
    (found,) = probe_nodes(make_spec(), site, scheduler, lambda text: None)
    assert found.node == NODE


def progress(run_dir: RunDir) -> Callable[[], Any]:
    known = evidence.AttemptReader(run_dir.attempt(1))

    def role() -> Any:
        known.update()
        return known.progress.role

    return role


def say_confused(run_dir: RunDir) -> None:
    write_model(run_dir.attempt(1).node_facts("n2"), node_facts.confused("n2", "two nodes have one name"))


def plan_next(run_dir: RunDir) -> None:
    write_model(run_dir.attempt(2).placement, Placement(attempt=2, num_nodes=1, phases=()))


def order(run_dir: RunDir) -> None:
    give_order(run_dir, 1, order_to_end("the test asked", save=False))


def request(run_dir: RunDir) -> None:
    write_model(run_dir.cancel_request, AgentCommand(kind="cancel", reason="the test asked", time=utc_now()))


def leader_of(run_dir: RunDir) -> Leader:
    return Leader(run_dir, 1, EventLog(NODE, run_dir.attempt(1).restart(0)))


APPEARING: dict[str, tuple[Callable[[RunDir], Callable[[], Any]], Callable[[RunDir], object]]] = {
    "progress": (progress, lambda run_dir: FakeAgent(run_dir).role(Role.TRAINER)),
    "metrics": (
        lambda run_dir: lambda: read_on(run_dir.attempt(1).restart(0).metrics, FilePosition())[0],
        lambda run_dir: FakeAgent(run_dir).step(1),
    ),
    "incidents": (
        lambda run_dir: lambda: evidence.incidents(run_dir.attempt(1)),
        lambda run_dir: FakeAgent(run_dir).incident(FailureKind.HANG),
    ),
    "checkpoints": (lambda run_dir: run_dir.newest_checkpoint, lambda run_dir: FakeAgent(run_dir).checkpoint(5)),
    "evaluations": (
        lambda run_dir: run_dir.evaluations,
        lambda run_dir: FakeAgent(run_dir).evaluation("after", "greedy", 0.5),
    ),
    "a newer attempt": (lambda run_dir: lambda: run_dir.is_superseded(1), plan_next),
    "orders to agent 0": (lambda run_dir: leader_of(run_dir).new_commands, order),
    "a request to cancel": (lambda run_dir: lambda: read_model(run_dir.cancel_request, AgentCommand), request),
    "nodes that cannot join": (lambda run_dir: lambda: node_facts.all_confused(run_dir.attempt(1)), say_confused),
}
"""For each thing that another node creates: how it is polled for, and how it is created."""


@pytest.mark.parametrize("name", APPEARING)
def test_what_appears_on_another_node_is_seen_at_the_next_poll(run_dir: RunDir, nfs: NfsClient, name: str) -> None:
    polled, create = APPEARING[name]
    poll = polled(run_dir)
    assert not poll()
    with nfs.elsewhere():
        create(run_dir)
    assert poll()


@pytest.mark.parametrize(("errors", "is_read"), [((errno.ESTALE,), True), ((errno.EIO,), False)])
def test_a_file_replaced_by_another_node_while_it_is_read_is_read_again(
    run_dir: RunDir, errors: tuple[int, ...], is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS server has nothing left of the file that was opened; control: another error is reported."""
    left = list(errors)
    opened = reading.open_regular

    def open_stale(path: Path, **options: Any) -> Any:
        file = opened(path, **options)
        if left:
            file.close()
            raise OSError(left.pop(), "so says the server", str(path))
        return file

    monkeypatch.setattr(reading, "open_regular", open_stale)
    if is_read:
        assert read_model(run_dir.attempt(1).placement, Placement) is not None
    else:
        with pytest.raises(OSError, match="so says the server"):
            read_model(run_dir.attempt(1).placement, Placement)


def test_a_run_directory_that_comes_back_is_not_gone(tmp_path: Path, run_dir: RunDir, nfs: NfsClient) -> None:
    """The directory was moved away for a moment; control: one that stays away is missing."""
    clock = Clock()
    presence = Presence(run_dir, clock)
    with nfs.elsewhere():
        run_dir.root.rename(tmp_path / "elsewhere")
    assert "has been missing" in presence.problem()
    with nfs.elsewhere():
        (tmp_path / "elsewhere").rename(run_dir.root)
    clock.now += GONE_S + 1
    assert presence.problem() == ""


def test_a_new_run_is_listed(tmp_path: Path, nfs: NfsClient) -> None:
    assert run_dirs(tmp_path / "runs") == []
    with nfs.elsewhere():
        run_dir = make_run(tmp_path / "runs")
    assert [one.run_id for one in run_dirs(tmp_path / "runs")] == [run_dir.run_id]


def test_a_look_at_what_exists_asks_for_nothing_more(run_dir: RunDir, nfs: NfsClient) -> None:
    """A poll of existing files costs no more requests than without a second lookup; a failed one costs one more."""
    attempt = run_dir.attempt(1)
    assert read_model(attempt.placement, Placement) is not None
    assert is_there(attempt.placement)
    assert nfs.num_opened_folders == 0
    assert not is_there(attempt.outcome)
    assert nfs.num_opened_folders == 1
    assert paths_in(attempt.commands) == []
    assert nfs.num_opened_folders == 2
