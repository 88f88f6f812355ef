"""Message signing: any program that can reach an attempt's store can write to it, but only its agents are trusted.

A message carries its sender, a counter and an HMAC (RFC 2104, SHA-256) over the attempt, the store key, sender, counter
and text. The secret is random, one per attempt, in a file that only the owner of the run may read. A counter no higher
than the key's last one marks a replay. Texts are not encrypted.
"""

import hashlib
import hmac
import itertools
import re
import time

MAX_MESSAGE_BYTES = 4 << 20
"""Longest message accepted. The longest that agents send carries the log tails of one node, 32 KiB each."""

_MESSAGE = re.compile(r"rlhf-1 (\d{1,6}) (\d{1,20}) ([0-9a-f]{64})\n(.*)", re.DOTALL | re.ASCII)


class MessageRefused(Exception):
    """Raised for a text in the store that is not a new message from the expected agent."""


class MessageSigner:
    """Signs one agent's messages and verifies those of the others."""

    def __init__(self, secret: bytes, marker: str, sender: int) -> None:
        """Create the signer of one agent.

        Args:
            secret: Secret of the attempt.
            marker: Run and attempt.
            sender: Index of this agent's node.
        """
        self.marker = marker
        self._secret = secret
        self._sender = sender
        # A restarted agent must continue above the counters that its predecessor used.
        self._counter = itertools.count(time.time_ns())
        self._accepted: dict[str, int] = {}

    def mark(self, endpoint: str) -> str:
        """Proof that the store at an endpoint belongs to this attempt; it is not valid for any other endpoint."""
        return f"{self.marker} {self._code('mark', 0, 0, endpoint)}"

    def sign(self, key: str, text: str) -> str:
        """The signed message that carries a text under a store key."""
        counter = next(self._counter)
        return f"rlhf-1 {self._sender} {counter} {self._code(key, self._sender, counter, text)}\n{text}"

    def verify(self, key: str, sender: int, message: str) -> str:
        """The text of a message found under a store key.

        Args:
            sender: Index of the node that must have sent it.

        Raises:
            MessageRefused: it is too long, not signed with the attempt's secret, from another agent, made for another
                key, or no newer than one already accepted.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise MessageRefused(f"{len(message)} characters exceed the limit for agents ({MAX_MESSAGE_BYTES})")
        parsed = _MESSAGE.fullmatch(message)
        if parsed is None:
            raise MessageRefused("it is not signed")
        counter, text = int(parsed[2]), parsed[4]
        expected = self._code(key, sender, counter, text)
        if int(parsed[1]) != sender or not hmac.compare_digest(parsed[3], expected):
            raise MessageRefused(f"it is not signed by agent {sender} of this attempt for this key")
        if counter <= self._accepted.get(key, -1):
            raise MessageRefused("it is a copy of an older message")
        self._accepted[key] = counter
        return text

    def _code(self, key: str, sender: int, counter: int, text: str) -> str:
        code = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in (self.marker, key, str(sender), str(counter), text):
            content = part.encode("utf-8", errors="surrogatepass")
            code.update(len(content).to_bytes(8, "big") + content)
        return code.hexdigest()
