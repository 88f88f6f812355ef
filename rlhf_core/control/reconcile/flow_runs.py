"""The interface through which the reconciler uses Prefect; ``flows`` implements it. A site may be without Prefect."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from rlhf_core.diagnosis.reconcile.facts import FlowRunFacts, FlowState, TaskRunFacts
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir

RunsOfFlowRuns = Callable[[Collection[str]], Mapping[str, tuple[str, str]]]
"""Returns run and controller, by id, of those flow runs that the history knows."""


class NotRegistered(Exception):
    """The deployment that resumes runs is not registered on the server."""


@dataclass(frozen=True)
class FlowRunSnapshot:
    """Flow runs and task runs of a site at one moment."""

    flow_runs: Sequence[FlowRunFacts] = ()
    task_runs: Sequence[TaskRunFacts] = ()


class FlowRuns(Protocol):
    """The flow runs of a site. Every method raises the errors of Prefect's client if its server does not answer."""

    def answers(self) -> bool:
        """True if the server answers now."""

    def poll(
        self, run_ids: Collection[str], flow_run_ids: Collection[str], runs: RunsOfFlowRuns, now: datetime
    ) -> FlowRunSnapshot:
        """Return the flow runs that Prefect considers active, those named after a run, and those with the given ids,
        and the task runs that it considers active although their flow runs have ended."""

    def adopt(self, run_id: str, key: str) -> str:
        """Start a flow run that resumes a run, and return its id. A repeated key does not create a second one.

        Raises:
            NotRegistered: the deployment that resumes runs is missing.
        """

    def end_flow_run(self, flow_run_id: str, state: FlowState, changed_at: datetime, reason: str) -> bool:
        """Set the final state of a flow run. Does nothing and returns False if its state changed after
        ``changed_at``."""

    def end_task_run(self, task_run_id: str, state: FlowState, reason: str) -> None:
        """Set the final state of a task run that is still open."""

    def num_unpublished(self, run_dir: RunDir, store: HistoryStore, known: Collection[str]) -> int:
        """Number of events and artifacts of an ended run that the server lacks.

        Args:
            known: ids of flow runs that the server knows; nothing is published about a run that none of them drove.
        """

    def publish(self, run_dir: RunDir, store: HistoryStore, known: Collection[str]) -> list[str]:
        """Publish what the server lacks about a run, and return the names of what was published."""

    def configs(self) -> Iterable[str]:
        """Configs that are referred to by deployments, and by flow runs that may still start or be retried."""
