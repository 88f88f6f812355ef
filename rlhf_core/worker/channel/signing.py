"""Signed messages of the agents: every program that reaches the store of an attempt can write there, only its agents
are believed.

A message carries its sender, a counter and an HMAC (RFC 2104, SHA-256) over the attempt, the key in the store, sender,
counter and text. The secret is random, one for each attempt, in a file that only the owner of the run may read. A
counter that is not above the last one of its key is a replay. Texts are not encrypted.
"""

import hashlib
import hmac
import itertools
import re
import time

MAX_MESSAGE_BYTES = 4 << 20
"""Longest message that is looked at. The longest of our own carries the ends of the logs of one node, 32 KiB each."""

_MESSAGE = re.compile(r"rlhf-1 (\d{1,6}) (\d{1,20}) ([0-9a-f]{64})\n(.*)", re.DOTALL | re.ASCII)


class MessageRefused(Exception):
    """A text in the store that is no new message of the agent it would have to come from."""


class MessageSigner:
    """Signs the messages of one agent, and verifies those of the others."""

    def __init__(self, secret: bytes, marker: str, sender: int) -> None:
        """Take part in an attempt.

        Args:
            secret: That of the attempt.
            marker: Run and attempt.
            sender: Index of this agent's node.
        """
        self.marker = marker
        self._secret = secret
        self._sender = sender
        # An agent that is started again goes on above what the one before has sent.
        self._counter = itertools.count(time.time_ns())
        self._accepted: dict[str, int] = {}

    def mark(self, endpoint: str) -> str:
        """Proof that the store at an endpoint is that of this attempt; it cannot be shown at another one."""
        return f"{self.marker} {self._code('mark', 0, 0, endpoint)}"

    def sign(self, key: str, text: str) -> str:
        """The message that carries a text under a key of the store."""
        counter = next(self._counter)
        return f"rlhf-1 {self._sender} {counter} {self._code(key, self._sender, counter, text)}\n{text}"

    def verify(self, key: str, sender: int, message: str) -> str:
        """The text of a message that was found under a key.

        Args:
            sender: Whose message it has to be.

        Raises:
            MessageRefused: it is too long, not signed with the secret of the attempt, of another agent, made for
                another key, or no newer than one that was accepted before.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise MessageRefused(f"{len(message)} characters are more than any agent sends ({MAX_MESSAGE_BYTES})")
        parsed = _MESSAGE.fullmatch(message)
        if parsed is None:
            raise MessageRefused("it is not signed")
        counter, text = int(parsed[2]), parsed[4]
        expected = self._code(key, sender, counter, text)
        if int(parsed[1]) != sender or not hmac.compare_digest(parsed[3], expected):
            raise MessageRefused(f"its signature is not that of agent {sender} of this attempt for this key")
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
