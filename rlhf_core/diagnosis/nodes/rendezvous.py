"""Diagnosis of an attempt whose agents did not all meet in time. Pure.

The agents that started in time report the failure. They blame the nodes whose agents did not start; if all started, the
nodes that did not connect to agent 0; and no node if it is unclear which side of a connection failed.
"""

from collections.abc import Collection, Sequence

from rlhf_core.diagnosis.failure import Failure, fingerprint
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.text.formatting import listed

MAX_NAMES = 6
"""Maximum number of nodes named in a sentence."""


def absence(names: Sequence[str], started: Collection[str], waited_s: float) -> Failure | None:
    """Blame the nodes whose agents did not start; None if all did.

    Args:
        names: All nodes of the attempt.
        started: Those whose agents have started.
        waited_s: Time that the agents had to start, in seconds.
    """
    absent = [name for name in names if name not in started]
    if not absent:
        return None
    arrived = [name for name in names if name in started]
    return _failure(
        f"{_agents_of(absent)} did not arrive within {waited_s:g} s (supervise.join_s), those of "
        f"{listed(arrived, MAX_NAMES)} did. Read the job's log of {absent[0]}: its interpreter, container or shared "
        "folder may be missing. If it was only slow, raise supervise.join_s.",
        absent,
    )


def disconnection(names: Sequence[str], joined: Collection[str], waited_s: float) -> Failure:
    """Blame the nodes whose agents have started, but did not connect to agent 0.

    If several agents should have connected and none did, agent 0 is cut off. Of two nodes, either may be.

    Args:
        names: All nodes of the attempt, that of agent 0 first.
        joined: Those whose agents have connected to agent 0.
        waited_s: Time that the agents had to connect, in seconds.
    """
    first, *others = names
    apart = [name for name in others if name not in joined]
    cut_off = [first] if len(others) > 1 else []
    return _failure(
        f"The agents of all {len(names)} nodes arrived, but {listed(apart, MAX_NAMES)} did not connect to {first} "
        f"within {waited_s:g} s (supervise.join_s). Check that the nodes reach each other at the ports of the agents "
        "(docs/operations.md).",
        apart if len(apart) < len(others) else cut_off,
    )


def isolation(names: Sequence[str], own: str, problem: str) -> Failure:
    """Report that an agent found no way to agent 0 although both have started; either side may be at fault.

    Args:
        names: All nodes of the attempt, that of agent 0 first.
        own: Node of the agent.
        problem: Result of its attempts to connect.
    """
    return _failure(f"The agents of {names[0]} and {own} both arrived, but did not connect: {problem}.", ())


def _failure(message: str, blamed: Sequence[str]) -> Failure:
    kind = FailureKind.RENDEZVOUS
    return Failure(kind, message, fingerprint(kind, " ".join(blamed)), nodes=tuple(blamed))


def _agents_of(names: Sequence[str]) -> str:
    return f"The agent{'s' if len(names) > 1 else ''} of {listed(names, MAX_NAMES)}"
