"""The node that is given up when agents are not heard on the network."""

from dataclasses import dataclass

import pytest

from rlhf_core.worker import agent_channel
from rlhf_core.worker.agent_channel import LOST_TIMEOUT_S, AgentChannel
from rlhf_core.worker.agent_loss import GAVE_UP_S, find_loss
from rlhf_core.worker.agent_store import MemoryAgentStore
from rlhf_core.worker.nodes import Nodes
from rlhf_core.worker.signing import MessageSigner

TIMEOUT_S = 20.0


@dataclass
class Heard:
    """Agent 0's end of the channel as ``find_loss`` sees it."""

    silent_s: tuple[float, ...]
    since_pause: bool = True

    @property
    def nodes(self) -> Nodes:
        names = tuple(f"n{index}" for index in range(len(self.silent_s) + 1))
        return Nodes(names, ("127.0.0.1",) * len(names), 0)

    def silence_s(self, index: int) -> float:
        return self.silent_s[index - 1]

    def heard_since_pause(self, index: int) -> bool:
        return self.since_pause


@pytest.mark.parametrize(
    ("silent_s", "pause_s", "since_pause", "node"),
    [
        ((0.1, 0.2), 0.0, True, ""),
        ((19.9,), 0.0, True, ""),
        ((0.1, 20.1), 0.0, True, "n2"),
        ((20.1,), 0.0, True, "n1"),
        ((20.1, 20.3, 19.8), 0.0, True, "n0"),
        ((20.1, 20.3, 0.4), 0.0, True, "n1"),
        ((20.1,), GAVE_UP_S + 1, False, "n0"),
        ((20.1,), GAVE_UP_S + 1, True, "n1"),
        ((20.1,), GAVE_UP_S - 1, False, "n1"),
        ((), 0.0, True, ""),
    ],
    ids=[
        "all are heard",
        "not silent for long enough",
        "one of two",
        "the only other one",
        "no agent is heard: it is this node that is cut off",
        "two of three",
        "this one stood still, and the other went on without it",
        "it stood still long ago",
        "it stood still for too short a time to be given up",
        "alone",
    ],
)
def test_whose_node_is_given_up(silent_s: tuple[float, ...], pause_s: float, since_pause: bool, node: str) -> None:
    found = find_loss(Heard(silent_s, since_pause), TIMEOUT_S, pause_s)  # type: ignore[arg-type]
    assert (found.node if found else "") == node


def test_who_stood_still_forgives_and_who_did_not_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(agent_channel.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(agent_channel.threading.Thread, "start", lambda thread: None)
    signer = MessageSigner(b"0" * 64, "toy/1", 1)
    follower = AgentChannel(Nodes(("n0", "n1"), ("127.0.0.1",) * 2, 1), MemoryAgentStore(), signer)
    now[0] += LOST_TIMEOUT_S + 1
    assert follower.is_lost, "the control"
    follower.reset_silences()
    assert not follower.is_lost
    now[0] += LOST_TIMEOUT_S + 1
    assert follower.is_lost, "it is not heard after the pause either"
