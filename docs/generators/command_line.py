"""``docs/cli.md``: every command with its arguments and options."""

from collections.abc import Iterator
from typing import Any

import typer

from generators.shared import GENERATED, cell, prose
from rlhf_core.cli.main import app

CLI = """\
# The command line

Results go to standard output, notes and progress to standard error. Every command that reads takes `--json`. A RUN is a
run id, a prefix of one, a name (which means the newest run with that name), or `last`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed (its diagnosis is printed), a database or folder cannot be used, or an unexpected error |
| 2 | bad input: config, data, a blocking check (also one on the nodes), an unknown run, a database of another schema |
| 130 | interrupted or cancelled |
"""


def cli() -> str:
    """Every command with its arguments and options."""

    parts = [GENERATED, CLI]
    for path, command in commands():
        parts += ["", f"## `{path}`\n", prose(command.help or ""), ""]
        parts += _parameters(path, command)
    return "\n".join(parts) + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that is not hidden, with what is typed to call it."""
    return _commands(typer.main.get_command(app), "rlhf")


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    # Told apart by what they have, not by their classes: some versions of typer bring click along, others import it.
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _parameters(path: str, command: Any) -> list[str]:
    usage, rows = [path], []
    for parameter in command.params:
        if parameter.hidden:
            continue
        if parameter.param_type_name == "argument":
            usage.append(parameter.metavar if parameter.required else f"[{parameter.metavar}]")
            rows.append(f"| `{parameter.metavar}` | {cell(parameter.help or '')} |")
        else:
            names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
            repeated = (
                " May be given several times." if parameter.multiple and "several times" not in parameter.help else ""
            )
            rows.append(f"| {names} | {cell(parameter.help or '')}{repeated} |")
    table = ["", "| argument | meaning |", "|---|---|", *rows] if rows else []
    return [f"    {' '.join(usage)} [OPTIONS]", *table]
