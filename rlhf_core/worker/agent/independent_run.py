"""One phase of a group whose workers restart individually; agent 0 decides about each failed worker."""

import time
from collections.abc import Callable, Generator
from dataclasses import replace

from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.agent_messages import (
    AgreedStep,
    NodeEnd,
    NodeState,
    WorkerExit,
    WorkerReport,
    WorkerStartOrder,
)
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.failures import Action
from rlhf_core.worker import processes
from rlhf_core.worker.agent.decisions import GroupDecisions
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.evidence import exit_reports
from rlhf_core.worker.evidence.exit_reports import NodeReport, Write
from rlhf_core.worker.groups.base import Exit, StartAbandoned, Started
from rlhf_core.worker.groups.events import log_exit, log_start
from rlhf_core.worker.groups.independent import IndependentGroup
from rlhf_core.worker.supervision.group import SupervisedGroup, states_of
from rlhf_core.worker.supervision.supervisor import Supervisor

END_TIMEOUT_S = 10.0
"""Longest wait for killed workers to exit, in seconds."""


class IndependentRun:
    """The workers of one group in one phase."""

    def __init__(
        self,
        group: IndependentGroup,
        phase: int,
        channel: AgentChannel,
        decisions: GroupDecisions,
        supervisor: Supervisor,
        events: EventLog,
        write: Write,
        restart_dir: Callable[[], RestartDir],
    ) -> None:
        """Args:
        phase: Number of the phase, from 0.
        write: Writes out what workers left on the node because the disk was full.
        restart_dir: The current restart of the attempt.
        """
        self.is_closing = False
        """True once the group it serves has finished, so that it has nothing left to do."""
        self._group = group
        self._phase = phase
        self._channel = channel
        self._decisions = decisions
        self._supervisor = supervisor
        self._events = events
        self._write = write
        self._restart_dir = restart_dir
        self._seen: set[tuple[int, int, int]] = set()

    def run(self) -> Generator[None, None, AgreedStep | None]:
        """Start the workers and restart those that fail, until it is closing; yields while there is nothing to do.

        Returns:
            The end of the attempt, on agent 0 alone: the other agents learn of it from the group that this one serves.
        """
        role = self._group.role
        supervised = self._supervisor.supervise(self._group, self._phase)
        try:
            self._start()
            while True:
                self._report_exits(supervised)
                self._restart_ordered(supervised)
                self._report_unstarted(supervised)
                end = self._decide_about_exits(supervised) if self._channel.leads else None
                if end is not None:
                    return end
                if self.is_closing:
                    break
                yield
            yield from self._end()
            return None
        finally:
            self._supervisor.release(role)

    # -----------------------------------------------------------------------------------------------------------------
    # On every node

    def _start(self) -> None:
        try:
            self._group.start()
        except StartAbandoned:
            return
        if self._group.workers:
            log_start(self._events, self._group.role, self._group.workers.values(), self._group.generation)

    def _report_exits(self, supervised: SupervisedGroup) -> None:
        for worker, end in self._group.poll():
            self._report_exit(supervised, worker, end)
        for worker in self._group.blocked:
            if worker.local_rank not in supervised.exits:
                self._report(supervised, worker, num_left=1)

    def _report_exit(self, supervised: SupervisedGroup, worker: Started, end: Exit) -> None:
        group, local_rank = self._group, worker.local_rank
        log_exit(self._events, group.role, worker, end, group.generations[local_rank])
        # Kill everything this worker started, and nothing else.
        left = processes.end_descendants(group=group.marker(local_rank), sessions={worker.pid})
        self._report(supervised, worker, len(left))

    def _report(self, supervised: SupervisedGroup, worker: Started, num_left: int) -> None:
        group, local_rank = self._group, worker.local_rank
        report = exit_reports.report(group, "", self._write, [local_rank]).model_copy(update={"num_left": num_left})
        one = WorkerExit(generation=group.generations[local_rank], pid=worker.pid, end=report)
        # Replace the dictionary rather than change it: the supervising thread may be reading it.
        supervised.exits = {**supervised.exits, local_rank: one}

    def _report_unstarted(self, supervised: SupervisedGroup) -> None:
        group = self._group
        while group.unstarted:
            local_rank, trace = group.unstarted.popitem()
            worker = WorkerReport(rank=group.rank(local_rank), local_rank=local_rank)
            report = NodeEnd(num_workers=1, workers=(worker,), problem=trace)
            one = WorkerExit(generation=group.generations[local_rank], pid=0, end=report)
            supervised.exits = {**supervised.exits, local_rank: one}

    def _restart_ordered(self, supervised: SupervisedGroup) -> None:
        orders = self._supervisor.orders.group(self._group.role)
        for local_rank, generation in supervised.starts_here(orders, self._channel.nodes.index):
            started = self._group.restart(local_rank, generation)
            supervised.exits = {index: one for index, one in supervised.exits.items() if index != local_rank}
            if started is not None:
                log_start(self._events, self._group.role, [started], generation)

    def _end(self) -> Generator[None, None, None]:
        """Kill the workers, whatever they are doing."""
        group = self._group
        group.end()
        deadline = time.monotonic() + END_TIMEOUT_S
        while not group.all_ended and group.started and time.monotonic() < deadline:
            for worker, end in group.poll():
                log_exit(self._events, group.role, worker, end, group.generations[worker.local_rank])
            yield
        for local_rank, worker in group.workers.items():
            processes.end_descendants(group=group.marker(local_rank), sessions={worker.pid})

    # -----------------------------------------------------------------------------------------------------------------
    # On agent 0

    def _decide_about_exits(self, supervised: SupervisedGroup) -> AgreedStep | None:
        """Decide about workers that exited since the last call; returns the end of the attempt if one forces it."""
        for index, state in states_of(supervised, self._channel.received("state", NodeState)).items():
            for one in state.exits:
                (worker,) = one.end.workers
                key = (index, worker.local_rank, one.generation)
                if key in self._seen:
                    continue
                self._seen.add(key)
                step = self._decide_about(supervised, index, one)
                if step is not None:
                    return step
        return None

    def _decide_about(self, supervised: SupervisedGroup, index: int, one: WorkerExit) -> AgreedStep | None:
        role, node = self._group.role, self._channel.nodes.names[index]
        (worker,) = one.end.workers
        if exit_reports.is_well(one.end):
            supervised.well |= {worker.rank}
            return None
        hang = supervised.hangs.get((node, one.pid))
        if worker.by_agent and hang is None:
            return None  # the attempt is ending
        failure = exit_reports.explain([NodeReport(node, one.end, self._channel.ahead_s(index))], hang)
        # The group counts its ranks by itself: without its name, a message is read as one about a trainer.
        message = f"Group {role}: {failure.message}"
        left = (node,) if one.end.num_left else ()
        failure = replace(failure, message=message, nodes=left or failure.nodes)
        folder = self._group.folder_of(one.generation)
        choice = self._decisions.choose_for_worker(
            role, failure, self._restart_dir(), folder, left, is_needed=not self.is_closing
        )
        if choice.action is Action.RESTART_WORKERS:
            generation = self._decisions.next_generation(role)
            start = WorkerStartOrder(node_index=index, local_rank=worker.local_rank, generation=generation)
            self._supervisor.orders.start_worker(role, start)
        if choice.action.leaves_running:
            return None
        message = f"{failure.message} ({choice.reason})"
        return self._decisions.end(AttemptState.FAILED, message, failure.kind)
