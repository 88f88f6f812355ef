"""The parts of what Prefect shows of a run. Each knows what it has told, and says what there is to tell now.

A part gives back the telling as a piece of work instead of doing it, so that nobody asks whether the server is there
when there is nothing to say.
"""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from flows import tasks
from flows.view import events
from flows.view.checks import checks_markdown
from flows.view.curves import Curves
from flows.view.events import FlowRun, happenings
from flows.view.incidents import first_line, incidents_markdown
from flows.view.keys import artifact_key
from flows.view.progress import Seen, describe
from flows.view.result import result_markdown, times_of
from flows.view.story import Story, ToldDecision, ToldIncident, read_checks
from rlhf_core.control.summary import summarise
from rlhf_core.escaping import markdown
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.failures import Action
from rlhf_core.schemas.run import StoredSpec

Telling = Callable[[], None]
"""Tells Prefect something; raises what Prefect raises."""

PROGRESS_EVERY_S = 5.0
"""Least time between two changes of the progress of a run."""


class Part(Protocol):
    """Something that is shown."""

    def due(self, story: Story, *, last: bool) -> Telling | None:
        """What there is to tell.

        Args:
            story: what has happened so far.
            last: this controller is about to let go of the run.
        """


@dataclass
class Events:
    """What happened, for automations."""

    stored: StoredSpec
    flow_run: FlowRun
    _told: set[uuid.UUID] = field(default_factory=set)

    def due(self, story: Story, *, last: bool) -> Telling | None:
        """Those that neither this controller nor one before it has told."""
        new = [one for one in happenings(story, self.stored, self.flow_run) if one.id not in self._told]

        def tell() -> None:
            untold = events.unknown_to_the_server(new)
            if untold:
                events.tell(untold, story.run_id, self.flow_run)
            self._told |= {one.id for one in new}

        return tell if new else None


@dataclass
class Progress:
    """How far the run is; one artifact, changed in place."""

    seen: Seen
    lock: threading.Lock
    """Held while ``seen`` is read: the controller changes it."""
    clock: Callable[[], float] = time.monotonic
    _id: uuid.UUID | None = None
    _told: tuple[float, str] | None = None
    _told_at: float = float("-inf")

    def due(self, story: Story, *, last: bool) -> Telling | None:
        """The newest figures, but not too often."""
        if not (last or story.record.ended) and self.clock() - self._told_at < PROGRESS_EVERY_S:
            return None
        with self.lock:
            now = self.seen.percent, describe(self.seen, story)
        return None if now == self._told else lambda: self._tell(story, now)

    def _tell(self, story: Story, now: tuple[float, str]) -> None:
        known, self._id = self._id, None  # one that cannot be changed, because somebody deleted it, is made anew
        if known is None:
            key = artifact_key(story.run_id, "progress")
            known = _id_of(create_progress_artifact(progress=now[0], key=key, description=now[1]))
        else:
            update_progress_artifact(known, progress=now[0], description=now[1])
        self._id, self._told, self._told_at = known, now, self.clock()


@dataclass
class CurvesPicture:
    """The curves; one artifact, changed in place: a picture has its whole past in it, and versions would fill the
    server's database."""

    curves: Curves
    seen: Seen
    lock: threading.Lock
    _id: uuid.UUID | None = None

    def due(self, story: Story, *, last: bool) -> Telling | None:
        """A new picture, where enough has been done since the one before."""
        with self.lock:
            look = self.seen.look if self.seen.now_about is None else None
            place = (look.attempt, look.restart, look.step) if look is not None else (0, 0, self.seen.furthest)
        if not self.curves.is_due(place, last=last or story.record.ended):
            return None
        return lambda: self._tell(story, place)

    def _tell(self, story: Story, place: tuple[int, int, int]) -> None:
        picture = self.curves.draw(place)
        if not picture:
            return
        description = f"{story.run_id}: up to step {place[-1]}"
        known, self._id = self._id, None
        if known is None:
            key = artifact_key(story.run_id, "curves")
            known = _id_of(create_image_artifact(image_url=picture, key=key, description=description))
        else:
            with get_client(sync_client=True) as client:
                client.update_artifact(known, ArtifactUpdate(data=picture, description=description))
        self._id = known


@dataclass
class Incidents:
    """What went wrong and what was done about it, with the essentials of the evidence."""

    _told: tuple[tuple[ToldIncident, ...], tuple[ToldDecision, ...]] = ((), ())

    def due(self, story: Story, *, last: bool) -> Telling | None:
        """A new version with each incident or decision."""
        now = tuple(story.incidents), tuple(story.decisions)
        if now == self._told or not story.incidents:
            return None

        def tell() -> None:
            newest = story.incidents[-1].incident
            create_markdown_artifact(
                incidents_markdown(story),
                key=artifact_key(story.run_id),
                description=f"{newest.failure_kind.value}: {markdown(first_line(newest.message))}",
            )
            self._told = now

        return tell


@dataclass
class Checks:
    """Findings of preflight and probes."""

    run_dir: RunDir
    _told: list[dict[str, str]] = field(default_factory=list)

    def due(self, story: Story, *, last: bool) -> Telling | None:
        """A new version with each finding."""
        checks = read_checks(self.run_dir)

        def tell() -> None:
            counts = Counter(row["status"] for row in checks)
            create_markdown_artifact(
                checks_markdown(checks),
                key=artifact_key(story.run_id, "checks"),
                description=", ".join(f"{count} {name}" for name, count in counts.items()),
            )
            self._told = checks

        return tell if checks != self._told else None


@dataclass
class Result:
    """What the run came to, as soon as it has ended: a promotion may still wait for somebody who wants to read it."""

    store: HistoryStore
    _told: str = ""
    _seen: tuple[int, bool] = (0, False)

    def due(self, story: Story, *, last: bool) -> Telling | None:
        """A new version where it says something else than before."""
        seen = len(story.lines), last
        if seen == self._seen or not (story.record.ended or last):
            return None
        summary = summarise(story.run_dir)
        text = result_markdown(summary, story, times_of(self.store, story.run_id))

        def tell() -> None:
            if text != self._told:
                key = artifact_key(story.run_id, "result")
                create_markdown_artifact(text, key=key, description=f"{summary.state_text}: {markdown(summary.cause)}")
            self._told, self._seen = text, seen

        return tell


@dataclass
class Restarts:
    """Restarts inside an attempt as task runs: without them, an attempt that was started again five times looks in the
    list like one that went well at once."""

    known: set[tuple[str, int, int]]
    """Those that were made before this controller came: run, attempt, restart."""

    def due(self, story: Story, *, last: bool) -> Telling | None:
        """One task run for each."""
        new = [told for told in story.decisions if is_restart(told) and place_of(told) not in self.known]

        def tell() -> None:
            for told in new:
                decision = told.decision
                whose = "trial: " if told.run_dir != story.run_dir else ""
                title = f"{whose}restart {decision.restart + 1} in attempt {decision.attempt} - {decision.reason}"
                tasks.note(title, "restart", decision.reason)
                self.known.add(place_of(told))

        return tell if new else None


def is_restart(told: ToldDecision) -> bool:
    """Whether workers were started again in place."""
    return told.decision.action is Action.RESTART_IN_PLACE


def place_of(told: ToldDecision) -> tuple[str, int, int]:
    """Run, attempt and restart that a decision is about."""
    return told.run_dir.run_id, told.decision.attempt, told.decision.restart


def _id_of(answer: object) -> uuid.UUID:
    """The id of a new artifact. Prefect's functions are typed for both of their lives, with and without ``await``."""
    assert isinstance(answer, uuid.UUID)
    return answer
