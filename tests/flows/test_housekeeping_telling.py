"""What Prefect missed of a run is told by the keeper: late, whole, and once."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from control_fakes import FakeAgent
from desk import Desk
from prefect.client.orchestration import get_client
from prefect.states import Running
from real_server import RealServer
from zombies import wait_for

from flows.keeping.reconciler import Reconciler
from flows.run import rlhf_run
from flows.stages import drive
from flows.view.events import FlowRun, happenings, tell, unknown_to_the_server
from flows.view.story import read_story
from rlhf_core.diagnosis.reconcile import Action, ActionKind
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.journal import ControllerStarted

STORY = [f"rlhf.run.{state}" for state in ("preflight", "queued", "evaluating", "completed")]


@pytest.fixture(autouse=True)
def _server(real_prefect: RealServer, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("flows.keeping.reconciler.get_scheduler", lambda name: desk.scheduler)
    with real_prefect.in_use():
        yield


def completed(desk: Desk, *with_prefect: bool) -> RunDir:
    """A run whose controllers could not tell the server anything; each was a flow run, or was none."""
    run_dir = desk.run()
    desk.scheduler.on_submit = lambda request: FakeAgent(run_dir).whole_run()
    session = desk.controller(run_dir)
    for as_flow_run in with_prefect:
        flow_run_id = flow_run(run_dir.run_id) if as_flow_run else ""
        session.journal.append(ControllerStarted(controller="somebody@elsewhere:1:1.00", flow_run_id=flow_run_id))
    drive(session)
    desk._stack.close()
    desk.scheduler.end_all()
    return run_dir


def flow_run(name: str) -> str:
    """One that the server knows."""
    with get_client(sync_client=True) as client:
        return str(client.create_flow_run(rlhf_run, name=name, state=Running()).id)


def later(desk: Desk) -> Reconciler:
    return Reconciler(desk.site, desk.store, has_prefect=True, now=lambda: utc_now() + timedelta(seconds=90))


def of_telling(actions: list[Action]) -> list[Action]:
    return [one for one in actions if one.kind is ActionKind.TELL]


def is_known(run_dir: RunDir) -> bool:
    """Whether the server shows everything that happened."""
    return not unknown_to_the_server(happenings(read_story(run_dir), run_dir.read_spec(), FlowRun("", "")))


def test_the_keeper_tells_what_nobody_has_told_and_tells_it_once(desk: Desk) -> None:
    run_dir = completed(desk, True)
    keeper = later(desk)
    (deed,) = keeper.carry_out(of_telling(keeper.look()))
    assert deed.done
    assert deed.said == f"told now: {', '.join(STORY)}"
    assert of_telling(keeper.look()) == [], "also before the server shows it: an automation would act on each"
    wait_for(lambda: is_known(run_dir), "the server has it all")
    assert of_telling(later(desk).look()) == [], "another keeper finds nothing to tell"


def test_the_end_under_a_controller_without_prefect_is_told_too(desk: Desk) -> None:
    """It took over while the server was away, or `rlhf cancel` ended a run that nobody drove."""
    completed(desk, True, False)
    keeper = later(desk)
    assert len(of_telling(keeper.look())) == 1


def test_a_run_that_was_never_a_flow_run_is_not_told_of(desk: Desk) -> None:
    completed(desk, False)
    assert of_telling(later(desk).look()) == []


def test_what_was_told_in_time_is_not_told_again(desk: Desk) -> None:
    run_dir = completed(desk, True)
    tell(happenings(read_story(run_dir), run_dir.read_spec(), FlowRun("", "")), run_dir.run_id, FlowRun("", ""))
    wait_for(lambda: is_known(run_dir), "the server has it all")
    assert of_telling(later(desk).look()) == []
