"""Signed messages: a message of an agent is accepted once, and nothing else is."""

import stat
from pathlib import Path

import pytest

from rlhf_core.files.whole import shared_secret
from rlhf_core.worker.channel.signing import MAX_MESSAGE_BYTES, MessageRefused, MessageSigner

SECRET, OTHER = b"0" * 64, b"1" * 64


def test_messages_are_read_by_the_other_agents_in_order() -> None:
    sender, reader = MessageSigner(SECRET, "toy/1", 1), MessageSigner(SECRET, "toy/1", 0)
    for text in ("", "{}", "two\nlines é \ud800"):
        assert reader.verify("state/1", 1, sender.sign("state/1", text)) == text


def test_a_restarted_agent_continues_with_higher_numbers() -> None:
    reader = MessageSigner(SECRET, "toy/1", 0)
    for _ in range(2):
        sender = MessageSigner(SECRET, "toy/1", 1)
        reader.verify("state/1", 1, sender.sign("state/1", "{}"))


def test_everything_else_is_refused() -> None:
    sender, reader = MessageSigner(SECRET, "toy/1", 1), MessageSigner(SECRET, "toy/1", 0)
    genuine = sender.sign("state/1", '{"restart": 0}')
    cases = {
        "": "not signed",
        '{"restart": 0}': "not signed",
        "rlhf-1 1 1 " + "0" * 64 + "\n{}": "not signed by agent 1",
        genuine.replace('"restart": 0', '"restart": 1'): "not signed by agent 1",
        MessageSigner(OTHER, "toy/1", 1).sign("state/1", "{}"): "not signed by agent 1",
        MessageSigner(SECRET, "toy/2", 1).sign("state/1", "{}"): "not signed by agent 1",
        MessageSigner(SECRET, "toy/1", 2).sign("state/1", "{}"): "not signed by agent 1",
        sender.sign("pulse/1", "{}"): "not signed by agent 1",
        sender.sign("state/1", "x" * MAX_MESSAGE_BYTES): "exceed the limit for agents",
    }
    for message, words in cases.items():
        with pytest.raises(MessageRefused, match=words):
            reader.verify("state/1", 1, message)
    # Negative control: none of them has invalidated the genuine message, which counts once.
    assert reader.verify("state/1", 1, genuine) == '{"restart": 0}'
    with pytest.raises(MessageRefused, match="copy of an older message"):
        reader.verify("state/1", 1, genuine)


def test_the_key_is_created_once_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "attempts" / "1" / "key"
    assert shared_secret(path) == shared_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert shared_secret(path.with_name("other")) != shared_secret(path)
    path.write_text("short", encoding="utf-8")
    with pytest.raises(ValueError, match="found 5 bytes, expected 64 hex digits"):
        shared_secret(path)
