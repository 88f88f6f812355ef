"""Loss of an agent: the time after which agent 0 gives up a silent node, and the choice of the node to give up.

Two nodes that cannot reach each other cannot tell which of them is cut off. Among more nodes, it is the one that hears
none of the others.
"""

from dataclasses import dataclass

from rlhf_core.worker.channel.messages import LOST_TIMEOUT_S, AgentChannel

GAVE_UP_S = 0.6 * LOST_TIMEOUT_S
"""Pause of agent 0 after which the others may have given it up, with a margin for the age of its last heartbeat."""
DELIVERY_TIMEOUT_S = 3.0
"""Time after a pause in which messages sent before its end may still arrive; these do not end a silence."""


@dataclass(frozen=True)
class Loss:
    """A node to give up."""

    node: str
    message: str


def find_loss(channel: AgentChannel, timeout_s: float) -> Loss | None:
    """The node to give up because agents have been silent for too long, if any.

    Args:
        channel: Agent 0's end of the channel.
        timeout_s: Longest silence allowed, in seconds.
    """
    others = range(1, channel.nodes.num)
    silent_s = {index: channel.silence_s(index) for index in others}
    lost = [index for index in others if silent_s[index] > timeout_s]
    if not lost:
        return None
    own, names = channel.nodes.name, channel.nodes.names
    pause_s = channel.clock.longest_pause_s(since_s=max(map(channel.received_at, others)) - DELIVERY_TIMEOUT_S)
    if pause_s > GAVE_UP_S:
        return Loss(own, f"the agent of {own} was suspended for {pause_s:.0f} s and heard no other agent since")
    if len(others) > 1 and min(silent_s.values()) > timeout_s / 2:
        return Loss(own, f"the agent of {own} heard no other agent for {min(silent_s.values()):.0f} s")
    first = lost[0]
    return Loss(names[first], f"the agent of {names[first]} has been silent for {silent_s[first]:.0f} s")
