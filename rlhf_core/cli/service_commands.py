"""Services of a site: ``rlhf up``, ``down``, ``serve``, ``password``. Heavy modules are imported late."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_core.cli import output
from rlhf_core.cli.output import JsonOption

if TYPE_CHECKING:
    from rlhf_core.config import Site

ServicesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SERVICE]...", help="Only these: server, worker, keeper. All of them when left out."),
]


def up(
    services: ServicesArgument = None,
    status: Annotated[
        bool,
        typer.Option(
            "--status", help="Start nothing; say how each service stands, with exit code 1 where one is down."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start what a site needs on this machine: Prefect server with its UI, worker, and keeper; what runs is left alone.

    The services go on in the background; their logs are in the folder logs of RLHF_HOME. Runs of `rlhf run` use the
    server from then on. What dies is started again by the services that live. Nothing is fetched from, or sent to, the
    network.
    """
    from flows.server import configured_url, own_url, ui_url
    from flows.services import down_ones
    from flows.services import up as start
    from rlhf_core import private_files
    from rlhf_core.config import load_site

    site = load_site()
    if not status:
        private_files.make_folder(site.home)
        started = start(site, services or (), output.note)
        for one in started:
            output.note(f"{one.name}: {one.what} (process {one.pid})")
    if as_json:
        output.print_json(_seen(site))
    elif status:
        _print_status(site)
    if status and down_ones(site, services or ()):
        raise typer.Exit(1)
    if as_json or status:
        return
    output.print_text(f"Prefect: {ui_url(site)}")
    if configured_url() in ("", own_url(site)):
        output.print_text("It asks for the password of this site once in each browser; `rlhf password` prints it")


def password(as_json: JsonOption = False) -> None:
    """Print the password that the Prefect server of this site asks for: what its sign-in page takes, user and all.

    It is made once, in a file of RLHF_HOME that only you may read, unless RLHF_PREFECT_AUTH gives one. Whoever has it
    may run programs as the user of the services.
    """
    from flows.server import password as find
    from flows.server import ui_url
    from rlhf_core.config import load_site

    site = load_site()
    found = find(site)
    if as_json:
        output.print_json({"address": ui_url(site), "password": found})
    else:
        print(found)  # as it is: neither wrapped nor coloured


def down(services: ServicesArgument = None) -> None:
    """End what `rlhf up` started. The jobs of runs go on by themselves; the next `rlhf up` picks the runs up again."""
    from flows.services import active_runs
    from flows.services import down as stop
    from rlhf_core.config import load_site
    from rlhf_core.errors import HistoryError

    site = load_site()
    ended = stop(site, services or (), output.note)
    output.print_text(f"ended: {', '.join(ended)}" if ended else "nothing was running")
    try:
        runs = active_runs(site)
    except HistoryError as error:
        output.warn(f"which runs go on is not known: {error}")
        return
    if runs:
        output.print_text(
            f"{len(runs)} run(s) have not ended: {', '.join(runs)}. Their jobs go on by themselves; the next "
            f"`rlhf up` picks them up again, `rlhf resume RUN` one of them, `rlhf cancel RUN` ends one"
        )


def serve(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help="server, worker or keeper.")],
) -> None:
    """Be one service in the foreground, until SIGTERM: what systemd units, containers and `rlhf up` start."""
    from flows.services import wanted_services
    from flows.worker import serve as be
    from rlhf_core import private_files
    from rlhf_core.config import load_site

    site = load_site()
    (name,) = wanted_services(site, (service,))
    private_files.make_folder(site.home)
    be(site, name)


def _seen(site: "Site") -> list[dict[str, Any]]:
    from flows.services import num_restarts, status
    from rlhf_core.services.processes import ServiceFiles

    return [
        {
            "name": one.name,
            "state": one.state,
            "pid": one.pid or None,
            "since": one.record.since if one.record else None,
            "started_by": one.record.started_by if one.record else None,
            "restarts": num_restarts(site, one.name),
            "address": one.record.address if one.record else None,
            "log": ServiceFiles(site.home, one.name).log,
        }
        for one in status(site)
    ]


def _print_status(site: "Site") -> None:
    columns = ("service", "state", "process", "since", "started by", "restarts (1 h)", "address", "log")
    output.print_table(columns, [tuple(row.values()) for row in _seen(site)])
