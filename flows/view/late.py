"""The pages of a run that nobody renewed when it ended: its server was away, or no flow run was at work on it.

A page is behind where it tells another end than the run has come to. Its figures are not compared: what was counted
when it was made may have been read further since.
"""

from collections.abc import Callable, Mapping, Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from prefect.client.schemas.sorting import ArtifactSort

from flows.view.events import FlowRun
from flows.view.incidents import first_line, headline, incidents_markdown
from flows.view.keys import artifact_key
from flows.view.progress import Seen, describe, furthest_step
from flows.view.result import result_markdown, tells_the_end, times_of
from flows.view.story import Story
from rlhf_core.control.summary import summarise
from rlhf_core.escaping import markdown
from rlhf_core.history.store import HistoryStore

Pages = Mapping[str, Artifact | None]
"""Newest version of each page; None where the server has none."""


def behind(story: Story) -> list[str]:
    """Pages of a run that has ended which do not tell its end: of ``result``, ``incidents`` and ``progress``."""
    with get_client(sync_client=True) as client:
        return _behind(story, _newest(client, story))


def renew(story: Story, store: HistoryStore, flow_run: FlowRun) -> list[str]:
    """Renew these pages, in the name of a flow run; which were."""
    with get_client(sync_client=True) as client:
        pages = _newest(client, story)
        found = _behind(story, pages)
        make: dict[str, Callable[[], None]] = {
            "result": lambda: _result(client, story, store, flow_run),
            "incidents": lambda: _incidents(client, story, flow_run),
            "progress": lambda: _progress(client, story, pages["progress"]),
        }
        for what in found:
            make[what]()
    return found


def _newest(client: SyncPrefectClient, story: Story) -> Pages:
    found: dict[str, Artifact | None] = {}
    for what in ("result", "incidents", "progress"):
        key = ArtifactFilter(key=ArtifactFilterKey(any_=[artifact_key(story.run_id, what)]))
        newest: Sequence[Artifact] = client.read_artifacts(artifact_filter=key, sort=ArtifactSort.UPDATED_DESC, limit=1)
        found[what] = newest[0] if newest else None
    return found


def _behind(story: Story, pages: Pages) -> list[str]:
    result, incidents, progress = pages["result"], pages["incidents"], pages["progress"]
    return [
        *(["result"] if result is None or not tells_the_end(str(result.data), story) else []),
        *(["incidents"] if story.incidents and not _tells_them(incidents, story) else []),
        # Where there is none, no step was ever told of, and the result says all.
        *(["progress"] if progress is not None and not _says(progress, story) else []),
    ]


def _tells_them(page: Artifact | None, story: Story) -> bool:
    return page is not None and str(page.data).startswith(f"{headline(story)}\n")


def _says(page: Artifact, story: Story) -> bool:
    return (page.description or "").startswith(f"**{story.record.state.value}**")


def _result(client: SyncPrefectClient, story: Story, store: HistoryStore, flow_run: FlowRun) -> None:
    summary = summarise(story.run_dir)
    text = result_markdown(summary, story, times_of(store, story.run_id))
    _create(client, story, "result", text, f"{summary.state_text}: {markdown(summary.cause)}", flow_run)


def _incidents(client: SyncPrefectClient, story: Story, flow_run: FlowRun) -> None:
    newest = story.incidents[-1].incident
    said = f"{newest.failure_kind.value}: {markdown(first_line(newest.message))}"
    _create(client, story, "incidents", incidents_markdown(story), said, flow_run)


def _create(client: SyncPrefectClient, story: Story, what: str, text: str, description: str, flow_run: FlowRun) -> None:
    client.create_artifact(
        ArtifactCreate(
            key=artifact_key(story.run_id, what),
            type="markdown",
            data=text,
            description=description,
            flow_run_id=UUID(flow_run.id),  # not that of the reconciler, in whose name this process may be at work
        )
    )


def _progress(client: SyncPrefectClient, story: Story, page: Artifact | None) -> None:
    assert page is not None, "it is only behind where it is there"
    seen = Seen(story.run_dir.read_spec().spec)
    seen.furthest = furthest_step(story.run_dir)
    client.update_artifact(page.id, ArtifactUpdate(data=seen.percent, description=describe(seen, story)))
