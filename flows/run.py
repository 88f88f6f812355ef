"""``rlhf-run``: the Prefect flow of one run. ``flows.stages`` has the order of its steps; here they become visible."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from prefect import State, flow, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.exceptions import CancelledRun
from prefect.states import Cancelled, Completed

from flows.approval import asked_in_prefect
from flows.promotion import describe
from flows.server import server_answers
from flows.session import Session, new_run, opened
from flows.stages import drive
from flows.summary import markdown, summarise
from flows.tasks import TaskCaller, Work
from flows.view import shown_in_prefect
from rlhf_core.config import PRESETS, describe_fields, load_site
from rlhf_core.errors import BadInput, RunCancelled
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir import RunDir

DESCRIPTION = "One RLHF run: preflight, allocate, train, evaluate. Failures are diagnosed and retried."
"""What the flow is, in Prefect's list of flows."""

RESULT_KEY = "rlhf-result"
"""Key of the Markdown artifact with the result of a run."""


@dataclass(frozen=True)
class _Handed:
    """What ``rlhf run`` hands to the flow in its own process. A deployment's flow run opens its own session."""

    session: Session
    work: Work


_handed: ContextVar[_Handed | None] = ContextVar("handed", default=None)


def settings_text() -> str:
    """Every setting with its meaning, as Markdown for the run form."""
    rows = [
        f"| `{field.name}` | {field.type} | {'required' if field.required else field.default} | {field.meaning} |"
        for field in describe_fields()
    ]
    return "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *rows])


def _described(function: Callable[..., State[None]]) -> Callable[..., State[None]]:
    """Give the flow function the docstring from which Prefect makes the texts of its form."""
    meanings = {
        "config": f"Path of a TOML config on this machine, or the name of a preset: {', '.join(PRESETS)}.",
        "overrides": "Settings to change, each as section.field=value, for instance train.num_steps=10.\n\n"
        + settings_text(),
        "run_id": "Id of a run to go on with, instead of starting a new one from a config.",
    }
    arguments = "\n".join(f"{name}: {meaning}".replace("\n", "\n    ") for name, meaning in meanings.items())
    function.__doc__ = f"{DESCRIPTION}\n\nArgs:\n{textwrap.indent(arguments, '    ')}\n"
    return function


@flow(name="rlhf-run", flow_run_name="{run_id}", description=DESCRIPTION, retries=0, persist_result=False)
@_described
def rlhf_run(config: str = "", overrides: Sequence[str] = (), run_id: str = "") -> State[None]:
    handed = _handed.get()
    if handed is not None:
        return _finish(handed.session, handed.work)
    if bool(config) == bool(run_id):
        raise BadInput("give either config (and overrides) for a new run, or run_id to go on with one")
    site = load_site()
    with HistoryStore(site.database_url) as store:
        run_dir = RunDir.of(site.runs_dir, run_id) if run_id else new_run(config, overrides, site)
        _name_flow_run(run_dir.run_id)
        with opened(run_dir, site, store, resumed=bool(run_id)) as session:
            return _finish(session, _work(session))


def run_in_prefect(session: Session) -> None:
    """Drive an open session as a flow run. Raises what :func:`flows.stages.drive` raises.

    A Prefect server that is lost on the way changes nothing but the view.
    """
    work = _work(session)
    with _hand_over(_Handed(session, work)):
        try:
            rlhf_run(run_id=session.run_dir.run_id)
        except CancelledRun:
            if work.error is None:
                raise
            raise work.error from None
        except Exception as error:  # noqa: BLE001 - ours is raised again by settle; Prefect's own does not stop a run
            work.settle(error, session.observer.says)


def _work(session: Session) -> Work:
    return Work(lambda: drive(session, TaskCaller(session.observer.says), asked_in_prefect))


@contextmanager
def _hand_over(handed: _Handed) -> Iterator[None]:
    token = _handed.set(handed)
    try:
        yield
    finally:
        _handed.reset(token)


def _finish(session: Session, work: Work) -> State[None]:
    """Do the work, show the result as an artifact, and say in Prefect's words how it ended."""
    try:
        with shown_in_prefect(session):
            work()
    except RunCancelled as cancelled:
        return Cancelled(message=str(cancelled))
    finally:
        _try(lambda: _show_result(session), session.observer.says)
    promoted = describe(session.journal.record.promotion)
    return Completed(message=f"run {session.run_dir.run_id} completed" + (f"; {promoted}" if promoted else ""))


def _show_result(session: Session) -> None:
    if not server_answers():  # Prefect's own client would try for a minute
        raise ConnectionError("its server does not answer")
    summary = summarise(session.run_dir)
    create_markdown_artifact(markdown(summary), key=RESULT_KEY, description=f"{summary.run_id}: {summary.state.value}")


def _name_flow_run(run_id: str) -> None:
    def rename() -> None:
        with get_client(sync_client=True) as client:
            client.update_flow_run(runtime.flow_run.id, name=run_id)

    _try(rename, print)


def _try(action: Callable[[], None], say: Callable[[str], None]) -> None:
    """Do something for the view only: a server that is away must not stop a run."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever Prefect raises, the run directory and the history have it all
        say(f"Prefect could not be told: {type(error).__name__}: {error}")
