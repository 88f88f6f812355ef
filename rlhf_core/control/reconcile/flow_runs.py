"""Prefect as the reconciler sees it: an interface, which ``flows`` implements. Without it, a site has no flow runs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from rlhf_core.diagnosis.reconcile.facts import FlowRunFacts, FlowState, TaskRunFacts
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir

RunsOfFlowRuns = Callable[[Collection[str]], Mapping[str, tuple[str, str]]]
"""Run and controller of each flow run that the history knows, by the ids of flow runs."""


class NotRegistered(Exception):
    """The deployment that goes on with a run is not registered on the server."""


@dataclass(frozen=True)
class FlowRunSnapshot:
    """Flow runs and task runs of a site at one moment."""

    flow_runs: Sequence[FlowRunFacts] = ()
    task_runs: Sequence[TaskRunFacts] = ()


class FlowRuns(Protocol):
    """The flow runs of a site. Every method raises what Prefect raises where its server does not answer."""

    def answers(self) -> bool:
        """True if the server answers now."""

    def poll(
        self, run_ids: Collection[str], flow_run_ids: Collection[str], runs: RunsOfFlowRuns, now: datetime
    ) -> FlowRunSnapshot:
        """Flow runs that Prefect takes for alive, those named after a run, and those that are named, with the task runs
        that it takes for alive although their flow runs have ended."""

    def adopt(self, run_id: str, key: str) -> str:
        """Start a flow run that goes on with a run; its id. The same key makes no second one.

        Raises:
            NotRegistered: the deployment for this is not there.
        """

    def end_flow_run(self, flow_run_id: str, state: FlowState, changed_at: datetime, reason: str) -> bool:
        """Give a flow run a last state; False, with nothing done, where its state has changed since ``changed_at``."""

    def end_task_run(self, task_run_id: str, state: FlowState, reason: str) -> None:
        """Give a task run that is still open a last state."""

    def num_unpublished(self, run_dir: RunDir, store: HistoryStore, known: Collection[str]) -> int:
        """Number of events and artifacts that the server lacks of a run that has ended.

        Args:
            known: ids of flow runs that the server knows; nothing is published of a run that none of them drove.
        """

    def publish(self, run_dir: RunDir, store: HistoryStore, known: Collection[str]) -> list[str]:
        """Publish what the server lacks of a run; names of what was."""

    def configs(self) -> Iterable[str]:
        """Configs that deployments refer to, and flow runs that may still begin or be retried."""
