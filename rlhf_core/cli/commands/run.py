"""``rlhf run``, ``resume``, ``cancel``, ``watch``, ``logs`` and ``doctor``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.check import ConfigArgument, SetOption
from rlhf_core.cli.commands.history import RunArgument, history_if_usable
from rlhf_core.cli.output import JsonOption
from rlhf_core.cli.run_output import print_plan, print_summary
from rlhf_core.errors import SchedulerError, UnknownRun
from rlhf_core.machine.accounts import account
from rlhf_core.schemas.attempts import RunState

if TYPE_CHECKING:
    from rlhf_core.config.site import Site
    from rlhf_core.control.controller import Controller
    from rlhf_core.history.store import HistoryStore
    from rlhf_core.run_dir.run import RunDir

NameOption = Annotated[str, typer.Option("--name", help="Name of the run, instead of the one in the config.")]
TagOption = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Label to find it by; may be given several times.")
]
NoPrefectOption = Annotated[bool, typer.Option("--no-prefect", help="Run the same steps without Prefect.")]


# ---------------------------------------------------------------------------------------------------------------------
# A run


def run(
    config: ConfigArgument,
    set_: SetOption = None,
    name: NameOption = "",
    tag: TagOption = None,
    no_prefect: NoPrefectOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and start nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a config from start to finish (preflight, allocate, train, evaluate), with progress and a summary.

    Ctrl-C asks once, then cancels cleanly. If this process is killed, training continues, and `rlhf resume` adopts it.
    Exit code 0: done, 1: failed (with the diagnosis), 2: bad input or blocked by a check, 130: cancelled.
    """
    from rlhf_core.config.site import load_site
    from rlhf_core.control.new_run import new_run, resolve, stored_spec
    from rlhf_core.history.store import HistoryStore
    from rlhf_core.watchdog.watcher import record

    overrides = set_ or []
    site = load_site()
    # Its errors are reported before anything is started.
    spec = resolve(config, overrides, name, refuse_misplaced=True)
    if dry_run:
        print_plan(stored_spec(spec, site), site, as_json)
        return
    with HistoryStore(site.database_url) as store, _server(site, no_prefect):
        run_dir = new_run(config, overrides, site, name, tags=tag or ())
        record(run_dir, store)  # from now on, the run is listed, even if this process is ended at once
        output.note(f"run {run_dir.run_id} in {run_dir.root}")
        _drive(run_dir, site, store, no_prefect=no_prefect, resumed=False)
    print_summary(run_dir, as_json)


def resume(
    run: RunArgument,
    code: Annotated[
        bool,
        typer.Option("--code", help="Copy your code again; for a run that has ended. Default: use the run's copy."),
    ] = False,
    no_prefect: NoPrefectOption = False,
    as_json: JsonOption = False,
) -> None:
    """Resume a run: adopt its job if it is alive, or start a new attempt from the last complete checkpoint.

    The run uses the copy of your code that it made when it was requested, for instance of your reward function; the
    command names the files that changed since. With --code, the new attempts use the present files.

    If the run still has a running controller, the command names it and changes nothing. A controller that died on this
    host is replaced at once; one on another host when its lease expires, within a minute.
    """
    from rlhf_core.config.site import load_site
    from rlhf_core.control.promotion import is_due
    from rlhf_core.history.store import HistoryStore
    from rlhf_core.launch.journal import read_record
    from rlhf_core.launch.lease import refuse_if_driven
    from rlhf_core.watchdog.watcher import record

    site = load_site()
    with HistoryStore(site.database_url) as store:
        run_dir = find_run(store, site, run)
        present = read_record(run_dir)
        record(run_dir, store)
        if present.state is RunState.COMPLETED and not is_due(run_dir.read_spec(), present):
            output.note(f"run {run_dir.run_id} is completed; there is nothing to resume")
        else:
            refuse_if_driven(store, run_dir.run_id)  # before a server is started
            with _server(site, no_prefect):
                _drive(run_dir, site, store, no_prefect=no_prefect, resumed=True, code=code)
    print_summary(run_dir, as_json)


def cancel(
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="Reason; recorded in the history, with your user name.")] = "",
    save: Annotated[bool, typer.Option("--save", help="Write a checkpoint first, if the workers still can.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Cancel a run and make sure that its job is gone, with or without a running controller. Withdraws a request in
    Prefect that no worker has started, by its whole name in `rlhf runs --queued`."""
    from rlhf_core.config.site import load_site
    from rlhf_core.control.cancel import Cancelled, cancel_run
    from rlhf_core.control.gone_directory import cancel_gone

    site = load_site()
    why = f"{reason or 'rlhf cancel'} (by {account()})"
    with history_if_usable(site, "Searching the run directories instead") as store:
        try:
            run_dir = find_run(store, site, run)
        except UnknownRun as error:
            gone = cancel_gone(run, site, store, why) if store is not None else None
            if gone is None and not _withdraw(site, run, why):
                raise UnknownRun(
                    f"{error} A request that no worker has started is withdrawn by its whole name in "
                    f"`rlhf runs --queued`"
                ) from None
            not_begun = f"{run} had not started; its flow run in Prefect is cancelled"
            run_id, outcome = run, gone or Cancelled(RunState.CANCELLED, True, not_begun)
        else:
            run_id = run_dir.run_id
            outcome = cancel_run(run_dir, site, store, why, save=save, log=output.note)
    if as_json:
        output.print_json({"run_id": run_id, "state": outcome.state, "job_ended": outcome.job_ended})
    else:
        output.print_text(outcome.message)


def _withdraw(site: "Site", text: str, reason: str) -> bool:
    """Withdraw the request of this name if its run has not begun; False if there is none."""
    from flows.server.settings import answers, connect

    url = connect(site)
    if not url or not answers(url):
        return False
    from flows.queue import withdraw

    return withdraw(text, reason)


def find_run(store: "HistoryStore | None", site: "Site", text: str) -> "RunDir":
    """Find the directory of a run by its id or name; a run that is not in the history yet is found on disk.

    Args:
        store: the history; None if it cannot be used, in which case only the id finds a run.

    Raises:
        UnknownRun: the run does not exist, or its directory is gone.
    """
    from rlhf_core.history import queries
    from rlhf_core.run_dir.run import RunDir

    on_disk = RunDir.find(site.runs_dir, text)
    if on_disk is not None:
        return on_disk
    if store is None:
        raise UnknownRun(f"{site.runs_dir} has no run {text!r}: without the history only its full id finds it")
    run_dir = queries.run_dir_of(store, queries.resolve_run(store, text))
    if not run_dir.spec.is_file():
        raise UnknownRun(f"the directory of run {run_dir.run_id}, {run_dir.root}, is gone")
    return run_dir


@contextmanager
def _server(site: "Site", no_prefect: bool) -> Iterator[None]:
    """Provide the Prefect server of a run, unless it runs without Prefect."""
    if no_prefect:
        yield
        return
    from flows.server.settings import connect
    from flows.server.temporary import prefect_server

    connect(site)
    with prefect_server(site.home, output.note):
        yield


def _drive(
    run_dir: "RunDir",
    site: "Site",
    store: "HistoryStore",
    *,
    no_prefect: bool,
    resumed: bool,
    code: bool = False,
) -> None:
    """Drive a run to its end. If the user or the scheduler ends that early, a note names the commands that go on."""

    def waits(owner: str, seconds: float) -> None:
        output.note(f"{owner} Waiting for its renewal or expiry, {seconds:.0f} s at most ...")

    try:
        from rlhf_core.cli.progress import TerminalProgress, terminal_prompt
        from rlhf_core.control.controller import opened
        from rlhf_core.control.driving_flow_run import NO_FLOW_RUN
        from rlhf_core.launch.lease import IfHeld

        progress = TerminalProgress(run_dir.read_spec().spec, run_dir.run_id, terminal_prompt())
        # With Prefect, the flow run of this process starts only later and records itself in the journal.
        flow_run = NO_FLOW_RUN if no_prefect else None
        with opened(
            run_dir,
            site,
            store,
            progress,
            resumed=resumed,
            flow_run=flow_run,
            on_wait=waits,
            if_held=IfHeld.FAIL_IF_ALIVE,
        ) as controller:
            if resumed:
                _settle_code(controller, take=code)
            with progress:
                _carry_out(controller, no_prefect)
    except KeyboardInterrupt:
        output.note(_left_behind(run_dir))
        raise


def _left_behind(run_dir: "RunDir") -> str:
    """Describe a run that this process leaves without a controller: Ctrl-C was pressed early, or twice."""
    from rlhf_core.launch.journal import read_record

    run_id, record = run_dir.run_id, read_record(run_dir)
    attempt = record.last_attempt
    if record.cancelling is not None and not record.ended:
        return (
            f"stopped watching while run {run_id} is being cancelled: `rlhf cancel {run_id}` completes that, "
            f"`rlhf resume {run_id}` completes it and then continues the run from its last checkpoint"
        )
    if attempt is None or attempt.ended:
        return f"run {run_id} stays as it is: `rlhf resume {run_id}` continues it, `rlhf cancel {run_id}` ends it"
    return (
        f"stopped watching; the job of {run_id} continues. `rlhf resume {run_id}` adopts it, `rlhf cancel {run_id}` "
        "ends it"
    )


def _settle_code(controller: "Controller", *, take: bool) -> None:
    """Copy the user's present code, or warn that the run uses an older copy if the two differ."""
    from rlhf_core.control.own_code import advise_about_code, take_code

    if take:
        output.note(take_code(controller))
    elif advice := advise_about_code(controller):
        output.warn(advice)


def _carry_out(controller: "Controller", no_prefect: bool) -> None:
    try:
        if no_prefect:
            from rlhf_core.control.steps import drive

            drive(controller)
        else:
            from flows.prefect_imports import import_prefect

            import_prefect()
            from flows.run import run_in_prefect

            run_in_prefect(controller)
    except SchedulerError:
        run_id = controller.run_dir.run_id
        output.note(
            f"run {run_id} stays as it is: `rlhf resume {run_id}` continues it once the scheduler responds, "
            f"`rlhf cancel {run_id}` ends it"
        )
        raise


# ---------------------------------------------------------------------------------------------------------------------
# Watching


def watch(
    run: RunArgument = "last",
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between two updates.")] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Follow a run that another process drives, until it ends. Read-only; Ctrl-C does not affect the run.

    Exit code 1 if it failed, 130 if it was cancelled.

    If nothing drives the run any more, the command says since when.

    With --json: prints one line of JSON whenever something changes.
    """
    from rlhf_core.cli.watching import note_open_question, require_completed, watch_run
    from rlhf_core.config.site import load_site
    from rlhf_core.history.store import HistoryStore

    site = load_site()
    with HistoryStore(site.database_url) as store:
        run_dir = find_run(store, site, run)
        record = watch_run(run_dir, interval_s, store, as_json=as_json)
    require_completed(run_dir.run_id, record)
    note_open_question(run_dir, record)


def logs(
    run: RunArgument = "last",
    role: Annotated[str, typer.Option(help="Only this role: trainer, evaluator, rollout, or agent.")] = "",
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Attempt; default: the newest.")] = None,
    restart: Annotated[int | None, typer.Option(min=0, help="Restart; default: the newest.")] = None,
    tail: Annotated[int, typer.Option("--tail", "-n", min=0, help="Number of last lines of each log; 0 for all.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the logs of a run's workers and agents."""
    from rlhf_core.cli.log_files import LogChoice, find_logs, follow_logs, last_lines, print_logs
    from rlhf_core.config.site import load_site
    from rlhf_core.history.store import HistoryStore

    choice = LogChoice(role=role, rank=rank, attempt=attempt, restart=restart)
    site = load_site()
    with HistoryStore(site.database_url) as store:
        run_dir = find_run(store, site, run)
    if as_json:
        found = find_logs(run_dir, choice)
        output.print_json([{"title": log.title, "path": log.path, "text": last_lines(log.path, tail)} for log in found])
    elif follow:
        follow_logs(run_dir, choice, tail)
    else:
        print_logs(run_dir, choice, tail)


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine for the requirements of training. Exit code 1 if something is missing."""
    from flows.server.proxies import status_of
    from flows.server.settings import ANSWER_TIMEOUT_S, configured_url, own_url
    from flows.services import status
    from rlhf_core.cli.doctor import examine
    from rlhf_core.config.site import load_site

    site = load_site()
    services, server = {one.name: one.state.value for one in status(site)}, configured_url()
    code = status_of(f"{server}/health", ANSWER_TIMEOUT_S) if server else None
    # A hosted server may require a key; these are of a proxy before a server that does not answer.
    answers = code is not None and code not in (502, 503, 504)
    items = examine(site, services, server, answers=answers, is_own=server == own_url(site))
    if as_json:
        output.print_json([vars(one) for one in items])
    else:
        said = ["", *(one.advice for one in items)]  # one command installs all packages that are missing
        rows = [
            (one.name, "ok" if one.ok else "lacking", one.found, "as above" if one.advice == last != "" else one.advice)
            for one, last in zip(items, said, strict=False)
        ]
        output.print_table(("", "", "found", "what to do"), rows)
    if not all(one.ok for one in items):
        raise typer.Exit(1)
