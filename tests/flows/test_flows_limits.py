"""Prefect's concurrency limit ``rlhf-runs``: respected if it exists, and harmless if it does not."""

import contextvars
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from uuid import UUID

import pytest
from harness import ControllerHarness
from process_tools import ASKING_INTERVAL_S, until
from sites import Site

from flows import limits
from flows.limits import LIMIT, run_slot
from rlhf_core.control.controller import Controller
from rlhf_core.control.steps import drive
from rlhf_core.files.whole import write_model
from rlhf_core.launch.lease import IfHeld
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import AgentCommand


@pytest.fixture
def limit(server: Site) -> Iterator[UUID]:
    """A limit of one run."""
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

    from flows.server.clients import api_client

    with api_client() as client:
        made = client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=LIMIT, limit=1))
        yield made
        client.delete_global_concurrency_limit_by_name(LIMIT)


def a_session(harness: ControllerHarness) -> Controller:
    from rlhf_core.control.controller import opened

    return harness._stack.enter_context(
        opened(harness.run(), harness.site, harness.store, harness.notes, if_held=IfHeld.FAIL)
    )


def active_slots() -> int:
    from flows.server.clients import api_client

    with api_client() as client:
        return client.read_global_concurrency_limit_by_name(LIMIT).active_slots


@pytest.mark.usefixtures("limit")
def test_the_second_run_waits_for_the_first_and_keeps_its_lease(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RETRY_INTERVAL_S", 0.1)
    first, second = a_session(harness), a_session(harness)
    waiting, entered = threading.Event(), threading.Event()
    checks: list[int] = []
    check = second.check

    def counted() -> None:
        check()
        checks.append(1)
        if harness.notes.messages and len(checks) > 3:
            waiting.set()

    monkeypatch.setattr(second, "check", counted)

    def later() -> None:
        with run_slot(second):
            entered.set()

    with run_slot(first):
        assert active_slots() == 1
        thread = threading.Thread(target=contextvars.copy_context().run, args=(later,))  # the server in use
        thread.start()
        assert waiting.wait(60)
        assert not entered.is_set()
        assert "the limit rlhf-runs" in harness.notes.messages[0]
        kept = len(checks)
    assert entered.wait(60)
    thread.join(60)
    assert kept > 3, "the lease is kept while it waits"
    assert active_slots() == 0


@pytest.mark.usefixtures("limit")
def test_a_waiting_run_can_be_cancelled(harness: ControllerHarness) -> None:
    first, second = a_session(harness), a_session(harness)
    write_model(second.run_dir.cancel_request, AgentCommand(kind="cancel", reason="enough", time=utc_now()))
    with run_slot(first), run_slot(second):
        assert active_slots() == 1, "the steps that follow see the request at once"


@pytest.mark.usefixtures("limit")
def test_a_run_waiting_for_approval_blocks_no_other_run(harness: ControllerHarness) -> None:
    first, second = a_session(harness), a_session(harness)
    with run_slot(first) as release:
        assert active_slots() == 1
        release()
        assert active_slots() == 0
        with run_slot(second):
            assert active_slots() == 1
            release()
            assert active_slots() == 1, "it is given back once"
    assert harness.notes.messages == []


@pytest.mark.usefixtures("limit")
def test_a_run_with_a_job_waits_for_no_slot_and_takes_the_next_one(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller was killed, and another run has got the slot: the job must not be unattended until that ends."""
    monkeypatch.setattr(limits, "RETRY_INTERVAL_S", 0.1)
    harness.notes.stop = lambda: bool(harness.notes.messages)  # ends a wait
    next_controller = harness.controller(harness.killed_in_training())
    other = ExitStack()
    other.enter_context(run_slot(a_session(harness)))
    with other, run_slot(next_controller):
        assert harness.notes.messages == []
        other.close()
        until(lambda: active_slots() == 1, interval_s=ASKING_INTERVAL_S)
    assert active_slots() == 0


@pytest.mark.usefixtures("limit")
def test_a_completed_run_takes_no_slot(harness: ControllerHarness) -> None:
    run_dir = harness.good_run()
    controller = harness.controller(run_dir)
    drive(controller)
    with run_slot(controller):
        assert active_slots() == 0


@pytest.mark.usefixtures("server")
def test_without_the_limit_no_run_waits(harness: ControllerHarness) -> None:
    first, second = a_session(harness), a_session(harness)
    with run_slot(first), run_slot(second):
        assert harness.notes.messages == []


@pytest.mark.usefixtures("limit")
def test_an_unresponsive_server_delays_no_run(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(limits, "ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(limits, "_limit_is_there", never.wait)
    with run_slot(a_session(harness)):
        assert "continues without it" in harness.notes.messages[0]
    never.set()
