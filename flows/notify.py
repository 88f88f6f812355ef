"""Notifications: Prefect automations that post a message when something happens to a run.

Controllers emit the events (``rlhf.run.failed``, ``rlhf.incident.node_lost``, ``rlhf.promotion.waiting`` ...), and the
Prefect server sends the messages. The address may contain a secret, so it is stored only in a Prefect block, encrypted.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events import emit_event
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr

from flows.publishing.events import CANCELLED_OUTSIDE, STOPPED, WITHOUT_NODES
from flows.server.clients import api_client, commanding_client
from flows.server.settings import server_answers
from rlhf_core.config.site import Site
from rlhf_core.errors import BadConfig, PrefectUnavailable

BLOCK = "rlhf-notify"
"""Name of the block with the address."""

PREFIX = "rlhf notify: "
"""Name prefix of our automations. Every automation with this prefix is ours, and is removed if it is not configured."""

TEST = "test"
_TEST_EVENT = "rlhf.notify.test"
TEST_TIMEOUT_S = 60.0
"""Time allowed for a test message: the server writes events in batches, with a delay of some seconds."""


@dataclass(frozen=True)
class Notification:
    """The events that trigger a notification, and its message."""

    events: tuple[str, ...]
    """Names of the events; a trailing asterisk matches any ending."""
    text: str
    """The first line of the message, as a Jinja expression over the fields of the event."""
    advice: str = "''"
    """The next thing to do, likewise; empty if there is none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the resource of the event must have."""


_RUN = "'run ' ~ run_id ~ (' of ' ~ owner if owner else '')"
_FIX = "'rlhf show ' ~ run_id ~ ' tells more; once it is fixed: rlhf resume ' ~ run_id"
_CONTINUE = "'to continue: rlhf resume ' ~ run_id"

OCCASIONS: Mapping[str, Notification] = {
    "failed": Notification(("rlhf.run.failed",), f"{_RUN} ~ ' failed'", _FIX),
    "stopped": Notification(("rlhf.run.failed",), f"{_RUN} ~ ' failed'", _FIX, STOPPED),
    "completed": Notification(("rlhf.run.completed",), f"{_RUN} ~ ' completed'"),
    "cancelled": Notification(("rlhf.run.cancelled",), f"{_RUN} ~ ' was cancelled'", _CONTINUE),
    "cancelled_outside": Notification(
        ("rlhf.run.cancelled",), f"{_RUN} ~ ' was cancelled, and not by rlhf-flows'", _CONTINUE, CANCELLED_OUTSIDE
    ),
    "incident": Notification(
        ("rlhf.incident.*",),
        f"{_RUN} ~ ' had an incident: ' ~ failure_kind",
        f"{_FIX} if action == 'stop' else 'rlhf show ' ~ run_id ~ ' tells more'",
    ),
    "no_nodes": Notification(
        ("rlhf.incident.no_nodes",),
        f"'the nodes of ' ~ {_RUN} ~ ' do not start'",
        f"{_FIX} if action == 'stop' else 'the run goes on asking for them; rlhf cancel ' ~ run_id ~ ' ends it'",
        WITHOUT_NODES,
    ),
    "approval": Notification(
        ("rlhf.promotion.waiting",),
        f"'the model of ' ~ {_RUN} ~ ' waits for approval'",
        "'answer with rlhf approve ' ~ run_id ~ ' or rlhf refuse ' ~ run_id",
    ),
    "approval_expired": Notification(
        ("rlhf.promotion.expired",),
        f"'nobody answered in time whether to promote the model of ' ~ {_RUN}",
        "'it is still possible: rlhf approve ' ~ run_id ~ ' or rlhf refuse ' ~ run_id",
    ),
    "promotion_failed": Notification(
        ("rlhf.promotion.failed",),
        f"'the model of ' ~ {_RUN} ~ ' could not be promoted'",
        "'rlhf show ' ~ run_id ~ ' tells more; once it is fixed: rlhf approve ' ~ run_id",
    ),
    TEST: Notification((_TEST_EVENT,), "'a test message of rlhf-flows'"),
}

_FIELDS = (
    "run_id",
    "name",
    "owner",
    "state",
    "failure_kind",
    "phase",
    "step",
    "suspect_nodes",
    "action",
    "reason",
    "message",
    "url",
)
"""Event payload fields that the message includes."""


def register(site: Site) -> list[str]:
    """Make the automations on the Prefect server match the site's notification settings.

    Idempotent; changed settings are applied. An automation that a user paused stays paused.

    Returns:
        The names of the automations.

    Raises:
        BadConfig: the address is invalid.
        PrefectUnavailable: the server did not accept the automations.
    """
    url = site.notify.webhook_url
    _require_address(url)
    if not server_answers():
        raise PrefectUnavailable("no Prefect server answers at PREFECT_API_URL; start it, then try again")
    wanted = {_name(occasion): occasion for occasion in (*site.notify.on, TEST)} if url else {}
    try:
        with api_client() as client:
            if wanted:
                block_id = Webhook(method="POST", url=SecretStr(url)).save(BLOCK, overwrite=True)
                assert isinstance(block_id, UUID)  # outside an event loop, save() is synchronous
                for name, occasion in wanted.items():
                    _put(client, _automation(name, OCCASIONS[occasion], block_id))
            _remove_others(client, set(wanted))
            if not wanted:
                _remove_block(client)
    except Exception as error:  # noqa: BLE001 - Prefect raises many types; the user needs one sentence
        raise PrefectUnavailable(
            f"the notifications could not be set up: {_without_secret(error, url)}. Runs are not touched by this"
        ) from None
    return sorted(wanted)


def send_test(site: Site) -> str:
    """Send a test message through the same path as real ones and report the response. Call :func:`register` first.

    Raises:
        BadConfig: notifications are off on this site.
        PrefectUnavailable: it could not be sent, or the receiver rejected it.
    """
    if not site.notify.webhook_url:
        raise BadConfig("notify.webhook_url is empty; set it in rlhf.toml, or RLHF_NOTIFY_WEBHOOK_URL, then try again")
    event_id = uuid4()
    payload = {"message": "if you can read this, it arrives", "state": TEST}
    emit_event(_TEST_EVENT, {"prefect.resource.id": "rlhf.notify"}, payload=payload, id=event_id)
    until = time.monotonic() + TEST_TIMEOUT_S
    with commanding_client() as client:
        while (outcome := _outcome(client, event_id)) is None:
            if time.monotonic() > until:
                raise PrefectUnavailable(
                    f"the Prefect server has not sent the test message within {TEST_TIMEOUT_S:g} s; is its automation "
                    f"`{_name(TEST)}` paused, or are its services not running?"
                )
            time.sleep(0.5)
    return _judged(outcome, site.notify.webhook_url)


def _outcome(client: SyncPrefectClient, event_id: UUID) -> dict[str, Any] | None:
    """The event that reports the delivery of the message for another event."""
    wanted = {
        "event": {"name": ["prefect.automation.action.executed", "prefect.automation.action.failed"]},
        "related": {"id": [f"prefect.event.{event_id}"]},
    }
    answer = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 1})
    found: list[dict[str, Any]] = answer.json()["events"]
    return found[0] if found else None


def _judged(outcome: Mapping[str, Any], url: str) -> str:
    payload = outcome["payload"]
    status = payload.get("status_code")
    if outcome["event"].endswith("failed") or status is None:
        raise PrefectUnavailable(
            f"the message was not sent: {_without_secret(payload.get('reason', 'no reason'), url)}"
        )
    if not 200 <= status < 300:
        body = _without_secret(str(payload.get("response_body", "")), url).strip()[:200]
        raise PrefectUnavailable(f"the message was refused with HTTP status {status}" + f": {body}" * bool(body))
    return f"HTTP status {status}"


# ---------------------------------------------------------------------------------------------------------------------
# Automations


def _name(occasion: str) -> str:
    return f"{PREFIX}{occasion}"


def _automation(name: str, notification: Notification, block_id: UUID) -> AutomationCore:
    return AutomationCore(
        name=name,
        description="Made by `rlhf up` from [notify] of rlhf.toml. Messages that could not be sent: Event Feed, "
        "prefect.automation.action.failed; status of the others: prefect.automation.action.executed.",
        trigger=EventTrigger(
            expect=set(notification.events),
            match={**notification.labels},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[CallWebhook(block_document_id=block_id, payload=template(notification))],
    )


def template(notification: Notification) -> str:
    """The message as a Jinja template: JSON with `text` for chat services and separate fields for programs.

    Every value goes through ``string`` and ``tojson``, so that quotes, numbers and missing fields still give valid
    JSON.
    """
    values = [f"{{% set {field} = event.payload.{field} | default('') | string %}}" for field in _FIELDS]
    decision = "'decision: ' ~ action | replace('_', ' ') ~ ' (' ~ reason ~ ')' if action else ''"
    lines = (f"{notification.text} ~ (': ' ~ message if message else '')", decision, notification.advice, "url")
    text = f"[{', '.join(lines)}] | select | join('\\n')"
    fields = {"text": f"({text})", "event": "event.event", "occurred": "event.occurred | string"}
    fields |= {field: field for field in _FIELDS}
    body = ", ".join(f'"{field}": {{{{ ({value}) | tojson }}}}' for field, value in fields.items())
    return "".join(values) + "{" + body + "}"


def _put(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    present = client.read_automations_by_name(wanted.name)
    if not present:
        client.create_automation(wanted)
        return
    client.update_automation(present[0].id, wanted.model_copy(update={"enabled": present[0].enabled}))
    for double in present[1:]:  # two `rlhf up` ran at the same time
        client.delete_automation(double.id)


def _remove_others(client: SyncPrefectClient, wanted: set[str]) -> None:
    for automation in client.read_automations():
        if automation.name.startswith(PREFIX) and automation.name not in wanted:
            client.delete_automation(automation.id)


def _remove_block(client: SyncPrefectClient) -> None:
    try:
        block = client.read_block_document_by_name(BLOCK, Webhook.get_block_type_slug(), include_secrets=False)
    except ObjectNotFound:
        return
    if block.id is not None:
        client.delete_block_document(block.id)


def _require_address(url: str) -> None:
    with contextlib.suppress(ValueError):  # a bracket that is not closed, for example
        parts = urlsplit(url)
        if not url or (parts.scheme in ("http", "https") and parts.hostname):
            return
    raise BadConfig(
        "notify.webhook_url (RLHF_NOTIFY_WEBHOOK_URL) is no address that a message can be posted to; expected https://..."
    )


def _without_secret(text: object, url: str) -> str:
    """An error message with the address removed."""
    return str(text).replace(url, "the webhook") if url else str(text)
