"""Services of a site: ``rlhf up``, ``down``, ``serve``, ``password``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_core.cli import output
from rlhf_core.cli.output import JsonOption
from rlhf_core.errors import HistoryError
from rlhf_core.schemas.attempts import RUN_ENDS, RunState
from rlhf_core.text.formatting import count

if TYPE_CHECKING:
    from rlhf_core.config.site import Site

ServicesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SERVICE]...", help="Services to act on: server, worker, daemon. Default: all."),
]


def up(
    services: ServicesArgument = None,
    status: Annotated[
        bool,
        typer.Option("--status", help="Start nothing; show the state of each service. Exit code 1 if one is down."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the services of a site on this machine: the Prefect server with its UI, a worker and the site daemon.

    Leaves running services alone. Services run in the background under supervisord, which restarts any that die; their
    logs are in the folder logs of RLHF_HOME. From then on, `rlhf run` uses this server. Nothing is fetched from, or
    sent to, the network.
    """
    from flows.server.settings import configured_url, own_url, ui_url
    from flows.services import down_ones, lacks_supervisord
    from flows.services import up as start
    from rlhf_core.config.site import load_site
    from rlhf_core.files import private as private_files

    site, names = load_site(), _current_names(services or ())
    if not status:
        private_files.make_folder(site.home)
        for one in start(site, names, output.note):
            output.note(f"{one.name}: {one.what} (process {one.pid})")
    if as_json:
        output.print_json(_status_rows(site))
    elif status:
        _print_status(site)
    else:
        output.print_text(f"Prefect: {ui_url(site)}")
        if configured_url() in ("", own_url(site)):
            output.print_text("It asks for the password of this site once in each browser; `rlhf password` prints it")
    if status:
        if unwatched := lacks_supervisord(site):
            output.warn("no supervisord responds, so services are not restarted; `rlhf up` starts one")
        if unwatched or down_ones(site, names):
            raise typer.Exit(1)


def password(as_json: JsonOption = False) -> None:
    """Print the user and password for this site's Prefect server, in the form that its sign-in page expects.

    The password is generated once, in a file of RLHF_HOME that only you can read, unless RLHF_PREFECT_AUTH provides
    one. Any user with the password can run programs as the user of the services.
    """
    from flows.server.settings import password as find
    from flows.server.settings import ui_url
    from rlhf_core.config.site import load_site

    site = load_site()
    found = find(site)
    if as_json:
        output.print_json({"address": ui_url(site), "password": found})
    else:
        print(found)  # as it is: neither wrapped nor coloured


def down(services: ServicesArgument = None) -> None:
    """Stop the services that `rlhf up` started. The jobs of runs continue; the next `rlhf up` adopts the runs again."""
    from flows.services import down as stop
    from rlhf_core.config.site import load_site

    site = load_site()
    ended = stop(site, _current_names(services or ()), output.note)
    output.print_text(f"ended: {', '.join(ended)}" if ended else "nothing was running")
    try:
        runs = _active_runs(site)
    except HistoryError as error:
        output.warn(f"active runs are unknown: {error}")
        return
    if runs:
        output.print_text(
            f"{count(len(runs), 'active run')}: {', '.join(runs)}. Their jobs continue; the next `rlhf up` adopts "
            "them, `rlhf resume RUN` one of them, `rlhf cancel RUN` ends one"
        )


def serve(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help="server, worker or daemon.")],
) -> None:
    """Run one service in the foreground until SIGTERM, for systemd units, containers and supervisord."""
    from flows.services import wanted_services
    from flows.serving import serve as be
    from rlhf_core.config.site import load_site
    from rlhf_core.files import private as private_files

    site = load_site()
    (name,) = wanted_services(site, _current_names((service,)))
    private_files.make_folder(site.home)
    be(site, name)


def _current_names(services: Sequence[str]) -> list[str]:
    """Translate former names of services into current ones, with a note for each."""
    from rlhf_core.services.lifecycle import EARLIER_NAMES

    for name in services:
        if name in EARLIER_NAMES:
            output.note(f"the {name} is now called {EARLIER_NAMES[name]}; use that name")
    return [EARLIER_NAMES.get(name, name) for name in services]


def _active_runs(site: "Site") -> list[str]:
    """Ids of the runs that have not ended, according to the history; empty if there is no history yet."""
    from rlhf_core.history import database, migrate, queries
    from rlhf_core.history.store import HistoryStore

    file = database.sqlite_file(database.parse_url(site.database_url))
    if file is not None and migrate.is_new(file):
        return []
    with HistoryStore(site.database_url) as store:
        return [
            run["run_id"]
            for state in RunState
            if state not in RUN_ENDS
            for run in queries.list_runs(store, state=state.value, limit=None)
        ]


def _status_rows(site: "Site") -> list[dict[str, Any]]:
    from flows.services import num_restarts, status
    from rlhf_core.services.presence import ServiceFiles

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
    output.print_table(columns, [tuple(row.values()) for row in _status_rows(site)])
