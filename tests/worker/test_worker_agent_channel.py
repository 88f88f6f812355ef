"""The store in which agents meet: recognised by its marker alone; a foreign store is never accepted."""

import socket
import time

import pytest
from agents_in_memory import channels_of, lone_channel, nodes_of
from fork_server import fork_server
from process_tools import until

from rlhf_core.run_dir.run import new_run_id
from rlhf_core.schemas.agent_messages import AgreedStep, NodeState, Ready
from rlhf_core.worker.channel import messages
from rlhf_core.worker.channel import store as agent_store
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.channel.signing import MessageSigner
from rlhf_core.worker.channel.store import (
    AgentStoreLost,
    candidate_ports,
    host_agent_store,
    join_agent_store,
)

pytestmark = pytest.mark.training


@pytest.fixture
def marker() -> str:
    return f"{new_run_id('toy')}/1"


SECRET = b"0" * 64


def signer(marker: str, index: int = 0, secret: bytes = SECRET) -> MessageSigner:
    return MessageSigner(secret, marker, index)


def test_the_offset_of_a_clock_follows_it() -> None:
    """Clocks drift, and a wrong one is set: exits are ordered by the offset of today."""
    channel = lone_channel()
    for behind_s in (0.0, 120.0, 60.0):
        for _ in range(messages.NUM_DIFFERENCES):
            channel.send("state", NodeState(wall_s=time.time() - behind_s))
            channel._measure_clock("state/0")
        assert channel.ahead_s(0) == pytest.approx(behind_s, abs=1.0)


def asleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def test_ports_follow_from_the_job_and_differ_between_jobs(marker: str) -> None:
    ports = candidate_ports(marker)
    assert ports == candidate_ports(marker)
    assert ports != candidate_ports(marker.replace("/1", "/2"))
    assert 6 <= len(set(ports)) <= 8
    assert all(20000 <= port < 30000 for port in ports)


def test_a_value_is_found_even_if_the_first_port_is_taken(marker: str) -> None:
    with socket.socket() as stranger:
        stranger.bind(("", candidate_ports(marker)[0]))
        stranger.listen()
        hosted = host_agent_store("127.0.0.1", "127.0.0.1", signer(marker))
        assert hosted.endpoint.endswith(str(candidate_ports(marker)[1]))
        joined = join_agent_store("127.0.0.1", signer(marker, 1), asleep, 20.0)
        joined.set("a", "1")
        assert hosted.get(["a", "b"]) == ["1", None]
        assert hosted.get(["a"]) == ["1"]


def test_the_store_of_another_attempt_is_not_used(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recently ended attempt may still hold the port derived from another attempt's name."""
    ports = candidate_ports(marker)[:1]
    monkeypatch.setattr(agent_store, "candidate_ports", lambda _: ports)
    hosted = host_agent_store("127.0.0.1", "127.0.0.1", signer("someone-else/1"))
    with pytest.raises(AgentStoreLost, match="belongs to someone-else/1"):
        join_agent_store("127.0.0.1", signer(marker, 1), asleep, 1.0)
    with pytest.raises(AgentStoreLost, match="not its key"):
        join_agent_store("127.0.0.1", signer("someone-else/1", 1, b"1" * 64), asleep, 1.0)
    # Negative control: with its own marker it is used.
    assert join_agent_store("127.0.0.1", signer("someone-else/1", 1), asleep, 10.0).endpoint == hosted.endpoint


def test_an_agent_that_must_end_stops_searching(marker: str) -> None:
    began = time.monotonic()
    with pytest.raises(AgentStoreLost, match="the attempt is ending"):
        join_agent_store("127.0.0.1", signer(marker, 1), lambda _: True, 60.0)
    assert time.monotonic() - began < 30


def test_two_agents_exchange_messages_and_part() -> None:
    first, second = channels_of("a", "b")
    second.send("hello", AgreedStep(action="end", message="from b"))
    first.send("hello", AgreedStep(action="end", message="from a"))
    until(lambda: len(first.received("hello", AgreedStep)) == 2)
    assert [step.message for _, step in sorted(first.received("hello", AgreedStep).items())] == ["from a", "from b"]
    assert second.published("word", AgreedStep) is None
    first.publish("word", AgreedStep(action="end", message="all"))
    until(lambda: second.published("word", AgreedStep))
    second.close()
    first.close()


def test_a_single_agent_receives_its_own_messages() -> None:
    alone = lone_channel()
    alone.send("hello", Ready())
    alone.publish("word", AgreedStep(action="end", message="me"))
    assert alone.received("hello", Ready) == {0: Ready()}
    assert alone.published("word", AgreedStep) == AgreedStep(action="end", message="me")
    assert not alone.is_lost
    alone.close()


def host(marker: str) -> None:
    """Be agent 0, in whose process the store lives."""
    store = host_agent_store("127.0.0.1", "", signer(marker))
    store.set("orders", "")
    time.sleep(600)


def test_agent_0_is_lost_when_its_process_dies(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the control: it is not lost while its process lives."""
    monkeypatch.setattr(messages, "LOST_TIMEOUT_S", 4.0)
    agent_0 = fork_server().Process(target=host, args=(marker,))
    agent_0.start()
    try:
        own = signer(marker, 1)
        store = join_agent_store("127.0.0.1", own, asleep, 60.0)
        follower = AgentChannel(nodes_of("a", "b", index=1), store, own)
        time.sleep(6.0)
        assert not follower.is_lost
        agent_0.kill()
        until(lambda: follower.is_lost)
        follower.close()
    finally:
        agent_0.kill()
        agent_0.join()
