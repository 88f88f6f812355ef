"""Messages sent by a real Prefect server to a real receiver."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sites
from http_stand_in import QuietHandler, serving
from prefect.events import emit_event

from flows import notify, reconcile
from flows.deployments import registration, work_pool
from flows.notify import PREFIX, register, send_test
from flows.publishing.events import CANCELLED_OUTSIDE
from flows.server.clients import api_client
from rlhf_core.config.site import Site, load_site
from rlhf_core.errors import BadConfig, PrefectUnavailable
from rlhf_core.schemas.site import NotifySite, Occasion

SECRET = "T0KEN-that-nobody-may-see"


@dataclass
class Receiver:
    """Requests received at an address."""

    url: str
    status: int = 200
    bodies: list[str] = field(default_factory=list)

    def until(self, number: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 300
        while len(self.bodies) < number:
            assert time.monotonic() < deadline, self.bodies
            time.sleep(0.1)
        return [json.loads(body) for body in self.bodies]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(QuietHandler):
        def do_POST(self) -> None:
            got.bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(got.status)
            self.end_headers()

    with serving(Handler) as port:
        got = Receiver(f"http://127.0.0.1:{port}/hooks/{SECRET}")
        yield got


@pytest.fixture
def site_of(tmp_path_factory: pytest.TempPathFactory, real_prefect: sites.Site) -> Iterator[Callable[..., Site]]:
    site = load_site({"RLHF_HOME": str(tmp_path_factory.mktemp("site"))})

    def make(url: str, *on: Occasion) -> Site:
        return replace(site, notify=NotifySite(webhook_url=url, on=on))

    with real_prefect.in_use():
        yield make
        register(make(""))


def happens(event: str, **payload: str) -> None:
    emit_event(event, {"prefect.resource.id": f"rlhf.run.{payload.get('run_id', 'x')}"}, payload=payload)


def automations() -> list[Any]:
    with api_client() as client:
        return [one for one in client.read_automations() if one.name.startswith(PREFIX)]


def test_each_occasion_gives_one_message_with_its_content(site_of: Callable[..., Site], receiver: Receiver) -> None:
    register(site_of(receiver.url, "failed", "completed", "cancelled", "incident", "approval"))
    awkward = 'it said "no"\nand {{ more }} <b>'
    happens("rlhf.run.failed", run_id="a-1", name="a", owner="ada", state="failed", message=awkward, url="http://ui/1")
    happens("rlhf.run.completed", run_id="b-1", state="completed", message="", url="")
    happens("rlhf.run.cancelled", run_id="c-1")
    happens("rlhf.incident.node_lost", run_id="d-1", failure_kind="node_lost", message="n3 is gone", step="7")
    happens("rlhf.promotion.waiting", run_id="e-1", message="gain +0.7", url="http://ui/5")
    happens("rlhf.promotion.approved", run_id="e-1")  # no message was requested
    happens("rlhf.run.training", run_id="f-1")
    happens("rlhf.run.failed", run_id="g-1")  # a second one of the same kind, at once
    found = {one["run_id"]: one for one in receiver.until(6)}
    assert set(found) == {"a-1", "b-1", "c-1", "d-1", "e-1", "g-1"}
    advice = "rlhf show a-1 tells more; once it is fixed: rlhf resume a-1"
    assert found["a-1"]["text"] == f"run a-1 of ada failed: {awkward}\n{advice}\nhttp://ui/1"
    assert found["a-1"]["message"] == awkward
    assert (found["a-1"]["event"], found["a-1"]["owner"]) == ("rlhf.run.failed", "ada")
    assert found["b-1"]["text"] == "run b-1 completed"
    assert found["c-1"]["text"] == "run c-1 was cancelled\nto continue: rlhf resume c-1"
    assert found["d-1"]["text"] == "run d-1 had an incident: node_lost: n3 is gone\nrlhf show d-1 tells more"
    assert found["d-1"]["step"] == "7"
    answers = "answer with rlhf approve e-1 or rlhf refuse e-1"
    assert found["e-1"]["text"] == f"the model of run e-1 waits for approval: gain +0.7\n{answers}\nhttp://ui/5"
    assert len(receiver.bodies) == 6


def test_labels_select_among_the_events_of_a_name(site_of: Callable[..., Site], receiver: Receiver) -> None:
    register(site_of(receiver.url, "cancelled_outside", "completed"))
    requested, outside = "rlhf.run.requested", "rlhf.run.outside"
    emit_event("rlhf.run.cancelled", {"prefect.resource.id": requested}, payload={"run_id": "a-1"})
    resource = {"prefect.resource.id": outside, **CANCELLED_OUTSIDE}
    emit_event("rlhf.run.cancelled", resource, payload={"run_id": "b-1", "owner": "ada"})
    happens("rlhf.run.completed", run_id="c-1")
    assert {one["run_id"] for one in receiver.until(2)} == {"b-1", "c-1"}


def test_values_that_are_not_text_do_not_break_a_message(site_of: Callable[..., Site], receiver: Receiver) -> None:
    register(site_of(receiver.url, "failed"))
    payload = {"run_id": 7, "step": None, "message": {"a": [1]}}
    emit_event("rlhf.run.failed", {"prefect.resource.id": "rlhf.run.7"}, payload=payload)
    (body,) = receiver.until(1)
    assert body["run_id"] == "7"


def test_the_automation_is_registered_once_and_follows_the_settings(
    site_of: Callable[..., Site], receiver: Receiver
) -> None:
    first = register(site_of(receiver.url, "failed", "completed"))
    assert register(site_of(receiver.url, "failed", "completed")) == first
    assert (
        sorted(one.name for one in automations())
        == first
        == [f"{PREFIX}{on}" for on in ("completed", "failed", "test")]
    )
    with api_client() as client:
        (failed,) = [one for one in automations() if one.name.endswith("failed")]
        client.pause_automation(failed.id)
    register(site_of(receiver.url, "failed", "approval"))
    assert {one.name: one.enabled for one in automations()} == {
        f"{PREFIX}approval": True,
        f"{PREFIX}failed": False,
        f"{PREFIX}test": True,
    }
    assert register(site_of("")) == []
    assert automations() == []
    with api_client() as client:
        assert [one for one in client.read_block_documents() if one.name == notify.BLOCK] == []


def test_a_changed_address_is_used(site_of: Callable[..., Site], receiver: Receiver) -> None:
    register(site_of("http://127.0.0.1:9/old", "failed"))
    register(site_of(receiver.url, "failed"))
    assert send_test(site_of(receiver.url)) == "HTTP status 200"
    (body,) = receiver.until(1)
    assert body["text"] == "a test message of rlhf-flows: if you can read this, it arrives"


def test_an_unreachable_address_is_reported(site_of: Callable[..., Site], real_prefect: sites.Site) -> None:
    site = site_of(f"http://127.0.0.1:9/{SECRET}", "failed")
    register(site)
    with pytest.raises(PrefectUnavailable, match="was not sent: Webhook call failed") as error:
        send_test(site)
    assert SECRET not in str(error.value)


def test_a_refusing_address_is_reported(site_of: Callable[..., Site], receiver: Receiver) -> None:
    receiver.status = 404
    site = site_of(receiver.url, "failed")
    register(site)
    with pytest.raises(PrefectUnavailable, match="refused with HTTP status 404"):
        send_test(site)


def test_the_secret_is_nowhere_in_plain_text(
    site_of: Callable[..., Site], receiver: Receiver, real_prefect: sites.Site
) -> None:
    site = site_of(receiver.url, "failed")
    register(site)
    send_test(site)
    files = [path for path in real_prefect.home.rglob("*") if path.is_file()]
    assert any(path.name.startswith("prefect.db") for path in files)
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    assert any(notify.BLOCK.encode() in path.read_bytes() for path in files), "negative control: it would be found"


@pytest.mark.parametrize("address", ["hooks.example.org/x", "ftp://example.org", "https:///x", "https://["])
def test_an_invalid_address_is_refused(site_of: Callable[..., Site], address: str) -> None:
    with pytest.raises(BadConfig, match="RLHF_NOTIFY_WEBHOOK_URL") as error:
        register(site_of(address, "failed"))
    assert address not in str(error.value)


def test_a_site_without_notifications_cannot_be_tested(site_of: Callable[..., Site]) -> None:
    with pytest.raises(BadConfig, match=r"notify\.webhook_url is empty"):
        send_test(site_of(""))


def test_a_worker_starts_without_its_notifications(
    site_of: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a wrong address would keep all runs from starting, and those that wait for adoption."""
    for module, name in ((work_pool, "_set_up_pool"), (registration, "register_presets"), (reconcile, "register")):
        monkeypatch.setattr(module, name, lambda *site: None)
    site, warnings = site_of("hooks.example.org/x", "failed"), list[str]()
    work_pool.set_up(site, warn=warnings.append)
    assert len(warnings) == 1
    assert "RLHF_NOTIFY_WEBHOOK_URL" in warnings[0]
    with pytest.raises(BadConfig):
        work_pool.set_up(site)
