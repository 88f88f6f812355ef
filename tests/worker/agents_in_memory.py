"""Agents of this process alone: channels, groups of workers and decisions of agent 0. Helpers, not fixtures."""

import time

from agent_runs import make_spec

from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.resources import GroupPlan, Placement
from rlhf_core.worker.agent.decisions import GroupDecisions
from rlhf_core.worker.agent.job import Job
from rlhf_core.worker.agent.leader import Leader
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.signing import MessageSigner
from rlhf_core.worker.channel.store import MemoryAgentStore
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import GroupSeat, Started, WorkerGroup
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.liveness.pause_clock import PauseClock
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.supervision.external_requests import ExternalRequests

ONE_TRAINER = GroupPlan.on_all_nodes(Role.TRAINER, 1, 1)


def nodes_of(*names: str, index: int = 0) -> Nodes:
    """These nodes, all on this machine, as one of them sees them."""
    return Nodes(names, ("127.0.0.1",) * len(names), index)


def channels_of(*names: str) -> list[AgentChannel]:
    """The ends of a channel of the agents of these nodes."""
    store = MemoryAgentStore()
    signers = [MessageSigner(b"0" * 64, "toy/1", index) for index in range(len(names))]
    return [AgentChannel(nodes_of(*names, index=index), store, signer) for index, signer in enumerate(signers)]


def lone_channel() -> AgentChannel:
    """The channel of an agent that has no others."""
    return AgentChannel(nodes_of("here"), MemoryAgentStore())


def decisions_of(run_dir: RunDir, channel: AgentChannel, requests: ExternalRequests | None = None) -> GroupDecisions:
    """Decisions of agent 0 about the first attempt of a run."""
    placement = Placement(attempt=1, num_nodes=channel.nodes.num, phases=())
    job = Job(run_dir, 1, channel.nodes, make_spec(), placement, {}, ())
    leader = Leader(run_dir, 1, EventLog("here", run_dir.attempt(1).restart(0)))
    return GroupDecisions(job, channel, leader, requests or ExternalRequests())


class GivenProcess(WorkerGroup):
    """A worker group with a single worker whose process exists already."""

    def __init__(
        self,
        slots: SlotFile,
        folder: RestartDir,
        *,
        plan: GroupPlan = ONE_TRAINER,
        pid: int = 0,
        node: str = "here",
        position: int = 0,
        clock: PauseClock | None = None,
    ) -> None:
        super().__init__(plan, 0, GroupSeat(node, position, slots, clock or PauseClock()))
        self._pid = pid
        self._folder = folder

    def start(self) -> None:
        """Use the given process as the worker, with what its slot has already."""
        self.workers = {0: self._start_worker(0)}
        self.started = True

    def _start_worker(self, local_rank: int) -> Started:
        return Started(local_rank, 0, self._pid, time.monotonic_ns(), oom_kills_before=0)

    def folder(self, local_rank: int) -> RestartDir:
        """The folder that was given."""
        return self._folder
