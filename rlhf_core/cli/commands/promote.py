"""``rlhf approve``, ``refuse`` and ``notify``: answers about a model, and notifications."""

from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.deploy import site_in_prefect
from rlhf_core.cli.commands.history import RunArgument
from rlhf_core.cli.commands.run import find_run
from rlhf_core.cli.output import JsonOption
from rlhf_core.errors import PromotionFailed
from rlhf_core.machine.accounts import attributed_here
from rlhf_core.schemas.attempts import PromotionState

if TYPE_CHECKING:
    from rlhf_core.control.approval import Verdict

ByOption = Annotated[str, typer.Option("--by", help="Name to record, beside your user name. Default: you.")]


def approve(
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="Reason; recorded in the history and in the model card.")] = "",
    by: ByOption = "",
    as_json: JsonOption = False,
) -> None:
    """Approve the promotion of the evaluated checkpoint of a completed run to a model directory.

    Works even after a refusal, after the deadline, or if the model could not be written; in these cases, this process
    writes it.
    """
    _decide(run, "approved", by, reason, as_json)


def refuse(
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="Reason; recorded in the history.")],
    by: ByOption = "",
    as_json: JsonOption = False,
) -> None:
    """Refuse the promotion of the model of a completed run."""
    _decide(run, "refused", by, reason, as_json)


def _decide(run: str, verdict: "Verdict", by: str, reason: str, as_json: bool) -> None:
    from rlhf_core.config.site import load_site
    from rlhf_core.control.approval import answer_promotion
    from rlhf_core.history.store import HistoryStore

    site = load_site()
    with HistoryStore(site.database_url) as store:
        run_dir = find_run(store, site, run)
        answered = answer_promotion(run_dir, site, store, verdict, attributed_here(by), reason, log=output.note)
    if answered.state is PromotionState.FAILED:
        raise PromotionFailed(answered.message)
    if as_json:
        output.print_json({"run_id": run_dir.run_id, "state": answered.state, "path": answered.path})
    else:
        output.print_text(answered.message)


def notify(
    test: Annotated[bool, typer.Option("--test", help="Send one test message now.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Register the notifications of this site ([notify] of rlhf.toml) with Prefect; with --test, also send a
    message."""
    site = site_in_prefect()
    from flows.notify import register, send_test  # only now: Prefect reads its settings when it is imported

    names = register(site)
    answer = send_test(site) if test else ""
    if as_json:
        output.print_json({"automations": names, "test": answer or None})
        return
    output.print_text(
        f"registered: {', '.join(names)}" if names else "no notification sent: notify.webhook_url is empty"
    )
    if test:
        output.print_text(f"test message sent: {answer}")
