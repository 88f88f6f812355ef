"""``rlhf deploy`` and ``rlhf submit``: runs that are asked for in Prefect, by hand or on time.

What is heavy is imported inside the functions, so that ``rlhf --help`` stays fast.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.output import JsonOption
from rlhf_core.cli.run_commands import ConfigArgument, SetOption

if TYPE_CHECKING:
    from rlhf_core.config import Site

TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="A word to find its runs by; may be given several times."),
]
OwnerOption = Annotated[str, typer.Option("--owner", help="Who asks. Default: you.")]


def deploy(
    config: ConfigArgument,
    set_: SetOption = None,
    name: Annotated[str, typer.Option("--name", help="Name of the deployment, instead of the one in the config.")] = "",
    cron: Annotated[
        str, typer.Option("--cron", metavar="CRON", help='When it runs by itself, for instance "0 2 * * *".')
    ] = "",
    timezone: Annotated[
        str, typer.Option("--timezone", metavar="ZONE", help="For --cron, for instance Europe/Berlin. Default: UTC.")
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, help="At most so many runs of it at a time, others wait; 0: no limit."),
    ] = None,
    priority: Annotated[
        str | None, typer.Option("--priority", metavar="high|default|low", help="Which runs are started first.")
    ] = None,
    tag: TagOption = None,
    owner: OwnerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make a config a deployment of Prefect, with a form in the UI; again, to bring it up to date.

    The config is kept as it is now, with the code that it needs: editing them later does not change what is scheduled.
    Schedules and limits that were set in the UI stay, unless they are given here.
    """
    site = _site_in_prefect()
    from flows.asking.deployments import register

    done = register(
        config,
        site,
        name=name,
        cron=cron,
        timezone=timezone,
        limit=limit,
        priority=priority,
        tags=tag or (),
        owner=owner,
        overrides=set_ or (),
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
    watch: Annotated[bool, typer.Option("--watch", help="Stay and watch the run until it ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask for a run in Prefect, and return at once; a worker of the site drives it.

    A file that was not deployed before is deployed first. Where it was, the run takes the file as it is now, and the
    deployment, with what it has scheduled, stays as it is.
    """
    site = _site_in_prefect()
    from flows.asking.deployments import submit_config

    asked = submit_config(config, site, overrides=set_ or (), tags=tag or (), owner=owner)
    if as_json:
        output.print_json({"run_id": asked.run_id, "flow_run_id": asked.flow_run_id, "url": asked.url})
    else:
        output.print_text(f"run {asked.run_id} is asked for: {asked.url}")
    if watch:
        _watch(site, asked.run_id, as_json)


def _site_in_prefect() -> "Site":
    """The site's settings, with Prefect's own set before it is imported."""
    from flows.site.server import connect
    from rlhf_core.config import load_site

    site = load_site()
    connect(site)
    return site


def _watch(site: "Site", run_id: str, as_json: bool) -> None:
    import time

    from rlhf_core.cli.watching import watch_run
    from rlhf_core.run_dir import RunDir

    run_dir = RunDir.of(site.runs_dir, run_id)
    if not run_dir.spec.is_file():
        output.note("waiting for a worker to begin; Ctrl-C leaves the run alone")
    while not run_dir.spec.is_file():
        time.sleep(1.0)
    watch_run(run_dir, 2.0, as_json=as_json)
