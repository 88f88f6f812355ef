"""The request for approval in Prefect: a real server, its form in a real browser, and answers from elsewhere."""

import contextvars
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from control_fakes import make_spec
from harness import ControllerHarness
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.states import Running
from process_tools import ASKING_INTERVAL_S, until
from signing_in import page_of
from sites import Site
from test_promotion import answers, completes, standing, states

from flows import gate
from flows.limits import LIMIT
from flows.run import run_in_prefect
from rlhf_core.control.controller import Controller
from rlhf_core.launch.journal import read_record
from rlhf_core.launch.lease import TTL_S
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import PromotionState, RunState
from rlhf_core.text.formatting import THROUGH_PREFECT


@pytest.fixture(autouse=True)
def _quick(real_prefect: Site, blank_curves: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gate, "POLL_INTERVAL_S", 0.2)
    monkeypatch.setattr(gate, "RETRY_INTERVAL_S", 0.5)
    with real_prefect.in_use():
        yield


def flow_run_of(run_dir: RunDir) -> FlowRun:
    with get_client(sync_client=True) as client:
        (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run_dir.run_id])))
        return found


def paused(run_dir: RunDir) -> FlowRun | None:
    found = flow_run_of(run_dir)
    return found if found.state is not None and found.state.is_paused() else None


def waiting_controller(harness: ControllerHarness, run_dir: RunDir) -> Controller:
    """A controller with real time, because it waits for an answer."""
    controller = harness.controller(run_dir)
    controller.clock, controller.sleep, controller.poll_s = time.monotonic, time.sleep, 0.1
    return controller


@contextmanager
def waiting_run(harness: ControllerHarness, **promote: Any) -> Iterator[RunDir]:
    """A run whose flow run is paused; at the end of the block its controller must have finished by itself."""
    run_dir = harness.run(make_spec(promote={"when": "approved", **promote}))
    completes(harness, run_dir)
    harness.scheduler.on_status = lambda: harness.scheduler.end_all() if read_record(run_dir).ended else None
    controller = waiting_controller(harness, run_dir)
    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(run_in_prefect, controller))
    thread.start()
    try:
        until(lambda: thread.is_alive() and _seen(run_dir) and paused(run_dir), interval_s=ASKING_INTERVAL_S)
        yield run_dir
        thread.join(timeout=60)
        assert not thread.is_alive()
    finally:
        answers(run_dir, "refused")  # releases the thread if the test has failed
        thread.join(timeout=60)


def _seen(run_dir: RunDir) -> bool:
    return read_record(run_dir).promotion is not None


def message_of(run_dir: RunDir) -> tuple[str, str]:
    state = flow_run_of(run_dir).state
    assert state is not None
    return state.name or "", state.message or ""


def _is_in_view(field: Any) -> bool:
    """True if a field is visible in a window with a height of 900 pixels."""
    field.page.set_viewport_size({"width": 1440, "height": 900})
    field.wait_for()
    box = field.bounding_box()
    return bool(box["y"] > 0 and box["y"] + box["height"] < 900)


def test_a_user_approves_in_the_browser(harness: ControllerHarness, real_prefect: Site) -> None:
    with waiting_run(harness) as run_dir, page_of(real_prefect, f"/runs/flow-run/{flow_run_of(run_dir).id}") as page:
        page.get_by_role("button", name="Resume").first.click()
        form = page.locator(".p-modal__card")
        form.get_by_text("+0.700", exact=True).wait_for()
        assert _is_in_view(form.locator("textarea").nth(1)), "the fields are seen without scrolling"
        assert "exact_match, greedy" in form.inner_text(), "the evaluation stands beside the button"
        form.get_by_role("switch").click()
        form.locator("textarea").nth(0).fill("Ada")
        form.locator("textarea").nth(1).fill("good enough")
        form.get_by_role("button", name="Submit").click()
        until(lambda: "promoted" in states(run_dir))
    assert states(run_dir) == ["waiting", "approved", "promoted"]
    assert (standing(run_dir).by, standing(run_dir).reason) == (f"Ada ({THROUGH_PREFECT})", "good enough")
    name, message = message_of(run_dir)
    assert name == "Completed"
    assert message.endswith("by Ada (through Prefect, unverified): good enough")


def test_a_user_refuses_in_the_newer_ui(harness: ControllerHarness, real_prefect: Site) -> None:
    """A switch that is left unchanged means a refusal."""
    with waiting_run(harness) as run_dir, page_of(real_prefect, f"/v2/runs/flow-run/{flow_run_of(run_dir).id}") as page:
        page.locator("button[aria-haspopup=menu]").first.click()
        page.get_by_role("menuitem", name="Resume").click()
        form = page.get_by_role("dialog")
        assert _is_in_view(form.locator("textarea").nth(1)), "the fields are seen without scrolling"
        form.locator("textarea").nth(0).fill("Bea")
        form.get_by_role("button", name="Resume").click()
        until(lambda: "refused" in states(run_dir))
    assert standing(run_dir).by == f"Bea ({THROUGH_PREFECT})"
    name, message = message_of(run_dir)
    assert name == "Completed"
    assert "was refused by Bea" in message
    assert read_record(run_dir).state is RunState.COMPLETED


def test_an_answer_from_a_terminal_resumes_the_flow_run_which_has_freed_its_slot(harness: ControllerHarness) -> None:
    limit = GlobalConcurrencyLimitCreate(name=LIMIT, limit=1)
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(limit)
        try:
            with waiting_run(harness) as run_dir:
                assert client.read_global_concurrency_limit_by_name(LIMIT).active_slots == 0, "others need not wait"
                answers(run_dir, "approved", by="cy")
        finally:
            client.delete_global_concurrency_limit_by_name(LIMIT)
    assert standing(run_dir).state is PromotionState.PROMOTED
    assert message_of(run_dir)[0] == "Completed"


def test_a_flow_run_that_is_resumed_without_the_form_asks_again(harness: ControllerHarness) -> None:
    with waiting_run(harness) as run_dir:
        first = flow_run_of(run_dir)
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(first.id, Running(), force=True)
        until(
            lambda: (again := paused(run_dir)) is not None and again.state_id != first.state_id,
            interval_s=ASKING_INTERVAL_S,
        )
        assert states(run_dir) == ["waiting"]
        answers(run_dir, "refused")


def test_an_expired_request_ends_the_pause(harness: ControllerHarness) -> None:
    with waiting_run(harness, timeout_h=6 / 3600) as run_dir:
        pass
    assert states(run_dir) == ["waiting", "expired"]
    name, message = message_of(run_dir)
    assert (name, message.endswith("nobody answered in time")) == ("Completed", True)


def test_an_answer_to_a_dead_controllers_form_counts(harness: ControllerHarness) -> None:
    """The flow run stays paused when the controller is killed; the next controller reads the answer there."""
    with waiting_run(harness) as run_dir, get_client(sync_client=True) as client:
        # Like a second controller, in a flow run of its own.
        dead = flow_run_of(run_dir)
        form = {"approve": True, "by": "dee", "reason": "late"}
        client.resume_flow_run(dead.id, run_input=form)
        gate._take_over(client, run_dir, UUID(int=0))
    assert standing(run_dir).by == f"dee ({THROUGH_PREFECT})"


def test_a_form_without_a_reader_is_removed(harness: ControllerHarness) -> None:
    with waiting_run(harness) as run_dir:
        with get_client(sync_client=True) as client:
            gate._take_over(client, run_dir, UUID(int=0))
        assert message_of(run_dir)[0] == "Crashed", "it was not cancelled, and it has not completed"
        answers(run_dir, "refused")


def test_an_unresponsive_server_does_not_hold_the_lease(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect hangs for as long as the request is open; the controller sees the answer nevertheless."""
    never, is_pending = threading.Event(), threading.Event()

    def hangs() -> bool:
        is_pending.set()
        never.wait()
        return False

    run_dir = harness.run(make_spec(promote={"when": "approved"}))
    completes(harness, run_dir)
    harness.scheduler.on_status = lambda: harness.scheduler.end_all() if read_record(run_dir).ended else None
    controller = waiting_controller(harness, run_dir)
    kept = []
    monkeypatch.setattr(controller.lease, "keep", lambda: kept.append(1))
    monkeypatch.setattr(gate, "server_answers", hangs)
    monkeypatch.setattr(gate, "SHUTDOWN_TIMEOUT_S", 0.2)
    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(run_in_prefect, controller))
    thread.start()
    assert is_pending.wait(TTL_S)
    before = len(kept)
    until(lambda: len(kept) > before + 3)
    answers(run_dir, "refused")
    thread.join(timeout=TTL_S)
    never.set()
    assert not thread.is_alive()
    assert states(run_dir) == ["waiting", "refused"]
