"""Flow runs without a visible process: dead only if the worker that starts them is visible, otherwise unknown."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType

from flows.flow_runs import facts
from rlhf_core.config.site import Site, load_site
from rlhf_core.diagnosis.reconcile.facts import START_S, FlowRunFacts, ProcessState
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.services.presence import ServiceFiles, ServiceRecord, holding

NOW = datetime.now(UTC)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return load_site({"RLHF_HOME": str(tmp_path / "home")})


@pytest.fixture
def found(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[[StateType, float], FlowRunFacts]:
    """Facts about a flow run of the site's pool that has no process here and no controller yet."""

    def facts_of(state: StateType, seconds: float) -> FlowRunFacts:
        flow_run = FlowRun(
            id=uuid4(),
            flow_id=uuid4(),
            state=State(type=state, timestamp=NOW - timedelta(seconds=seconds)),
            work_pool_name=site.prefect.pool,
            infrastructure_pid="login1:12",
        )
        monkeypatch.setattr(facts, "_poll", lambda run_ids, flow_run_ids: ([flow_run], []))
        monkeypatch.setattr(facts, "_flow_run_processes", lambda: iter(()))
        (one,) = facts.PrefectFlowRuns(site).poll((), (), lambda ids: {}, NOW).flow_runs
        return one

    return facts_of


def test_a_flow_run_without_a_process_on_the_host_of_its_worker_is_lost(
    site: Site, found: Callable[[StateType, float], FlowRunFacts]
) -> None:
    with holding(site.home, "worker"):
        one = found(StateType.RUNNING, 1.0)
    assert one.process is ProcessState.GONE
    assert one.is_lost


@pytest.mark.parametrize("change", [{"host": "another-container"}, {"started_ticks": 1}])
def test_in_another_container_a_flow_run_is_given_time_to_start(
    site: Site, found: Callable[[StateType, float], FlowRunFacts], change: dict[str, object]
) -> None:
    files = ServiceFiles(site.home, "worker")
    with holding(site.home, "worker"):
        mine = read_model(files.record, ServiceRecord)
        assert mine is not None
        write_model(files.record, mine.model_copy(update=change))
        one = found(StateType.RUNNING, 1.0)
        assert one.process is ProcessState.UNKNOWN
        assert not one.is_lost
        assert one.may_drive
        assert found(StateType.PENDING, START_S + 1.0).is_lost, "it never started"


def test_without_a_worker_the_flow_run_is_unknown(found: Callable[[StateType, float], FlowRunFacts]) -> None:
    assert found(StateType.RUNNING, 1.0).process is ProcessState.UNKNOWN
