"""Meeting of the agents at the start of an attempt: the wait for late agents, and the report of missing ones.

Nodes pull container images and read cold file systems at different speeds, so their agents start minutes apart. Every
agent waits ``supervise.join_s`` for the others. Its file of events shows the others that it has started.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from rlhf_core.diagnosis.failure import Failure
from rlhf_core.diagnosis.nodes.rendezvous import absence, disconnection, isolation
from rlhf_core.errors import RunDirError
from rlhf_core.files.lookups import is_there
from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker.channel.signing import MessageSigner
from rlhf_core.worker.channel.store import AgentStoreNotFound, TcpAgentStore, join_agent_store
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.nodes.membership import Nodes

CONNECT_S = 60.0
"""Time beyond the limit that an agent has to connect if it has started in time, in seconds: it imports torch first."""
VERDICT_S = 30.0
"""Time that agent 0 has to end the attempt if agents are missing, in seconds."""


class AgentsMissing(Exception):
    """Raised if the agents have not met in time."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class Arrivals:
    """Arrival of the agents of one attempt, as one of them sees it."""

    nodes: Nodes
    attempt: AttemptDir
    limit_s: float
    """Time that each agent waits for the others, in seconds."""

    @property
    def decided_s(self) -> float:
        """Time from the start of agent 0 until it has certainly ended an attempt without some agents, in seconds."""
        return self.limit_s + CONNECT_S + VERDICT_S

    def sign_in(self, events: EventLog) -> None:
        """Show the other agents that this one has started."""
        events.add(
            "agent_waiting",
            f"waiting for the agents of {self.nodes.num} nodes for at most {self.limit_s:g} s (supervise.join_s)",
        )

    def started(self) -> set[str]:
        """Names of the nodes whose agents have started."""
        return {name for name in self.nodes.names if is_there(self.attempt.restart(0).events(name))}

    def have_all_started(self) -> bool:
        """True if the agents of all nodes have started, whether they have connected or not."""
        return self.started() >= set(self.nodes.names)

    def failure(self, joined: Collection[str]) -> Failure:
        """Diagnose that agents are missing after the time limit; for agent 0.

        Args:
            joined: Nodes whose agents have connected to this one.
        """
        absent = absence(self.nodes.names, self.started() | set(joined), self.limit_s)
        return absent or disconnection(self.nodes.names, joined, self.limit_s)

    def join(self, signer: MessageSigner, pause: Callable[[float], bool]) -> TcpAgentStore:
        """Find the store of agent 0, which may start later than this agent.

        If agent 0 has started in time, it may need a while to open its store, and it is the one that gives up nodes. So
        this agent then waits until agent 0 must have decided.

        Args:
            signer: This agent's signer.
            pause: Sleeps for the given number of seconds; returns True once further waiting is pointless.

        Raises:
            AgentsMissing: it was not found in time.
            AgentStoreLost: further waiting is pointless.
        """
        first = self.nodes.names[0]
        try:
            return join_agent_store(self.nodes.addresses[0], signer, pause, self.limit_s)
        except AgentStoreNotFound:
            absent = absence(self.nodes.names, self.started() | {self.nodes.name}, self.limit_s)
        if absent is not None and first in absent.nodes:
            raise AgentsMissing(absent)
        try:
            return join_agent_store(
                self.nodes.addresses[0],
                signer,
                lambda seconds: pause(seconds) or is_there(self.attempt.outcome),
                self.decided_s,
            )
        except AgentStoreNotFound as error:
            raise AgentsMissing(isolation(self.nodes.names, self.nodes.name, str(error))) from error


def longest_wait_s(run_dir: RunDir) -> float:
    """Time that agents wait for each other, ``supervise.join_s``, in seconds.

    An agent that cannot read the spec waits for the default time: it reports its problem to agent 0.
    """
    try:
        return run_dir.read_spec().spec.supervise.join_s
    except (RunDirError, OSError):
        return SuperviseSpec().join_s
