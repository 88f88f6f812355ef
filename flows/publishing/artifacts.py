"""Artifacts and events of a run in Prefect, published by one idempotent function.

Everything is derived from the run directory and the history. Artifacts are upserted by key, and event ids are derived
from their subject, so publishing twice has no further effect, whether a controller does it or, for a run without a
controller, the site daemon. Publication is only a view: a failure changes nothing in a run. ``docs/prefect.md`` lists
every name.
"""

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from uuid import UUID

from prefect import task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactCollectionFilter, ArtifactCollectionFilterKey
from prefect.client.schemas.objects import ArtifactCollection
from prefect.states import Completed

from flows.publishing.events import FlowRunRef, PrefectEvent, events_of, publish_events, unpublished
from flows.server.clients import api_client
from flows.tasks import shorten
from rlhf_core.control.views.drawing import draw_in_process
from rlhf_core.control.views.progress import RunReader, RunSnapshot
from rlhf_core.control.views.summary import summarise
from rlhf_core.control.views.timeline import read_checks
from rlhf_core.errors import HistoryError
from rlhf_core.history import queries
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.markdown import checks_markdown, incidents_markdown, progress_markdown
from rlhf_core.render.progress import RunProgress
from rlhf_core.render.summary import summary_markdown
from rlhf_core.render.timeline import Timeline, TimelineDecision
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action
from rlhf_core.survival import Survived
from rlhf_core.text.escaping import markdown

CURVES_INTERVAL_S = 30.0
"""Minimum time between two images of an active run."""

CURVES_AGE_SHARE = 0.02
"""Share of a run's age to wait before its next image: the older the run, the less half a minute changes."""

LATE_EVIDENCE = timedelta(minutes=2)
"""Time after an incident in which files of its evidence may still appear."""

MAX_PICTURE_BYTES = 150_000
"""Size above which images are not published: the server stores them in its database."""


@dataclass(frozen=True)
class RunArtifact:
    """An artifact of a run, before it is published."""

    name: str
    """Part of its key: ``progress``, ``curves``, ``checks``, ``incidents`` or ``result``."""
    type: str
    """Prefect's type: ``markdown``, ``progress`` or ``image``."""
    description: str
    data: str | float = ""
    draw: Callable[[], str] | None = field(default=None, compare=False)
    """Creates the data if that is expensive; the description then tells if the artifact is current."""

    @property
    def in_place(self) -> bool:
        """True if a new version replaces the previous one: stored versions would fill the server's database."""
        return self.type != "markdown"


@dataclass(frozen=True)
class RestartTask:
    """A restart inside an attempt as a task run: without it, an attempt that was restarted five times would look in the
    list like one that succeeded at once."""

    key: str
    """Identity within its flow run."""
    title: str
    reason: str


@task(name="restart", description="A restart of the workers inside an attempt.")
def _restart() -> None:
    """Placeholder for restarts in Prefect; never called."""


@dataclass(frozen=True)
class Publication:
    """Everything that Prefect should show of a run at one moment."""

    run_id: str
    flow_run: FlowRunRef
    artifacts: Sequence[RunArtifact] = ()
    events: Sequence[PrefectEvent] = ()
    restarts: Sequence[RestartTask] = ()

    def __bool__(self) -> bool:
        """True if it is not empty."""
        return bool(self.artifacts or self.events or self.restarts)


def artifact_key(run_id: str, name: str) -> str:
    """Build the key of a run's artifact: lower-case letters, digits and dashes."""
    return f"rlhf-{name}-{run_id.replace('_', '-')}"


# ---------------------------------------------------------------------------------------------------------------------
# Publishing


def publish(publication: Publication) -> list[str]:
    """Update the server, and return the names of the parts it lacked.

    Raises:
        Exception: the first failure of Prefect's client; everything else is still published.
    """
    if not publication:
        return []
    done: list[str] = []
    failures: list[BaseException] = []
    with api_client() as client:
        for step in _steps(client, publication):
            with Survived() as failed:  # a rejected part must not stop the others
                done += step()
            if failed.error is not None:
                failures.append(failed.error)
    if failures:
        raise failures[0]
    return done


def _steps(client: SyncPrefectClient, publication: Publication) -> Iterator[Callable[[], list[str]]]:
    run_id, flow_run = publication.run_id, publication.flow_run
    yield lambda: publish_events(client, publication.events, run_id, flow_run)
    for restart in publication.restarts:
        yield partial(_add_restart, client, flow_run, restart)
    newest = _newest(client, publication)
    for artifact in publication.artifacts:
        yield partial(_upsert, client, publication, artifact, newest.get(artifact.name))


def unpublished_parts(publication: Publication) -> list[str]:
    """Names of the events and artifacts that the server lacks or has in an older version."""
    if not publication:
        return []
    with api_client() as client:
        newest = _newest(client, publication)
        return [
            *(one.name for one in unpublished(client, publication.events)),
            *(
                _title(one)
                for one in publication.artifacts
                if _is_outdated(one, newest.get(one.name), publication.flow_run)
            ),
        ]


def _newest(client: SyncPrefectClient, publication: Publication) -> Mapping[str, ArtifactCollection]:
    """Newest version of each artifact on the server, by name."""
    names = {artifact_key(publication.run_id, one.name): one.name for one in publication.artifacts}
    if not names:
        return {}
    keys = ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=list(names)))
    return {names[one.key]: one for one in client.read_latest_artifacts(artifact_filter=keys)}


def _is_outdated(artifact: RunArtifact, newest: ArtifactCollection | None, flow_run: FlowRunRef) -> bool:
    if newest is None or newest.description != artifact.description or str(newest.flow_run_id) != flow_run.id:
        return True
    return artifact.draw is None and newest.data != artifact.data


def _upsert(
    client: SyncPrefectClient, publication: Publication, artifact: RunArtifact, newest: ArtifactCollection | None
) -> list[str]:
    flow_run = publication.flow_run
    if not _is_outdated(artifact, newest, flow_run):
        return []
    data = artifact.data if artifact.draw is None else artifact.draw()
    if artifact.draw is not None and not data:
        return []
    if newest is not None and artifact.in_place and str(newest.flow_run_id) == flow_run.id:
        client.update_artifact(newest.latest_id, ArtifactUpdate(data=data, description=artifact.description))
    else:
        made = ArtifactCreate(
            key=artifact_key(publication.run_id, artifact.name),
            type=artifact.type,
            data=data,
            description=artifact.description,
            # Not the process's own flow run: this may be the site daemon.
            flow_run_id=UUID(flow_run.id) if flow_run.id else None,
        )
        client.create_artifact(made)
    return [_title(artifact)]


def _add_restart(client: SyncPrefectClient, flow_run: FlowRunRef, restart: RestartTask) -> list[str]:
    # The server keeps one task run per key of a flow run, and returns it on later calls.
    client.create_task_run(
        _restart,
        UUID(flow_run.id),
        dynamic_key=restart.key,
        name=shorten(restart.title),
        state=Completed(message=restart.reason),
    )
    return []


def _title(artifact: RunArtifact) -> str:
    return f"artifact {artifact.name}"


# ---------------------------------------------------------------------------------------------------------------------
# Content


def publication_of(run_dir: RunDir, store: HistoryStore, flow_run: FlowRunRef) -> Publication:
    """Build the publication of a run in the name of a flow run; empty without one."""
    if not flow_run.id:
        return Publication(run_dir.run_id, flow_run)
    return publication_from(RunReader(run_dir).read(), store, flow_run)


def publication_from(
    snapshot: RunSnapshot,
    store: HistoryStore,
    flow_run: FlowRunRef,
    progress: RunProgress | None = None,
    *,
    draws: bool = True,
    last: bool = False,
    page_of: Callable[[Timeline], RunArtifact] | None = None,
) -> Publication:
    """Build the publication of a run from a snapshot.

    Args:
        progress: progress to show, if the controller knows more than the directory.
        draws: False to leave out the expensive image of the curves.
        last: True if the controller is about to release the run; a result page is then published even before the run
            has ended.
        page_of: builds the page of the incidents, such as :class:`IncidentPage`. Default: from the evidence.
    """
    timeline = snapshot.timeline
    progress = progress or snapshot.progress
    artifacts = [RunArtifact("progress", "progress", progress_markdown(progress, timeline), progress.percent)]
    if timeline.incidents:
        artifacts.append((page_of or _incidents)(timeline))
    checks = read_checks(timeline.run_dir)
    if checks:
        counts = Counter(result.status.value for _, result in checks)
        description = ", ".join(f"{number} {name}" for name, number in counts.items())
        artifacts.append(RunArtifact("checks", "markdown", description, checks_markdown(checks)))
    if timeline.ended or last:
        artifacts.append(_result(timeline, store))
    if draws and snapshot.progress.step:
        artifacts.append(_curves(snapshot))
    events = events_of(timeline, snapshot.stored, flow_run)
    return Publication(timeline.run_id, flow_run, artifacts, events, _restarts(timeline, flow_run))


def without(publication: Publication, before: Publication) -> Publication:
    """Remove the parts of an earlier publication: publishing them again would be harmless, but cost the server time."""
    return replace(
        publication,
        artifacts=[one for one in publication.artifacts if one not in before.artifacts],
        events=[one for one in publication.events if one not in before.events],
        restarts=[one for one in publication.restarts if one not in before.restarts],
    )


def _restarts(timeline: Timeline, flow_run: FlowRunRef) -> list[RestartTask]:
    """In-place restarts since the flow run began to drive the run."""
    since = timeline.driven_since(flow_run.id) if flow_run.id else None
    return [
        _restart_task(made)
        for made in timeline.decisions
        if since is not None and made.decision.action is Action.RESTART_IN_PLACE and made.decision.decided_at >= since
    ]


def _restart_task(made: TimelineDecision) -> RestartTask:
    decision = made.decision
    prefix = "trial: " if made.trial else ""
    return RestartTask(
        f"{made.run_dir.run_id}/{decision.attempt}/{decision.restart}",
        f"{prefix}restart {decision.restart + 1} in attempt {decision.attempt} - {decision.reason}",
        decision.reason,
    )


class IncidentPage:
    """Page of the incidents of one run, built again only after news: the evidence of hundreds of ranks is thousands of
    files, on a file system that all nodes share."""

    def __init__(self) -> None:
        self._built: tuple[object, RunArtifact] | None = None

    def __call__(self, timeline: Timeline) -> RunArtifact:
        """Return the page, which must have an incident."""
        seen = (timeline.incidents, timeline.decisions, timeline.ended)
        is_new = utc_now() - timeline.incidents[-1].incident.seen_at < LATE_EVIDENCE
        if self._built is None or is_new or self._built[0] != seen:
            self._built = seen, _incidents(timeline)
        return self._built[1]


def _incidents(timeline: Timeline) -> RunArtifact:
    newest = timeline.incidents[-1].incident
    message = next(iter(newest.message.splitlines()), "")
    links = " · ".join(_link(timeline.run_id, name) for name in ("progress", "curves"))
    text = incidents_markdown(timeline, links)
    return RunArtifact("incidents", "markdown", f"{newest.failure_kind.value}: {markdown(message)}", text)


def _result(timeline: Timeline, store: HistoryStore) -> RunArtifact:
    summary = summarise(timeline.run_dir)
    names = ["curves", "progress", "checks", *(["incidents"] if timeline.incidents else [])]
    links = " · ".join(_link(timeline.run_id, name) for name in names)
    text = summary_markdown(summary, timeline, _details(store, timeline.run_id), links)
    return RunArtifact("result", "markdown", f"{summary.state_text}: {markdown(summary.cause)}", text)


def _details(store: HistoryStore, run_id: str) -> RunDetails | None:
    """The run in the history; None if the history does not answer."""
    try:
        return queries.show_run(store, run_id)
    except HistoryError:
        return None


def _curves(snapshot: RunSnapshot) -> RunArtifact:
    progress, timeline = snapshot.progress, snapshot.timeline
    ended = f"; {timeline.state.value}" if timeline.ended else ""
    return RunArtifact(
        "curves",
        "image",
        f"{timeline.run_id}: up to step {progress.step} of attempt {progress.attempt}{ended}",
        draw=lambda: picture(timeline.run_dir),
    )


def picture(run_dir: RunDir) -> str:
    """Draw the curves as a data URI; empty if that fails, because a run does not depend on it."""
    drawn = draw_in_process(run_dir)
    if not drawn or len(drawn) > MAX_PICTURE_BYTES:
        return ""
    return f"data:image/png;base64,{base64.b64encode(drawn).decode()}"


def _link(run_id: str, name: str) -> str:
    """Link from one artifact page of a run to another, for both the old and the new UI."""
    return f"[{name}](../key/{artifact_key(run_id, name)})"
