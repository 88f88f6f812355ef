"""Publication of a run to Prefect from a thread of the controller's process.

The controller has a lease to renew, so neither an unreachable nor a hanging server may block it. Parts that could not
be published are published once the server is back, by this thread or by the site daemon.
"""

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from prefect import get_run_logger, runtime

from flows.publishing.artifacts import (
    CURVES_AGE_SHARE,
    CURVES_INTERVAL_S,
    IncidentPage,
    Publication,
    publication_from,
    publish,
    without,
)
from flows.publishing.events import FlowRunRef
from flows.server.settings import server_answers
from rlhf_core.condition_log import ConditionLog
from rlhf_core.control.controller import Controller, Observer
from rlhf_core.control.views.progress import RunReader, RunSnapshot, StepTimer, progress_of_poll
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.render.progress import RunProgress
from rlhf_core.render.timeline import Timeline, decision_text
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.journal import RunMoved
from rlhf_core.schemas.run import RunSpec
from rlhf_core.survival import Survived
from rlhf_core.text.escaping import terminal
from rlhf_core.watchdog.watcher import AttemptSnapshot

RunLog = logging.Logger | logging.LoggerAdapter[logging.Logger]

PUBLISH_INTERVAL_S = 5.0
"""Time between two publications of an active run."""

RETRY_INTERVAL_S = 10.0
"""Pause after a failed publication."""

SHUTDOWN_TIMEOUT_S = 20.0
"""Longest time that the end of a run waits for its last publication."""

LAST_TRIES, LAST_RETRY_INTERVAL_S = 3, 1.0
"""Attempts at the last publication, and the pause between them."""

_LOGGED_EVENTS = frozenset({"suspect", "checkpoint", "file", "killed", "command", "save_requested", "verdict"})
"""Agent events that are logged directly; incidents and decisions are logged from the timeline."""


@contextmanager
def published(controller: Controller) -> Iterator[None]:
    """Publish the run to Prefect for the duration of the block. Use it in the flow run."""
    log = get_run_logger()
    flow_run = FlowRunRef(str(runtime.flow_run.id or ""), controller.run_dir.run_id)
    publisher = Publisher(controller, flow_run, log, controller.observer.log)
    observer = controller.observer
    controller.observer = _PublishingObserver(observer, publisher, controller.spec, log)
    publisher.start()
    try:
        yield
    finally:
        controller.observer = observer
        # If the run was taken over, the other controller publishes the rest.
        publisher.close(publishes_rest=not controller.lease.lost)


class Publisher:
    """Thread that publishes a run and logs its news."""

    def __init__(self, controller: Controller, flow_run: FlowRunRef, log: RunLog, warn: Callable[[str], None]) -> None:
        """Set up the publication of a run. Call it in the flow run.

        Args:
            flow_run: flow run in whose name it is published.
            log: log of the flow run.
            warn: called once per outage of the server.
        """
        self.title = ""
        """Current stage."""
        self.progress: RunProgress | None = None
        """Progress at the latest poll; None before the first."""
        self._run_dir, self._store = controller.run_dir, controller.store
        self._flow_run, self._log, self._outage = flow_run, log, ConditionLog(warn)
        self._reader: RunReader | None = None
        self._logged = self._known_before()
        self._last: Publication | None = None
        """Last publication that the server accepted: its unchanged parts are not sent again."""
        self._seen: tuple[Timeline, bool] | None = None
        """Timeline of the last publication, and True if it was this controller's last one."""
        self._drawn_at = float("-inf")
        self._incident_page = IncidentPage()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._publishes_rest = True
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="publisher", daemon=True)

    def start(self) -> None:
        """Start with the current state."""
        self._wake.set()
        self._thread.start()

    def wake(self) -> None:
        """Publish soon. Never blocks."""
        self._wake.set()

    def close(self, *, publishes_rest: bool = True) -> None:
        """Stop the thread, after a last publication if ``publishes_rest``; wait for it a limited time."""
        self._publishes_rest = publishes_rest
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=SHUTDOWN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(timeout=PUBLISH_INTERVAL_S)
            self._wake.clear()
            if not self._stop.is_set() and not self._publish_safely(last=False):
                self._wake.set()
                self._stop.wait(RETRY_INTERVAL_S)
        for number in range(LAST_TRIES if self._publishes_rest else 0):
            if number:
                time.sleep(LAST_RETRY_INTERVAL_S)
            if self._publish_safely(last=True):
                return

    def _publish_safely(self, *, last: bool) -> bool:
        """Publish, and return True if the server accepted everything."""
        with Survived() as failed:  # no error of Prefect's may end this thread
            self._publish(last=last)
            self._outage.end()
            return True
        with contextlib.suppress(Exception):
            self._outage.log_once(f"the run could not be published to Prefect: {failed.problem}")
        return False

    def _publish(self, *, last: bool) -> None:
        self._reader = self._reader or RunReader(self._run_dir)
        snapshot = self._reader.read()
        self._log_news(snapshot.timeline)
        seen = (snapshot.timeline, last)
        if snapshot.timeline.ended and seen == self._seen:
            return  # the wait for an approval may take days
        draws = last or snapshot.timeline.ended or time.monotonic() - self._drawn_at >= _drawing_interval_s(snapshot)
        progress = self._progress(snapshot)
        publication = publication_from(
            snapshot, self._store, self._flow_run, progress, draws=draws, last=last, page_of=self._incident_page
        )
        news = publication if self._last is None else without(publication, self._last)
        if news:
            # Prefect's own client would retry for a minute.
            if not server_answers():
                raise ConnectionError("its server does not answer")
            publish(news)
        self._last, self._seen = publication, seen
        if any(one.draw is not None for one in publication.artifacts):
            self._drawn_at = time.monotonic()

    def _progress(self, snapshot: RunSnapshot) -> RunProgress:
        known = self.progress
        if known is None or snapshot.timeline.ended:
            return replace(snapshot.progress, title=self.title)
        furthest = max(known.furthest, snapshot.progress.furthest)
        return replace(known, state=snapshot.timeline.state, furthest=furthest, title=self.title)

    def _known_before(self) -> frozenset[tuple[object, ...]]:
        try:
            return frozenset(_log_lines(read_timeline(self._run_dir)))
        except OSError:  # the file system briefly does not answer
            return frozenset()

    def _log_news(self, timeline: Timeline) -> None:
        lines = _log_lines(timeline)
        for level, _, text in (line for line in lines if line not in self._logged):
            self._log.log(level, "%s", terminal(text))
        self._logged = frozenset(lines)


class _PublishingObserver(Observer):
    """Forwards everything to the wrapped observer, logs messages, and keeps the publisher current."""

    def __init__(self, wrapped: Observer, publisher: Publisher, spec: RunSpec, log: RunLog) -> None:
        self._wrapped = wrapped
        self._publisher = publisher
        self._run_spec = self._spec = spec
        self._timer = StepTimer()
        self._log = log

    def follow(self, spec: RunSpec) -> None:
        """Switch to another spec: a trial, or the run itself again."""
        self._spec, self._timer, self._publisher.progress = spec, StepTimer(), None
        self._wrapped.follow(spec)

    def stage_started(self, title: str) -> None:
        """Log the start of a stage."""
        self._publisher.title = title
        self._log.info("begins: %s", terminal(title))
        self._publisher.wake()
        self._wrapped.stage_started(title)

    def polled(self, snapshot: AttemptSnapshot) -> None:
        """Store the progress of a poll, and log its events."""
        progress = progress_of_poll(snapshot, self._spec, self._timer)
        self._publisher.progress = replace(progress, is_trial=self._spec != self._run_spec)
        for event in snapshot.events:
            if event.kind in _LOGGED_EVENTS:
                self._log.warning("%s", terminal(f"{event.node}: {event.message}"))
        self._wrapped.polled(snapshot)

    def log(self, text: str) -> None:
        """Log a message."""
        self._log.log(logging.WARNING if text.startswith("warning ") else logging.INFO, "%s", terminal(text))
        self._publisher.wake()
        self._wrapped.log(text)

    def stop_requested(self) -> bool:
        """True if the user asked to end the run."""
        return self._wrapped.stop_requested()


def _drawing_interval_s(snapshot: RunSnapshot) -> float:
    age_s = (utc_now() - snapshot.stored.created_at).total_seconds()
    return max(CURVES_INTERVAL_S, CURVES_AGE_SHARE * age_s)


def _log_lines(timeline: Timeline) -> list[tuple[int, tuple[object, ...], str]]:
    """Log lines of a flow run: level, identity, text."""
    found: list[tuple[int, tuple[object, ...], str]] = [
        (logging.INFO, (line.token, line.sequence), f"run is {line.event.state.value}: {line.event.cause}")
        for line in timeline.lines
        if isinstance(line.event, RunMoved)
    ]
    for incident in (one.incident for one in timeline.incidents):
        text = f"{incident.failure_kind.value}: {incident.message}"
        found.append((logging.ERROR, (incident.seen_at,), text))
    for decision in (one.decision for one in timeline.decisions):
        found.append((logging.WARNING, (decision.decided_at,), f"decision: {decision_text(decision)}"))
    return found
