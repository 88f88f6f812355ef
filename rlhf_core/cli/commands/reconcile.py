"""``rlhf reconcile``: one round of the reconciler on request."""

from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.output import JsonOption
from rlhf_core.diagnosis.reconcile.decisions import ActionKind, ReconcileAction

if TYPE_CHECKING:
    from flows.flow_runs.facts import PrefectFlowRuns


def reconcile(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the database, Prefect and the scheduler once and repair differences, as the site daemon does
    continuously. Exit code 1 if an action failed."""
    from flows.prefect_imports import import_prefect
    from flows.server.required import connect_if_any
    from rlhf_core.config.site import load_site
    from rlhf_core.control.reconcile.once import poll_once, reconcile_once
    from rlhf_core.history.store import HistoryStore

    site = load_site()
    connect_if_any(site)
    import_prefect()  # only now, because it reads its settings then
    from flows.daemon import flow_runs_of

    flow_runs = flow_runs_of(site)
    found: list[tuple[ReconcileAction, bool | None, str]]
    problems: list[str] = []
    with HistoryStore(site.database_url) as store:
        if dry_run:
            found = [(action, None, "would be done") for action in poll_once(site, store, flow_runs, problems.append)]
        else:
            done_now = reconcile_once(site, store, flow_runs, problems.append)
            found = [(one.action, one.done, one.message) for one in done_now]
    noted = tuple(action.reason for action, _, _ in found if action.kind is ActionKind.NOTE)
    for problem in problems:
        if not problem.endswith(noted):  # the table has those
            output.warn(problem)
    if as_json:
        output.print_json([{**_as_dict(action), "done": done, "said": result} for action, done, result in found])
    elif not found:
        output.print_text("Nothing to do, as far as could be seen." if problems else _agreement(flow_runs))
    else:
        rows = [(one.run_id, one.kind.value.replace("_", " "), one.reason, result) for one, _, result in found]
        output.print_table(("run", "action", "why", "result"), rows)
    if any(done is False for action, done, _ in found if action.kind is not ActionKind.NOTE):
        raise typer.Exit(1)


def _agreement(flow_runs: "PrefectFlowRuns | None") -> str:
    if flow_runs is None:
        return "Database and scheduler agree; there is no Prefect server."
    if not flow_runs.answers():
        return "Database and scheduler agree; the Prefect server does not answer."
    return "Database, Prefect and scheduler agree."


def _as_dict(action: ReconcileAction) -> dict[str, object]:
    return {
        "action": action.kind,
        "run_id": action.run_id,
        "reason": action.reason,
        "attempt": action.attempt or None,
        "job_id": action.job_id or None,
        "flow_run_id": action.flow_run_id or None,
        "task_run_id": action.task_run_id or None,
        "flow_state": action.flow_state,
        "step": action.step or None,
    }
