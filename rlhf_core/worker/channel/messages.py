"""The channel between the agents of an attempt: reports to agent 0, and announcements from agent 0 to all.

Calls that may block, such as those to a store whose server is gone, run in a separate thread, so that an agent can act
while it waits for another. A single agent uses the same channel and receives its own messages.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from rlhf_core.schemas.agent_messages import NodeState, Ready
from rlhf_core.schemas.base import Schema
from rlhf_core.worker.channel.signing import MessageRefused, MessageSigner
from rlhf_core.worker.channel.store import AgentStore, AgentStoreLost
from rlhf_core.worker.liveness.pause_clock import PauseClock
from rlhf_core.worker.nodes.membership import Nodes

LOST_TIMEOUT_S = 15.0
"""Time without an answer from agent 0's store after which an agent considers agent 0 lost, in seconds."""
POLL_INTERVAL_S = 0.1
PULSE_INTERVAL_S = 0.5
"""Interval of an agent's heartbeats, in seconds. The thread that sends them never touches a file system, so a hung file
system, which may block the rest of the agent, is never mistaken for a lost node."""
SHUTDOWN_TIMEOUT_S = 10.0
"""Time that agent 0 waits for the others to receive the end of the attempt, in seconds."""

RESEND_INTERVAL_S, MAX_RESEND_INTERVAL_S = 1.0, 60.0
"""First delay before a message is resent, which doubles each time, and its upper limit, in seconds."""
NUM_RESENT = 16
"""Number of most recent messages to resend: no agent waits for older ones."""

NUM_DIFFERENCES = 64
"""Number of recent states whose times are compared with this node's clock: those of about a quarter of a minute."""

Message = TypeVar("Message", bound=Schema)


@dataclass
class _Sent:
    """A message that was sent."""

    message: str
    resend_at_s: float
    interval_s: float = RESEND_INTERVAL_S


class AgentChannel:
    """One agent's end of the channel."""

    def __init__(self, nodes: Nodes, store: AgentStore, signer: MessageSigner | None = None) -> None:
        """Join the channel.

        Args:
            signer: This agent's signer; required unless it is the only agent.

        Raises:
            ValueError: there are several nodes and no signer.
        """
        if nodes.num > 1 and signer is None:
            raise ValueError(f"found no signer, but the agents of {nodes.num} nodes must sign their messages")
        self.nodes = nodes
        self.endpoint = store.endpoint
        self._store = store
        self._signer = signer
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._outbox: dict[str, str] = {}
        self._wanted: set[str] = set()
        self._texts: dict[str, str] = {}
        self._sent: dict[str, _Sent] = {}
        self._seen: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._refusal = ""
        self._messages: dict[str, Schema] = {}
        self._changed_at: dict[str, float] = {}
        self._differences: dict[int, deque[float]] = {}
        self._answered_at = time.monotonic()
        self.clock = PauseClock()
        self._pulse_at = 0.0
        peers = range(1, nodes.num) if nodes.is_first else ()
        self._live = [f"{topic}/{one}" for one in peers for topic in ("state", "pulse")] or ["orders"]
        if nodes.num > 1:
            if nodes.is_first:
                for key in ("orders", *self._live):
                    store.set(key, "")  # existing keys can be read in one request
            threading.Thread(target=self._run, name="agent-channel", daemon=True).start()

    @property
    def leads(self) -> bool:
        """True for agent 0."""
        return self.nodes.is_first

    # -----------------------------------------------------------------------------------------------------------------
    # Sending and receiving

    def send(self, topic: str, message: Schema) -> None:
        """Send a message to agent 0, which receives its own too."""
        self._put(f"{topic}/{self.nodes.index}", message, send=not self.leads)

    def publish(self, topic: str, message: Schema) -> None:
        """Send a message to all; for agent 0."""
        self._put(topic, message, send=self.nodes.num > 1)

    def received(self, topic: str, kind: type[Message]) -> dict[int, Message]:
        """Messages received on a topic so far, by node index; for agent 0."""
        found = {index: self._get(f"{topic}/{index}", kind) for index in range(self.nodes.num)}
        return {index: message for index, message in found.items() if message is not None}

    def published(self, topic: str, kind: type[Message]) -> Message | None:
        """The message that agent 0 has published on a topic, if any."""
        return self._get(topic, kind)

    def wait(self, seconds: float) -> None:
        """Wait until a new message arrives, for at most ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    def silence_s(self, index: int) -> float:
        """Seconds since agent 0 last heard from a node, without this process's pauses; 0 before the first heartbeat."""
        received_at = self.received_at(index)
        if received_at == float("-inf") or index == self.nodes.index:
            return 0.0
        return self.clock.age_s(received_at, time.monotonic())

    def received_at(self, index: int) -> float:
        """Monotonic time at which agent 0 received a node's last heartbeat; minus infinity before the first."""
        with self._lock:
            return max(self._changed_at.get(f"{topic}/{index}", float("-inf")) for topic in ("state", "pulse"))

    def ahead_s(self, index: int) -> float:
        """Seconds by which this node's clock is ahead of another's; accurate to about a tenth of a second."""
        with self._lock:
            return min(self._differences.get(index, ()), default=0.0)

    @property
    def is_lost(self) -> bool:
        """True if agent 0 has been silent for too long while this process was running."""
        return not self.leads and self.clock.age_s(self._answered_at, time.monotonic()) > LOST_TIMEOUT_S

    def new_refusal(self) -> str:
        """A sentence on why the first refused message was refused, returned once; otherwise empty."""
        with self._lock:
            refusal, self._refusal = self._refusal, ""
        return refusal

    # -----------------------------------------------------------------------------------------------------------------
    # The end

    def close(self) -> None:
        """Sign off, or on agent 0 wait until the others have: it hosts the store and must leave last."""
        if self.nodes.num > 1:
            self.send("closed", Ready())
            deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
            while not self._all_closed() and time.monotonic() < deadline and not self.is_lost:
                self.wait(0.1)
        self._closing.set()
        self._wake.set()

    def _all_closed(self) -> bool:
        if self.leads:
            return len(self.received("closed", Ready)) == self.nodes.num
        with self._lock:
            return not self._outbox

    # -----------------------------------------------------------------------------------------------------------------
    # Keys and texts

    def _put(self, key: str, message: Schema, *, send: bool) -> None:
        with self._lock:
            self._messages[key] = message
            if send:
                self._outbox[key] = message.model_dump_json()
        self._wake.set()

    def _get(self, key: str, kind: type[Message]) -> Message | None:
        with self._lock:
            message, text = self._messages.get(key), self._texts.get(key)
            if message is None and text is None and self.nodes.num > 1 and key not in self._live:
                self._wanted.add(key)
        if message is None and text:
            message = self._parse(key, text, kind)
        assert message is None or isinstance(message, kind)
        return message

    def _parse(self, key: str, text: str, kind: type[Message]) -> Message | None:
        """Parse a message and cache the result: callers poll until every agent has reported."""
        try:
            message = kind.model_validate_json(text)
        except ValidationError:
            return None  # sent by another version of this program: ignored
        with self._lock:
            if self._texts.get(key) == text:
                self._messages[key] = message
        return message

    # -----------------------------------------------------------------------------------------------------------------
    # The thread that accesses the store

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(POLL_INTERVAL_S)
            self._wake.clear()
            try:
                self._exchange()
            except (AgentStoreLost, ValueError):
                self._closing.wait(POLL_INTERVAL_S)
            else:
                self._answered_at = time.monotonic()

    def _exchange(self) -> None:
        if not self.leads and time.monotonic() >= self._pulse_at:
            self._send(f"pulse/{self.nodes.index}", str(time.monotonic_ns()))
            self._pulse_at = time.monotonic() + PULSE_INTERVAL_S
        with self._lock:
            outgoing = dict(self._outbox)
        for key, content in outgoing.items():
            self._send(key, content)
            with self._lock:
                if self._outbox.get(key) == content:
                    del self._outbox[key]
        self._resend()
        with self._lock:
            wanted = list(self._wanted)
        # Two requests: the keys polled all the time always exist, so theirs is answered at once.
        found = [*zip(self._live, self._store.get(self._live), strict=True)]
        found += zip(wanted, self._store.get(wanted), strict=True)
        new = {key: text for key, message in found if message and (text := self._verified(key, message)) is not None}
        with self._changed:
            for key, text in new.items():
                self._texts[key] = text
                self._messages.pop(key, None)
                self._changed_at[key] = time.monotonic()
                self._wanted.discard(key)
            self._changed.notify_all()
        for key in new:
            self._measure_clock(key)

    def _send(self, key: str, text: str) -> None:
        assert self._signer is not None
        message = self._signer.sign(key, text)
        self._store.set(key, message)
        if key not in (f"state/{self.nodes.index}", f"pulse/{self.nodes.index}"):  # these are sent afresh all the time
            self._sent.pop(key, None)
            self._sent[key] = _Sent(message, time.monotonic() + RESEND_INTERVAL_S)
            if len(self._sent) > NUM_RESENT:
                del self._sent[next(iter(self._sent))]

    def _resend(self) -> None:
        """Resend recent messages; an agent that has already read one recognises the duplicate."""
        for key, sent in self._sent.items():
            if time.monotonic() >= sent.resend_at_s:
                self._store.set(key, sent.message)
                sent.interval_s = min(2 * sent.interval_s, MAX_RESEND_INTERVAL_S)
                sent.resend_at_s = time.monotonic() + sent.interval_s

    def _verified(self, key: str, message: str) -> str | None:
        """The text of a new message; None if it is a duplicate or refused."""
        if message in (self._seen.get(key), self._refused.get(key)):
            return None
        assert self._signer is not None
        try:
            text = self._signer.verify(key, self._sender(key), message)
        except MessageRefused as why:
            if not self._refused:
                with self._lock:
                    self._refusal = (
                        f"a message in the store of the agents, under {key!r}, was rejected: {why}. Another program "
                        "may have written it. Further such messages are rejected silently"
                    )
            self._refused[key] = message
            return None
        self._seen[key] = message
        return text

    def _sender(self, key: str) -> int:
        """The agent expected to write a key: for messages to agent 0, the number at the end of the key."""
        index = key.rpartition("/")[2]
        return int(index) if self.leads and index.isdecimal() else 0

    def _measure_clock(self, key: str) -> None:
        """Record a clock difference: the smallest of the last ones belongs to the fastest message. Older ones do not
        count, because clocks drift and are set."""
        topic, _, index = key.partition("/")
        state = self._get(key, NodeState) if topic == "state" else None
        if state is not None:
            with self._lock:
                recent = self._differences.setdefault(int(index), deque(maxlen=NUM_DIFFERENCES))
                recent.append(time.time() - state.wall_s)
