"""The publisher of a controller: times at which the picture is drawn, and no repetition of unchanged artifacts."""

import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
from control_fakes import Clock, FakeAgent
from harness import ControllerHarness

from flows.publishing import publisher
from flows.publishing.artifacts import CURVES_INTERVAL_S, Publication
from flows.publishing.events import FlowRunRef
from flows.publishing.publisher import Publisher
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.base import utc_now

FLOW_RUN = FlowRunRef("0d6f2a5e-0000-0000-0000-000000000000", "a flow run")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of the artifacts of each publication; nothing is really sent without a server."""
    found: list[list[str]] = []

    def publish(publication: Publication) -> list[str]:
        found.append([one.name for one in publication.artifacts])
        return []

    monkeypatch.setattr(publisher, "publish", publish)
    monkeypatch.setattr(publisher, "server_answers", lambda: True)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(publisher, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    return made


def at_work(harness: ControllerHarness, run_dir: RunDir) -> Publisher:
    return Publisher(harness.controller(run_dir), FLOW_RUN, logging.getLogger("test"), pytest.fail)


def test_the_picture_is_drawn_at_once_then_rarely_and_at_the_end(
    harness: ControllerHarness, sent: list[list[str]], clock: Clock
) -> None:
    run_dir = harness.run()
    agent, made = FakeAgent(run_dir), at_work(harness, run_dir)
    agent.begin()
    made._publish(last=False)
    assert sent.pop() == ["progress"], "no step yet"
    agent.step(1)
    made._publish(last=False)
    assert sent.pop() == ["progress", "curves"]
    clock.now += CURVES_INTERVAL_S - 1
    agent.step(2)
    made._publish(last=False)
    assert sent.pop() == ["progress"]
    clock.now += 1
    made._publish(last=False)
    assert sent.pop() == ["curves"]
    agent.step(3)
    made._publish(last=True)
    assert "curves" in sent.pop()


def test_a_run_of_days_is_drawn_less_often(
    harness: ControllerHarness, sent: list[list[str]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty controllers share a machine, and in half a minute of three days nothing changes visibly."""
    run_dir = harness.run()
    agent, made = FakeAgent(run_dir), at_work(harness, run_dir)
    monkeypatch.setattr(publisher, "utc_now", lambda: utc_now() + timedelta(days=3))
    agent.begin()
    agent.step(1)
    made._publish(last=False)
    for hours, names in ((1.0, ["progress"]), (0.5, ["curves"])):
        clock.now += hours * 3600
        agent.step(round(clock.now))
        made._publish(last=False)
        assert set(names) <= set(sent[-1])
        assert ("curves" in sent[-1]) is (names == ["curves"])


def test_unchanged_artifacts_are_not_sent_again(
    harness: ControllerHarness, sent: list[list[str]], clock: Clock
) -> None:
    run_dir = harness.run()
    made = at_work(harness, run_dir)
    made._publish(last=False)
    made._publish(last=False)
    assert sent == [["progress"]]
    made.title = "preflight"
    made._publish(last=False)
    assert sent == [["progress"], ["progress"]], "the control"


def test_artifacts_refused_by_the_server_are_sent_again(
    harness: ControllerHarness, sent: list[list[str]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = harness.run()
    FakeAgent(run_dir).begin()
    made = at_work(harness, run_dir)
    with monkeypatch.context() as away:
        away.setattr(publisher, "server_answers", lambda: False)
        with pytest.raises(ConnectionError):
            made._publish(last=False)
    assert sent == []
    made._publish(last=False)
    assert sent == [["progress"]]
