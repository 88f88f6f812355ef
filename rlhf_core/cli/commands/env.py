"""``rlhf env``: environments of trainers that are other programs."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.output import JsonOption
from rlhf_core.machine.environments import names

_PROGRESS = re.compile(r"making|Collecting|Downloading|Building|Using cached|Installing|Successfully|ERROR")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help=f"Name of an environment: {', '.join(names())}.")]
FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="Its folder.", show_default="<home>/environments/<name>")
]


def create(
    name: NameArgument,
    folder: FolderOption = None,
    torch: Annotated[
        str, typer.Option(help="Requirement of torch, for instance torch==2.12.1, instead of the tested one.")
    ] = "",
    python: Annotated[
        str, typer.Option(help="Interpreter to build it with.", show_default="this one")
    ] = sys.executable,
) -> None:
    """Build the environment of a trainer. Continues an unfinished one, and does nothing if it is complete.

    pip's own settings decide where packages come from. On a cluster, the nodes must be able to see the folder.
    """
    from rlhf_core.config.site import load_site
    from rlhf_core.machine import environments

    definition = environments.definition(name)
    target = (folder or environments.default_folder(name, load_site().home)).expanduser().absolute()
    made = environments.create(definition, target, torch=torch, python=python, report_progress=_print_progress)
    done = "already exists" if made.was_there else f"was built in {made.seconds:.0f} s"
    use = name if folder is None else str(target)
    output.print_text(f'{target} {done}. Use it with trainer.environment = "{use}".')


def list_(as_json: JsonOption = False) -> None:
    """List the environments that can be built, with the state of each in the home folder of the site."""
    from rlhf_core.config.site import load_site
    from rlhf_core.machine import environments

    home = load_site().home
    rows = []
    for name in names():
        definition = environments.definition(name)
        found = environments.inspect(definition, environments.default_folder(name, home))
        rows.append({"name": name, "state": found.state, "folder": str(found.folder), "summary": definition.summary})
    if as_json:
        output.print_json(rows)
    else:
        output.print_table(("name", "state", "folder", "for"), [tuple(row.values()) for row in rows])


def show(name: NameArgument, folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Show what an environment is built from, and its state."""
    from rlhf_core.config.site import load_site
    from rlhf_core.machine import environments

    definition = environments.definition(name)
    target = (folder or environments.default_folder(name, load_site().home)).expanduser().absolute()
    found = environments.inspect(definition, target)
    row = {
        "name": name,
        "summary": definition.summary,
        "folder": str(target),
        "state": found.state,
        "python": found.python,
        "torch": found.torch or definition.torch,
        "requirements": list(definition.requirements),
        "constraints": list(definition.constraints),
    }
    if as_json:
        output.print_json(row)
    else:
        cells = [" ".join(map(str, value)) if isinstance(value, list) else str(value) for value in row.values()]
        output.print_records(tuple(row), [cells])


def _print_progress(line: str) -> None:
    if _PROGRESS.match(line):
        output.note(line)
