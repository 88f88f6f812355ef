"""``rlhf deploy`` and ``rlhf submit``: runs requested in Prefect, on demand or on a schedule."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.check import ConfigArgument, SetOption
from rlhf_core.cli.commands.history import history_if_usable
from rlhf_core.cli.output import JsonOption
from rlhf_core.errors import BadInput, RunNotBegun

if TYPE_CHECKING:
    from flows.deployments.submission import Submitted
    from rlhf_core.config.site import Site

POLL_INTERVAL_S = 2.0
"""Interval between two queries of the reason why a run has not begun, in seconds."""

STUCK_S = 300.0
"""Time that a script waits for a worker that can begin the run, in seconds. At a terminal, the user decides."""

TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="Label to find its runs by; may be given several times."),
]
OwnerOption = Annotated[str, typer.Option("--owner", help="Owner of the runs. Default: you.")]


def deploy(
    config: ConfigArgument,
    set_: SetOption = None,
    name: Annotated[str, typer.Option("--name", help="Name of the deployment, instead of the one in the config.")] = "",
    cron: Annotated[str, typer.Option("--cron", metavar="CRON", help='Schedule, for instance "0 2 * * *".')] = "",
    timezone: Annotated[
        str, typer.Option("--timezone", metavar="ZONE", help="For --cron, for instance Europe/Berlin. Default: UTC.")
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, help="Largest number of its runs active at once; others wait. 0: no limit."),
    ] = None,
    priority: Annotated[
        str | None, typer.Option("--priority", metavar="high|default|low", help="Priority of its runs in the queue.")
    ] = None,
    skip_if_busy: Annotated[
        bool | None,
        typer.Option(
            "--skip-if-busy/--no-skip-if-busy",
            help="Skip a scheduled run, with a message, while the last run of the deployment is still active.",
        ),
    ] = None,
    tag: TagOption = None,
    owner: OwnerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Deploy a config to Prefect, with a form in the UI; deploy it again to update it.

    Stores the config as it is now, with the code that it needs, so later edits do not change scheduled runs. Schedules,
    limits and tags stay, unless you give them here. Updating the deployment of another user makes you its owner.
    """
    _require_good_config(config, set_ or ())
    site = site_in_prefect()
    _warn_of_other_user(site)
    from flows.deployments.registration import register
    from rlhf_core.machine.accounts import user_name

    done = register(
        config,
        site,
        name=name,
        cron=cron,
        timezone=timezone,
        limit=limit,
        priority=priority,
        skip_if_busy=skip_if_busy,
        tags=tag or (),
        owner=owner,
        overrides=set_ or (),
    )
    owner = owner or user_name()
    if done.earlier_owner not in ("", owner):
        output.warn(
            f"{done.name} was a deployment of {done.earlier_owner}: it now has this config, and its runs belong to "
            f"{owner}"
        )
    if as_json:
        output.print_json({"deployment": done.name, "id": done.id, "url": done.url})
    else:
        output.print_text(f"{done.name} is deployed{f', runs at {cron!r}' if cron else ''}: {done.url}")


def submit(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG|DEPLOYMENT", help="A TOML file, or the name of a deployment or preset."),
    ],
    set_: SetOption = None,
    tag: TagOption = None,
    owner: OwnerOption = "",
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Watch the run until it ends; exit code 1 if it failed, 130 if it was cancelled."),
    ] = False,
    begin_within_s: Annotated[
        float | None,
        typer.Option(
            "--begin-within",
            metavar="SECONDS",
            min=0,
            help="With --watch: exit with code 1 if the run has not started after this time.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Request a run in Prefect and return immediately; a worker of the site runs it.

    With --watch, standard error shows why a run has not started yet. If there is no worker, scripts (without a
    terminal) wait at most five minutes, unless --begin-within says otherwise; the request remains.

    A file that is not deployed yet is deployed first. Otherwise, the run uses the file as it is now, and the deployment
    and its schedule stay unchanged.
    """
    _require_good_config(config, set_ or (), or_deployment=True)
    site = site_in_prefect()
    if Path(config).is_file():  # otherwise, it was stored by the user who deployed it
        _warn_of_other_user(site)
    from flows.deployments.submission import submit_config
    from rlhf_core.machine.accounts import user_name

    request = submit_config(config, site, overrides=set_ or (), tags=tag or (), owner=owner or user_name())
    if as_json:
        output.print_json({"run_id": request.run_id, "flow_run_id": request.flow_run_id, "url": request.url})
    else:
        output.print_text(f"run {request.run_id} is requested: {request.url}")
    if watch:
        _watch(site, request, begin_within_s, as_json)


def _require_good_config(config: str, overrides: Sequence[str], *, or_deployment: bool = False) -> None:
    """Refuse unusable input before Prefect is imported, which takes seconds.

    Raises:
        BadConfig: the config or an override cannot be used.
        BadInput: it is neither a file nor a preset, and not a valid name of a deployment.
    """
    from rlhf_core.config import loading as configs
    from rlhf_core.config.problems import expected_name, is_name

    if not or_deployment or Path(config).is_file():
        configs.load(config, overrides)
        return
    configs.check_overrides(overrides)  # other errors depend on the deployed config
    if not is_name(config.removeprefix("rlhf-run/")):
        expected = expected_name(Path(config).stem)
        raise BadInput(f"found {config!r}: there is no such file, and as a deployment name {expected}")


def _warn_of_other_user(site: "Site") -> None:
    """Warn that a config is about to be stored where only this user can read it, if the worker is not this user's."""
    from flows.server.settings import configured_url, own_url
    from rlhf_core.machine.accounts import account
    from rlhf_core.services.presence import ServiceState, service_status

    url = configured_url()
    if url not in ("", own_url(site)) and service_status(site.home, "worker").state is ServiceState.STOPPED:
        output.warn(
            f"the config is stored in {site.home / 'deployments'}, which only {account()} can read, and RLHF_HOME has "
            f"no worker: if the worker of {url} belongs to another user, it cannot start the run. Ask that user to "
            "deploy the config, or start it yourself with `rlhf run`"
        )


def site_in_prefect() -> "Site":
    """Load the site's settings, and import Prefect once its own are set."""
    from flows.prefect_imports import import_prefect
    from flows.server.required import require
    from rlhf_core.config.site import load_site

    site = load_site()
    require(site)
    import_prefect()
    return site


def _watch(site: "Site", request: "Submitted", begin_within_s: float | None, as_json: bool) -> None:
    from rlhf_core.cli.watching import note_open_question, require_completed, watch_run
    from rlhf_core.files.lookups import is_there
    from rlhf_core.run_dir.run import RunDir

    run_dir = RunDir.of(site.runs_dir, request.run_id)
    _await_beginning(lambda: is_there(run_dir.spec), request, begin_within_s)
    without = "If the run loses its controller, this command cannot see that"
    with history_if_usable(site, without) as store:
        record = watch_run(run_dir, 2.0, store, as_json=as_json)
    require_completed(request.run_id, record)
    note_open_question(run_dir, record)


def _await_beginning(has_begun: Callable[[], bool], request: "Submitted", begin_within_s: float | None) -> None:
    """Wait until a worker has created the run, and report the reason for waiting.

    Raises:
        RunNotBegun: the run has not begun in time.
        RunFailed, RunCancelled: the run will never begin.
    """
    from flows.queue import queue_wait
    from rlhf_core.cli.progress import terminal_prompt

    timeout_s = STUCK_S if begin_within_s is None and terminal_prompt() is None else None
    started, stuck_since, reason = time.monotonic(), None, ""
    while not has_begun():
        wait = queue_wait(request.flow_run_id)
        if has_begun():
            return  # it began while Prefect was queried
        if wait.words != reason:
            reason = wait.words
            (output.warn if wait.stuck else output.note)(f"run {request.run_id} has not started: {reason}")
        now = time.monotonic()
        stuck_since = (now if stuck_since is None else stuck_since) if wait.stuck else None
        late = begin_within_s is not None and now - started >= begin_within_s
        if late or (timeout_s is not None and stuck_since is not None and now - stuck_since >= timeout_s):
            raise RunNotBegun(
                f"run {request.run_id} has not started after {output.seconds_text(now - started)}: {reason}. The "
                "request remains, and the run starts when it can: do not request it again. Cancel on its page "
                f"withdraws it: {request.url}"
            )
        time.sleep(POLL_INTERVAL_S)
