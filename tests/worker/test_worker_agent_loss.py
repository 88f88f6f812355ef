"""Choice of the node that is declared lost when agents are silent on the network."""

from dataclasses import dataclass, field

import pytest
from agents_in_memory import channels_of, nodes_of

from rlhf_core.worker.channel import messages
from rlhf_core.worker.channel.messages import LOST_TIMEOUT_S
from rlhf_core.worker.liveness.pause_clock import PauseClock
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.supervision.agent_loss import GAVE_UP_S, find_loss

TIMEOUT_S = 20.0
LONG_S = GAVE_UP_S + 1


@dataclass
class Silences:
    """Agent 0's end of the channel, as ``find_loss`` uses it."""

    silent_s: tuple[float, ...]
    pauses: tuple[tuple[float, float], ...] = ()
    """Begin and end of pauses of agent 0, in seconds before now, at 0."""
    clock: PauseClock = field(default_factory=PauseClock)

    def __post_init__(self) -> None:
        for begin_s, end_s in self.pauses:
            self.clock.tick(-begin_s)
            self.clock.tick(-end_s)

    @property
    def nodes(self) -> Nodes:
        return nodes_of(*(f"n{index}" for index in range(len(self.silent_s) + 1)))

    def silence_s(self, index: int) -> float:
        return self.silent_s[index - 1]

    def received_at(self, index: int) -> float:
        return -self.silent_s[index - 1]


@pytest.mark.parametrize(
    ("silent_s", "pauses", "node"),
    [
        ((0.1, 0.2), (), ""),
        ((19.9,), (), ""),
        ((0.1, 20.1), (), "n2"),
        ((20.1,), (), "n1"),
        ((20.1, 20.3, 19.8), (), "n0"),
        ((20.1, 20.3, 0.4), (), "n1"),
        ((20.1,), ((LONG_S + 20, 20),), "n0"),
        ((20.1,), ((LONG_S + 20.5, 20.5),), "n0"),
        ((25.1,), ((LONG_S + 25, 25), (24, 20)), "n0"),
        ((20.1,), ((LONG_S + 30, 30),), "n1"),
        ((20.1,), ((GAVE_UP_S + 19, 20),), "n1"),
        ((), (), ""),
    ],
    ids=[
        "all are heard",
        "not silent for long enough",
        "one of two",
        "the only other one",
        "no agent is heard: it is this node that is cut off",
        "two of three",
        "this one stood still, and the other went on without it",
        "the other's last message was sent meanwhile, and came right after it",
        "it stood still for a moment more",
        "it stood still long ago",
        "it stood still for too short a time to be given up",
        "alone",
    ],
)
def test_which_node_is_declared_lost(
    silent_s: tuple[float, ...], pauses: tuple[tuple[float, float], ...], node: str
) -> None:
    found = find_loss(Silences(silent_s, pauses), TIMEOUT_S)  # type: ignore[arg-type]
    assert (found.node if found else "") == node


def test_silence_during_a_pause_of_the_agent_itself_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(messages.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(messages.threading.Thread, "start", lambda thread: None)
    _, follower = channels_of("n0", "n1")
    assert not follower.is_lost
    now[0] += LOST_TIMEOUT_S + 1
    assert not follower.is_lost, "it was paused: the clock did not tick"
    for _ in range(int(LOST_TIMEOUT_S) + 1):
        now[0] += 1
        follower.clock.tick(now[0])
    assert follower.is_lost, "it is silent after the pause too"
