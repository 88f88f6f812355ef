"""Task runs that Prefect considers alive although their flow runs have ended: their stages' outcomes, and their ends.

Prefect learns of task runs from events sent by their process; events sent during a server outage are lost.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter, TaskRunFilterState, TaskRunFilterStateType
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.client.schemas.sorting import TaskRunSort

from flows.queries import PAGE, in_states, of_flow
from flows.server.clients import api_client
from rlhf_core.diagnosis.reconcile.facts import FlowState, TaskRunFacts
from rlhf_core.errors import RlhfError
from rlhf_core.launch.journal import StageRecord, read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import StageState

_OPEN = [StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
_ENDED = [StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED]


def left_open(client: SyncPrefectClient, flow_runs: Collection[UUID]) -> list[TaskRun]:
    """Open task runs of those given flow runs that have ended.

    Raises Prefect's own errors if the server does not answer.
    """
    found = client.read_task_runs(
        flow_filter=of_flow(),
        flow_run_filter=FlowRunFilter(state=in_states(_ENDED)),
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(name=None, type=TaskRunFilterStateType(any_=_OPEN))),
        sort=TaskRunSort.EXPECTED_START_TIME_DESC,
        limit=PAGE,  # later rounds handle the rest
    )
    return [one for one in found if one.flow_run_id in flow_runs]


def facts(task_runs: Sequence[TaskRun], run_ids: Mapping[str, str], runs_dir: Path) -> list[TaskRunFacts]:
    """Convert task runs to facts for the reconciler.

    Args:
        run_ids: run of each flow run.
        runs_dir: folder of the run directories.
    """
    return [
        TaskRunFacts(str(one.id), str(one.flow_run_id), _stage(runs_dir, run_ids[str(one.flow_run_id)], one.name))
        for one in task_runs
        if str(one.flow_run_id) in run_ids
    ]


def end(task_run_id: str, state: FlowState, why: str) -> None:
    """Set the final state of a task run that is still open.

    Raises Prefect's own errors if the server does not answer.
    """
    with api_client() as client:
        present = client.read_task_run(UUID(task_run_id)).state
        if present is None or not present.is_final():
            last: State[None] = State(type=StateType(state.value), name=state.value.capitalize(), message=why)
            client.set_task_run_state(UUID(task_run_id), last, force=True)


def _stage(runs_dir: Path, run_id: str, title: str) -> StageState | None:
    try:
        run_dir = RunDir.find(runs_dir, run_id)
        return stage_called(read_record(run_dir).stages, title) if run_dir is not None else None
    except (RlhfError, OSError):
        return None


def stage_called(stages: Sequence[StageRecord], title: str) -> StageState | None:
    """State of the newest stage with a title (:func:`rlhf_core.control.steps.title_of`); None if there is none."""
    words = title.split()
    number = int(words[2]) if words[1:2] == ["attempt"] and words[2:3] and words[2].isdigit() else None
    found = [one for one in stages if words[:1] == [one.name.value] and number in (None, one.attempt)]
    return found[-1].state if found else None
