"""What Prefect missed of a run is told by the keeper: late, whole, and once."""

from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

import pytest
from control_fakes import FakeAgent
from desk import Desk
from prefect import task
from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.states import Crashed, Running
from real_server import RealServer
from zombies import wait_for

from flows.flow_runs import PrefectFlowRuns
from flows.run import rlhf_run
from flows.view import artifact_key, late
from flows.view.events import FlowRun, happenings, tell, unknown_to_the_server
from flows.view.story import read_story
from rlhf_core.control.reconcile.actions import Reconciler
from rlhf_core.control.steps import drive
from rlhf_core.diagnosis.reconcile import ActionKind, ReconcileAction
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.attempts import PromotionState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import ControllerStarted, PromotionMoved

STORY = [f"rlhf.run.{state}" for state in ("preflight", "queued", "evaluating", "completed")]


@pytest.fixture(autouse=True)
def _server(real_prefect: RealServer, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rlhf_core.control.reconcile.actions.get_scheduler", lambda name: desk.scheduler)
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
    return Reconciler(
        desk.site, desk.store, flow_runs=PrefectFlowRuns(desk.site), now=lambda: utc_now() + timedelta(seconds=90)
    )


def of_telling(actions: list[ReconcileAction]) -> list[ReconcileAction]:
    return [one for one in actions if one.kind is ActionKind.TELL]


def is_known(run_dir: RunDir) -> bool:
    """Whether the server shows everything that happened."""
    return not unknown_to_the_server(happenings(read_story(run_dir), run_dir.read_spec(), FlowRun("", "")))


def test_the_keeper_tells_what_nobody_has_told_and_tells_it_once(desk: Desk) -> None:
    run_dir = completed(desk, True)
    keeper = later(desk)
    (result,) = keeper.carry_out(of_telling(keeper.poll()))
    assert result.done
    assert result.message == f"published now: {', '.join([*STORY, 'artifact result'])}"
    assert of_telling(keeper.poll()) == [], "also before the server shows it: an automation would act on each"
    wait_for(lambda: is_known(run_dir), "the server has it all")
    assert of_telling(later(desk).poll()) == [], "another keeper finds nothing to tell"


def test_the_end_under_a_controller_without_prefect_is_told_too(desk: Desk) -> None:
    """It took over while the server was away, or `rlhf cancel` ended a run that nobody drove."""
    completed(desk, True, False)
    keeper = later(desk)
    assert len(of_telling(keeper.poll())) == 1


def test_a_run_that_was_never_a_flow_run_is_not_told_of(desk: Desk) -> None:
    completed(desk, False)
    assert of_telling(later(desk).poll()) == []


def test_what_was_told_in_time_is_not_told_again(desk: Desk) -> None:
    run_dir = completed(desk, True)
    tell_events(run_dir)
    late.renew(read_story(run_dir), desk.store, FlowRun(drove(run_dir), ""))
    assert of_telling(later(desk).poll()) == []


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def tell_events(run_dir: RunDir) -> None:
    """Tell all of them; what is left then are pages."""
    tell(happenings(read_story(run_dir), run_dir.read_spec(), FlowRun("", "")), run_dir.run_id, FlowRun("", ""))
    wait_for(lambda: is_known(run_dir), "the server has it all")


def drove(run_dir: RunDir) -> str:
    """The flow run that drove the run."""
    found = [one.event for one in read_story(run_dir).lines if isinstance(one.event, ControllerStarted)]
    return next(one.flow_run_id for one in found if one.flow_run_id)


def page(run_dir: RunDir, what: str) -> Artifact | None:
    found: Artifact | None = Artifact.get(artifact_key(run_dir.run_id, what))
    return found


def put(run_dir: RunDir, what: str, kind: str, data: str | float, description: str) -> None:
    """A page as the controller had left it."""
    with get_client(sync_client=True) as client:
        key = artifact_key(run_dir.run_id, what)
        made = ArtifactCreate(key=key, type=kind, data=data, description=description, flow_run_id=UUID(drove(run_dir)))
        client.create_artifact(made)


def test_pages_that_tell_another_end_are_renewed_in_the_name_of_the_flow_run(desk: Desk) -> None:
    """The controller died while it trained; another one, without Prefect, brought the run to its end."""
    run_dir = completed(desk, True)
    tell_events(run_dir)
    put(run_dir, "result", "markdown", f"# {run_dir.run_id}: training\n", "training: attempt 1")
    put(run_dir, "progress", "progress", 40.0, "**step 4 of 10 (grpo), 40 %** · 3 min left")
    keeper = later(desk)
    (result,) = keeper.carry_out(of_telling(keeper.poll()))
    assert result.message == "published now: artifact result, artifact progress"
    result, progress = page(run_dir, "result"), page(run_dir, "progress")
    assert result is not None
    assert progress is not None
    assert str(result.data).startswith(f"# {run_dir.run_id}: completed\n")
    assert "+0.700" in str(result.data)
    assert result.description == "completed: attempt 1 completed"
    assert str(result.flow_run_id) == drove(run_dir), "on the tab Artifacts of the run's own flow run"
    assert (progress.data, str(progress.description).partition(" ")[0]) == (100.0, "**completed**")
    assert of_telling(later(desk).poll()) == [], "another keeper finds nothing to renew"


def test_a_page_from_before_the_promotion_was_decided_is_renewed(desk: Desk) -> None:
    run_dir = completed(desk, True)
    tell_events(run_dir)
    late.renew(read_story(run_dir), desk.store, FlowRun(drove(run_dir), ""))
    journal = desk.controller(run_dir).journal
    journal.append(PromotionMoved(state=PromotionState.REFUSED, by="ada", reason="not yet", checkpoint_step=10))
    desk._stack.close()
    tell_events(run_dir)
    keeper = later(desk)
    (result,) = keeper.carry_out(of_telling(keeper.poll()))
    assert result.message == "published now: artifact result"
    result = page(run_dir, "result")
    assert result is not None
    assert "**Promotion: refused**, step 10 · by ada · not yet" in str(result.data)


def test_an_incident_that_no_page_tells_of_is_told(desk: Desk) -> None:
    run_dir = completed(desk, True)
    FakeAgent(run_dir).incident(FailureKind.NODE_LOST)
    tell_events(run_dir)
    keeper = later(desk)
    (result,) = keeper.carry_out(of_telling(keeper.poll()))
    assert result.message == "published now: artifact result, artifact incidents"
    told = page(run_dir, "incidents")
    assert told is not None
    assert "## node_lost" in str(told.data)
    assert of_telling(later(desk).poll()) == []


def test_nothing_is_shown_of_a_run_that_was_never_a_flow_run(desk: Desk) -> None:
    run_dir = completed(desk, False)
    one_round = later(desk)
    one_round.carry_out(one_round.poll())
    assert page(run_dir, "result") is None


# ---------------------------------------------------------------------------------------------------------------------
# Ends that Prefect did not hear


def test_a_flow_run_called_crashed_and_its_open_task_runs_get_the_end_of_the_run(desk: Desk) -> None:
    """Its server was away when the run ended: the process could not say so, and the worker called it crashed."""
    run_dir = completed(desk, True)
    flow_run_id = UUID(drove(run_dir))
    with get_client(sync_client=True) as client:
        open_ones = {
            title: client.create_task_run(
                task(lambda: None, name=title.split()[0]), flow_run_id, dynamic_key=title, name=title, state=Running()
            ).id
            for title in ("train attempt 1", "evaluate", "restart 1 in attempt 1")
        }
        client.set_flow_run_state(flow_run_id, Crashed(), force=True)
        one = later(desk)
        of_ends = [ActionKind.END_FLOW_RUN, ActionKind.END_TASK_RUN]
        results = one.carry_out([action for action in one.poll() if action.kind in of_ends])
        assert [result.done for result in results] == [True] * 4
        assert client.read_flow_run(flow_run_id).state_name == "Completed"
        states = {title: client.read_task_run(id_).state_name for title, id_ in open_ones.items()}
    assert set(states.values()) == {"Completed"}
    assert [action for action in later(desk).poll() if action.kind in of_ends] == []
