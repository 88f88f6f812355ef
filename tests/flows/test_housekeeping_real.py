"""The reconciler with a real Prefect server, a real worker and a real Slurm, while services are killed."""

from collections.abc import Iterator

import pytest
from control_fakes import checked_run
from history_tools import run_sql
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Crashed
from process_tools import until
from site_files import QUICK
from sites import Site, go, starts, state_of
from slurm_cluster import Cluster, needs_slurm

from flows import reconcile
from flows.deployments.registration import ENTRYPOINT
from flows.flow_runs.facts import ADOPTED_TAG, PrefectFlowRuns
from flows.run import rlhf_run
from flows.server.clients import api_client
from rlhf_core.config.site import load_site
from rlhf_core.control.reconcile.actions import ActionResult, Reconciler
from rlhf_core.diagnosis.reconcile import decisions
from rlhf_core.diagnosis.reconcile.decisions import ActionKind
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler
from rlhf_core.schemas.attempts import RunState

pytestmark = [pytest.mark.site, needs_slurm, pytest.mark.end_to_end]

LATE = (ActionKind.PUBLISH, ActionKind.END_TASK_RUN)
"""Actions that only make Prefect show what has happened, also to the runs of earlier tests: they come at any time."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=2, kill_wait_s=1)
    site = Site(tmp_path_factory.mktemp("site"), cluster=cluster, pretended=True, settings=QUICK)
    with site.running(services=False):
        site.serve("server")
        with site.in_use():
            set_up(site)
            yield site


@pytest.fixture(autouse=True)
def _site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SLURM_CONF", "XDG_CACHE_HOME", "RLHF_HOME", "RLHF_SCHEDULER", "RLHF_COMPUTE_PYTHON"):
        monkeypatch.setenv(name, site.environment()[name])
    yield
    site.kill("daemon", "worker")
    for job in SlurmScheduler().living():
        SlurmScheduler().cancel(job.submission)


@pytest.fixture
def client(site: Site) -> Iterator[SyncPrefectClient]:
    with api_client() as client:
        yield client


@pytest.fixture
def store(site: Site) -> Iterator[HistoryStore]:
    with HistoryStore(load_site().database_url) as store:
        yield store


def set_up(site: Site) -> None:
    """Create the deployment.

    Its entry point is a module, because for a file Prefect copies the whole tree for each flow run.
    """
    with api_client() as client:
        client.create_work_pool(WorkPoolCreate(name="rlhf", type="process"))
        client.create_deployment(
            client.create_flow(rlhf_run),
            name="resume",
            work_pool_name="rlhf",
            entrypoint=ENTRYPOINT,
            job_variables={"working_dir": str(site.home)},
        )


def start_worker(site: Site) -> None:
    """Start a worker of Prefect's own: one of ours would report to the server the flow runs that end with it."""
    site.serve(
        "worker", "-m", "prefect", "worker", "start", "--pool", "rlhf", "--type", "process",
        PREFECT_API_URL=site.api, PREFECT_API_AUTH_STRING=site.password, PREFECT_WORKER_QUERY_SECONDS="1",
    )  # fmt: skip


def request_flow_run(client: SyncPrefectClient, run_dir: RunDir) -> FlowRun:
    deployment = client.read_deployment_by_name("rlhf-run/resume")
    return client.create_flow_run_from_deployment(
        deployment.id, parameters={"run_id": run_dir.run_id}, name=run_dir.run_id
    )


def flow_runs(client: SyncPrefectClient, run_dir: RunDir) -> list[tuple[str, bool]]:
    """State of each flow run of a run, and whether the reconciler started it; in order."""
    found = [one for one in client.read_flow_runs() if one.name == run_dir.run_id]
    found.sort(key=lambda one: str(one.created))
    return [(str(one.state_name), ADOPTED_TAG in one.tags) for one in found]


def in_training(site: Site, client: SyncPrefectClient) -> RunDir:
    """A run driven by a flow run of the worker, with its job running."""
    run_dir = checked_run(site.home / "runs")
    request_flow_run(client, run_dir)
    until(lambda: state_of(run_dir) is RunState.TRAINING, "it trains")
    return run_dir


def rounds(site: Site, store: HistoryStore) -> list[ActionResult]:
    """Actions of one round in this process, without those of ``LATE``."""
    one = Reconciler(load_site(), store, flow_runs=PrefectFlowRuns(load_site()))
    results = reconcile.carry_out_round(one, lambda: True, False)
    return [result for result in results if result.action.kind not in LATE]


def ended(client: SyncPrefectClient, store: HistoryStore, run_dir: RunDir, state: RunState, flow_state: str) -> None:
    """Check that journal, history and Prefect agree on the end of the run, and that each attempt had one job."""
    until(lambda: state_of(run_dir) is state, f"it is {state}")
    until(lambda: flow_runs(client, run_dir)[-1][0] == flow_state, f"Prefect says {flow_state}")
    until(lambda: SlurmScheduler().living() == [], "its job is gone from the queue")
    rows = run_sql(store, "SELECT run_id, state FROM runs").rows
    assert [run_dir.run_id, state.value] in [list(row) for row in rows]
    assert len(starts(run_dir)) == len(set(starts(run_dir)))


def test_a_zombie_of_a_killed_worker_is_ended_and_its_run_adopted(
    site: Site, client: SyncPrefectClient, store: HistoryStore
) -> None:
    start_worker(site)
    run_dir = in_training(site, client)
    site.kill("worker")  # terminated, Prefect's worker has the time to report its flow runs, or has not
    start_worker(site)
    # The control: only the reconciler notices, and not even a new worker.
    other = in_training(site, client)
    assert flow_runs(client, run_dir) == [("Running", False)], "a zombie"
    site.serve("daemon")
    until(lambda: flow_runs(client, run_dir)[-1] == ("Running", True), "it is adopted")
    assert flow_runs(client, run_dir)[0][0] == "Crashed"
    go(run_dir)
    go(other)
    ended(client, store, run_dir, RunState.COMPLETED, "Completed")
    ended(client, store, other, RunState.COMPLETED, "Completed")
    assert starts(run_dir) == ["1"], "adopted, not submitted again"
    kinds = {row[0] for row in run_sql(store, "SELECT kind FROM events WHERE kind LIKE 'reconcile%'").rows}
    assert kinds - {f"reconcile_{kind}" for kind in LATE} == {"reconcile_adopt", "reconcile_end_flow_run"}
    assert len(flow_runs(client, run_dir)) == 2


def test_a_cancellation_without_a_receiver_is_carried_out(
    site: Site, client: SyncPrefectClient, store: HistoryStore
) -> None:
    start_worker(site)
    run_dir = in_training(site, client)
    site.kill("worker")
    (flow_run,) = [one for one in client.read_flow_runs() if one.name == run_dir.run_id]
    client.set_flow_run_state(flow_run.id, Cancelling(), force=True)
    assert state_of(run_dir) is RunState.TRAINING
    results = rounds(site, store)
    assert [one.action.kind for one in results] == [ActionKind.CANCEL_RUN, ActionKind.END_FLOW_RUN]
    ended(client, store, run_dir, RunState.CANCELLED, "Cancelled")


def test_a_controller_that_prefect_considers_dead_keeps_its_run(
    site: Site, client: SyncPrefectClient, store: HistoryStore
) -> None:
    start_worker(site)
    run_dir = in_training(site, client)
    (flow_run,) = [one for one in client.read_flow_runs() if one.name == run_dir.run_id]
    client.set_flow_run_state(flow_run.id, Crashed(), force=True)
    assert [one.action.kind for one in rounds(site, store)] == [ActionKind.NOTE]
    go(run_dir)
    until(lambda: state_of(run_dir) is RunState.COMPLETED, "it ends")
    assert len(flow_runs(client, run_dir)) == 1


def test_two_rounds_that_see_the_same_make_one_flow_run(
    site: Site, client: SyncPrefectClient, store: HistoryStore
) -> None:
    start_worker(site)
    run_dir = in_training(site, client)
    site.kill("worker")
    both = [Reconciler(load_site(), store, flow_runs=PrefectFlowRuns(load_site())) for _ in range(2)]
    snapshots = [one.poll() for one in both]
    for one, actions in zip(both, snapshots, strict=True):
        one.carry_out(actions)
    assert flow_runs(client, run_dir) == [("Crashed", False), ("Scheduled", True)]
    assert rounds(site, store) == [], "the expected flow run is awaited"
    start_worker(site)
    go(run_dir)
    ended(client, store, run_dir, RunState.COMPLETED, "Completed")


def test_rounds_are_flow_runs_if_they_are_due_or_act(
    site: Site, client: SyncPrefectClient, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconcile.register()
    reconcile.register()
    deployment = client.read_deployment_by_name(reconcile.DEPLOYMENT)
    assert len(deployment.schedules) == 1

    def made() -> list[str]:
        found = [one for one in client.read_flow_runs() if one.deployment_id == deployment.id]
        return sorted(str(one.state_name) for one in found if one.state_name not in ("Scheduled", "Late"))

    # Publishing the runs of earlier tests creates flow runs too.
    monkeypatch.setattr(decisions, "PUBLISH_AFTER_S", 0.0)

    def leaves_no_flow_run() -> bool:
        before = made()
        return rounds(site, store) == [] and made() == before

    until(leaves_no_flow_run, "nothing is due and nothing found")
    quick = client.create_flow_run_from_deployment(deployment.id)
    rounds(site, store)
    assert client.read_flow_run(quick.id).state_name in ("Completed", reconcile.AGREED)
    first = made()
    start_worker(site)
    run_dir = in_training(site, client)
    site.kill("worker")
    monkeypatch.setattr(decisions, "RETRY_INTERVAL_S", 0.0)
    results = rounds(site, store)
    assert [one.action.kind for one in results] == [ActionKind.ADOPT, ActionKind.END_FLOW_RUN]
    assert len(made()) == len(first) + 1
    (artifact,) = [one for one in client.read_artifacts() if one.key == reconcile.ARTIFACT_KEY][-1:]
    assert run_dir.run_id in str([one.data for one in client.read_artifacts()])
    assert artifact.type == "table"
