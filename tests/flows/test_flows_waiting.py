"""The wait for a submitted run on a real Prefect server: without a worker, and with a live one."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import sites
from control_fakes import Clock
from http_stand_in import QuietHandler, serving
from prefect import flow
from prefect.client.schemas.objects import FlowRun
from prefect.states import Scheduled

from flows.deployments.registration import register
from flows.deployments.submission import Submitted, submit
from flows.queue import queue_wait
from rlhf_core.cli.commands import deploy as deploy_commands
from rlhf_core.cli.commands.deploy import STUCK_S, _await_beginning
from rlhf_core.cli.main import execute
from rlhf_core.config.site import Site, load_site
from rlhf_core.errors import RunCancelled, RunFailed, RunNotBegun
from rlhf_core.machine.accounts import account

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def client(real_prefect: sites.Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a server with a pool and no worker."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound

    from flows.server.clients import api_client

    monkeypatch.setenv("PREFECT_API_URL", real_prefect.api)
    with real_prefect.in_use(), api_client() as found:
        with contextlib.suppress(ObjectNotFound):
            found.delete_work_pool("rlhf")  # including the workers of an earlier test
        found.create_work_pool(WorkPoolCreate(name="rlhf", type="process"))
        yield found


@pytest.fixture
def site(client: Any) -> Site:
    load_site().home.mkdir(parents=True)
    return load_site()


@pytest.fixture
def submitted(site: Site) -> Submitted:
    register("quickstart", site, limit=0)
    return submit("quickstart", site)


def send_heartbeat(client: Any) -> None:
    """Send a heartbeat of a worker."""
    beat = {"name": "worker-1", "heartbeat_interval_seconds": 30}
    client.request("POST", "/work_pools/rlhf/workers/heartbeat", json=beat)


def test_a_missing_worker_is_reported_with_advice(client: Any, submitted: Submitted) -> None:
    wait = queue_wait(submitted.flow_run_id)
    assert wait.stuck
    assert "no worker of the pool 'rlhf' is online" in wait.words
    assert "`rlhf up`" in wait.words
    send_heartbeat(client)
    wait = queue_wait(submitted.flow_run_id)
    assert not wait.stuck, "negative control: a live worker is no reason to act"
    assert "a worker is online (worker-1)" in wait.words
    later = datetime.now(UTC) + timedelta(seconds=30)
    wait = queue_wait(submitted.flow_run_id, later)
    assert (wait.stuck, "it is late: due at 20" in wait.words) == (False, True), "with the date: it may be days late"
    later = datetime.now(UTC) + timedelta(seconds=70)
    wait = queue_wait(submitted.flow_run_id, later)
    assert wait.stuck, "a worker that was killed is still online for Prefect"
    assert "the last one was heard at" in wait.words


def test_waiting_for_a_free_slot_is_no_problem(client: Any, site: Site, submitted: Submitted) -> None:
    from prefect.client.schemas.actions import WorkPoolUpdate
    from prefect.states import AwaitingConcurrencySlot, Pending, Running, Scheduled

    send_heartbeat(client)
    first = submit("quickstart", site)
    client.update_work_pool("rlhf", WorkPoolUpdate(concurrency_limit=1))
    client.set_flow_run_state(UUID(first.flow_run_id), Pending())
    client.set_flow_run_state(UUID(first.flow_run_id), Running())
    wait = queue_wait(submitted.flow_run_id)
    assert (wait.stuck, "1 of 1 places of the work pool 'rlhf' are taken" in wait.words) == (False, True), wait
    assert "its process makes the run directory" in queue_wait(first.flow_run_id).words
    client.update_work_pool("rlhf", WorkPoolUpdate(concurrency_limit=None))

    at = datetime.now(UTC) + timedelta(hours=2)
    client.set_flow_run_state(UUID(submitted.flow_run_id), Scheduled(scheduled_time=at), force=True)
    assert queue_wait(submitted.flow_run_id).words == f"it is scheduled for {at:%Y-%m-%d %H:%M:%S} UTC"

    register("quickstart", site, limit=2)
    client.set_flow_run_state(UUID(submitted.flow_run_id), AwaitingConcurrencySlot(), force=True)
    wait = queue_wait(submitted.flow_run_id)
    assert (wait.stuck, "the limit of 2 on runs of its deployment" in wait.words) == (False, True), wait


def test_a_worker_that_is_gone_may_have_taken_the_process_with_it(client: Any, submitted: Submitted) -> None:
    """Before, a script waited for its run directory forever."""
    from prefect.states import Pending, Running

    send_heartbeat(client)
    client.set_flow_run_state(UUID(submitted.flow_run_id), Pending())
    client.set_flow_run_state(UUID(submitted.flow_run_id), Running())
    assert not queue_wait(submitted.flow_run_id).stuck, "negative control"
    wait = queue_wait(submitted.flow_run_id, datetime.now(UTC) + timedelta(seconds=70))
    assert wait.stuck
    assert "a worker has taken it (Running), but no worker of the pool 'rlhf' is online now; the last" in wait.words


def test_a_paused_pool_or_queue_is_named(client: Any, submitted: Submitted) -> None:
    from prefect.client.schemas.actions import WorkPoolUpdate

    send_heartbeat(client)
    queue = client.read_work_queue_by_name("default", work_pool_name="rlhf")
    client.update_work_queue(queue.id, is_paused=True)
    wait = queue_wait(submitted.flow_run_id)
    assert (wait.stuck, "the queue 'default' of the work pool 'rlhf' is paused" in wait.words) == (True, True), wait
    client.update_work_queue(queue.id, is_paused=False)
    client.update_work_pool("rlhf", WorkPoolUpdate(is_paused=True))
    assert "the work pool 'rlhf' is paused" in queue_wait(submitted.flow_run_id).words


def test_a_missing_pool_is_reported(client: Any, submitted: Submitted) -> None:
    client.delete_work_pool("rlhf")
    wait = queue_wait(submitted.flow_run_id)
    assert (wait.stuck, "no work pool" in wait.words, "`rlhf up`" in wait.words) == (True, True, True), wait


def test_a_run_that_will_never_start_is_not_awaited(client: Any, site: Site, submitted: Submitted) -> None:
    from prefect.states import Cancelled, Failed

    client.set_flow_run_state(UUID(submitted.flow_run_id), Cancelled(message="not needed"), force=True)
    with pytest.raises(RunCancelled, match="not needed"):
        queue_wait(submitted.flow_run_id)
    other = submit("quickstart", site)
    client.set_flow_run_state(UUID(other.flow_run_id), Failed(message="no such file"), force=True)
    with pytest.raises(RunFailed, match="no such file"):
        queue_wait(other.flow_run_id)
    client.delete_flow_run(UUID(other.flow_run_id))
    with pytest.raises(RunFailed, match="deleted in Prefect"):
        queue_wait(other.flow_run_id)


def test_a_lost_server_is_reported() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        wait = queue_wait("5f0c3c1e-0000-4000-8000-000000000000")
    assert (wait.stuck, "does not answer" in wait.words) == (True, True)


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def failing_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that lives but has lost its database: it answers everything but questions about its health with 500."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path.endswith(("/health", "/version")) else 500)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"null")

        do_POST = do_GET

    from prefect.settings import PREFECT_API_URL, temporary_settings

    with serving(Handler) as port:
        url = f"http://127.0.0.1:{port}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        with temporary_settings({PREFECT_API_URL: url}):
            yield


@pytest.mark.usefixtures("failing_server")
def test_a_server_that_fails_is_named_in_one_sentence(capsys: Printed) -> None:
    wait = queue_wait("5f0c3c1e-0000-4000-8000-000000000000")
    assert wait.stuck
    assert "answers with HTTP status 500" in wait.words
    for command in ("deploy", "submit"):
        assert execute([command, "quickstart"]) == 1
        told = capsys.readouterr().err
        assert "answers with HTTP status 500. Its log says more" in " ".join(told.split())
        assert "unexpected error" not in told


def test_the_command_reports_it_within_seconds_and_exits_on_request(site: Site, capsys: Printed) -> None:
    register("quickstart", site)
    began = time.monotonic()
    assert execute(["submit", "quickstart", "--watch", "--begin-within", "3"]) == 1
    assert time.monotonic() - began < 30
    printed = capsys.readouterr()
    assert printed.err.count("no worker of the pool 'rlhf' is online") == 2, "reported once, and in the error"
    assert "The request remains" in " ".join(printed.err.split())
    assert "is requested" in printed.out


def test_a_program_does_not_wait_forever_and_a_user_decides(
    client: Any, submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval_s = 60.0  # each poll sends a few requests to the server
    monkeypatch.setattr(deploy_commands, "POLL_INTERVAL_S", interval_s)
    slept = Clock()
    monkeypatch.setattr(deploy_commands, "time", SimpleNamespace(monotonic=slept, sleep=slept.sleep))
    with pytest.raises(RunNotBegun, match="no worker"):
        _await_beginning(lambda: False, submitted, None)
    assert STUCK_S <= slept.now < STUCK_S + interval_s

    monkeypatch.setattr("rlhf_core.cli.progress.terminal_prompt", lambda: lambda question: True)
    slept.now = 0.0
    _await_beginning(lambda: slept.now > 3 * STUCK_S, submitted, None)
    monkeypatch.setattr("rlhf_core.cli.progress.terminal_prompt", lambda: None)

    announced: list[float] = []

    def begins() -> bool:
        if slept.now not in announced:
            send_heartbeat(client)
            announced.append(slept.now)
        return slept.now > 3 * STUCK_S

    slept.now = 0.0  # negative control: a free slot is awaited for as long as it takes
    _await_beginning(begins, submitted, None)


def test_a_flow_run_that_has_not_started_is_withdrawn(client: Any, submitted: Submitted, capsys: Printed) -> None:
    assert execute(["cancel", submitted.run_id, "--reason", "not needed"]) == 0
    assert "had not started" in capsys.readouterr().out
    state = client.read_flow_run(UUID(submitted.flow_run_id)).state
    assert (state.type.value, state.message) == ("CANCELLED", f"not needed (by {account()})")
    assert execute(["cancel", submitted.run_id]) == 2, "once only"
    assert f"no run '{submitted.run_id}'" in capsys.readouterr().err


def test_a_request_from_the_ui_is_withdrawn_by_the_name_that_is_listed(client: Any, site: Site) -> None:
    """Not those that would resume a run, those of other flows, and none where two have the name."""
    deployment = UUID(register("quickstart", site, limit=0).id)

    def ask(**parameters: str) -> FlowRun:
        return client.create_flow_run_from_deployment(deployment, name="fuzzy-otter", parameters=parameters)

    def state_of(flow_run: FlowRun) -> str:
        return str(client.read_flow_run(flow_run.id).state.type.value)

    other = client.create_flow_run(flow(lambda: None, name="other"), name="fuzzy-otter", state=Scheduled())
    resumes, one, two = ask(run_id="toy-1"), ask(), ask()
    assert execute(["cancel", "fuzzy-otter"]) == 2
    client.delete_flow_run(two.id)
    assert execute(["cancel", "fuzzy-otter"]) == 0
    assert [state_of(each) for each in (one, resumes, other)] == ["CANCELLED", "SCHEDULED", "SCHEDULED"]
    assert execute(["cancel", "fuzzy-otter"]) == 2, "once only"


def test_ctrl_c_leaves_the_run_submitted(client: Any, site: Site, real_prefect: sites.Site) -> None:
    """The whole command in a process of its own: its output while it waits, and its exit."""
    register("quickstart", site)
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_core.cli.main", "submit", "quickstart", "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("no worker of the pool 'rlhf' is online" in line for line in lines)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    run_id = out.split()[1]
    (flow_run,) = [one for one in client.read_flow_runs() if one.name == run_id]
    assert flow_run.state is not None
    assert not flow_run.state.is_final()
    assert deploy_commands.POLL_INTERVAL_S <= 5, "reported within seconds"
