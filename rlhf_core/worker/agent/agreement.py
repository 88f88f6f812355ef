"""Agreement of all agents on the next step: each reports to agent 0, which decides for all.

Waits are generators that yield while there is nothing to do, so that one thread can wait for several groups of workers
at once.
"""

import time
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

from rlhf_core.schemas.agent_messages import AgreedStep, Orders
from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.worker.channel.messages import AgentChannel, Message
from rlhf_core.worker.supervision.external_requests import ExternalRequests

LAST_STATE_TIMEOUT_S = 5.0
"""Time that agent 0 waits for the other agents' last reports at the end of the attempt."""
POLL_INTERVAL_S = 0.1

Result = TypeVar("Result")


class Agreement:
    """One agent's side of the agreement protocol."""

    def __init__(self, channel: AgentChannel, requests: ExternalRequests, take_turn: Callable[[], None]) -> None:
        """Args:
        take_turn: Called all the time during a wait of this object, to show that the thread is not stuck.
        """
        self._channel = channel
        self._requests = requests
        self._take_turn = take_turn

    def agree(
        self,
        topic: str,
        message: Schema,
        kind: type[Message],
        decide: Callable[[Mapping[int, Message]], AgreedStep],
        timeout_s: float = float("inf"),
    ) -> Generator[None, None, AgreedStep]:
        """Report to agent 0, which decides once it has every agent's report; every node receives the same step.

        Args:
            timeout_s: Time that agent 0 waits for agents that are alive but do not report.
        """
        channel = self._channel
        channel.send(topic, message)
        if not channel.leads:
            return (yield from self._await_step(f"step/{topic}"))
        deadline = time.monotonic() + timeout_s
        latest_s = float("inf")
        while not self._is_complete(topic, kind):
            now_s = time.monotonic()
            if self._requests.to_end:
                latest_s = min(latest_s, now_s + LAST_STATE_TIMEOUT_S)
            if now_s > min(latest_s, deadline):
                break
            yield
        step = decide(channel.received(topic, kind))
        channel.publish(f"step/{topic}", step)
        return step

    def _is_complete(self, topic: str, kind: type[Message]) -> bool:
        """True if every node has reported, not counting one that was given up."""
        received = self._channel.received(topic, kind)
        missing = {name for index, name in enumerate(self._channel.nodes.names) if index not in received}
        return missing <= {self._requests.broken_node}

    def _await_step(self, topic: str) -> Generator[None, None, AgreedStep]:
        """The decision of agent 0, or the end of the attempt if agent 0 is no longer deciding."""
        while True:
            step = self._channel.published(topic, AgreedStep) or self._forced_end()
            if step is not None:
                return step
            yield

    def _forced_end(self) -> AgreedStep | None:
        """The end of the attempt, if agent 0 has ordered it or is no longer deciding."""
        orders, broken = self._channel.published("orders", Orders), self._requests.broken
        if orders is not None and orders.over is not None:
            return orders.over
        return AgreedStep(action="end", message=broken, kind=FailureKind.AGENT_KILLED) if broken else None

    def complete(self, waiting: Generator[None, None, Result]) -> Result:
        """Run a single wait to completion."""
        while True:
            self._take_turn()
            try:
                next(waiting)
            except StopIteration as end:
                result: Result = end.value
                return result
            self._channel.wait(POLL_INTERVAL_S)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition, for at most ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            self._take_turn()
            self._channel.wait(POLL_INTERVAL_S)

    def is_ending(self) -> bool:
        """True once the attempt is to end; polled by other waits of the same thread."""
        self._take_turn()
        return self._requests.to_end
