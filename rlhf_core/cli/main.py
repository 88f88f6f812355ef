"""The ``rlhf`` command: registers the commands and turns errors into exit codes.

0: success, 1: failure, 2: bad input or a blocked run, 130: cancelled.
"""

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlhf_core import __version__
from rlhf_core.cli import output
from rlhf_core.cli.commands import check as check_commands
from rlhf_core.cli.commands import compare as compare_command
from rlhf_core.cli.commands import config as config_commands
from rlhf_core.cli.commands import db as db_commands
from rlhf_core.cli.commands import deploy as deploy_commands
from rlhf_core.cli.commands import env as env_commands
from rlhf_core.cli.commands import export as export_command
from rlhf_core.cli.commands import nodes as nodes_command
from rlhf_core.cli.commands import plan as plan_command
from rlhf_core.cli.commands import promote as promote_commands
from rlhf_core.cli.commands import reconcile as reconcile_command
from rlhf_core.cli.commands import report as report_command
from rlhf_core.cli.commands import run as run_commands
from rlhf_core.cli.commands import runs as runs_command
from rlhf_core.cli.commands import services as service_commands
from rlhf_core.cli.commands import show as show_command
from rlhf_core.cli.commands import sql as sql_command
from rlhf_core.cli.commands import wrap as wrap_command
from rlhf_core.config.site_paths import make_absolute, misspelt
from rlhf_core.errors import BadConfig, RlhfError
from rlhf_core.garbage import collect_rarely
from rlhf_core.machine.accounts import expanded
from rlhf_core.schemas.migration import OldSettings

_OTHER_NAMES = {
    **dict.fromkeys(("list", "ls", "ps", "queue", "status"), "rlhf runs"),
    **dict.fromkeys(("kill", "stop"), "rlhf cancel"),
    **dict.fromkeys(("launch", "start", "train"), "rlhf run"),
    "tail": "rlhf logs",
    "validate": "rlhf check",
    "version": "rlhf --version",
}
"""Names of commands in other programs, and the command here."""


class _Commands(TyperGroup):
    """Group of commands that knows their names in other programs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a command line."""
        if args[0] in _OTHER_NAMES and args[0] not in self.commands and not ctx.resilient_parsing:  # as for completion
            ctx.fail(f"No such command {args[0]!r}. The command here is `{_OTHER_NAMES[args[0]]}`.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="rlhf",
    cls=_Commands,
    help="Runs RLHF training as supervised jobs: preflight, allocate, train, evaluate; every run is in SQL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)
db_app = typer.Typer(
    help="The history database: migrate it, rebuild it from the run directories, create a read-only role.",
    no_args_is_help=True,
)

config_app = typer.Typer(
    help="Config files: show all settings of one, rewrite one of an earlier version.", no_args_is_help=True
)

env_app = typer.Typer(help="Environments of external trainers.", no_args_is_help=True)

_SETTINGS = "All settings and their meaning: rlhf config show --help"
_RUNNING = "Run"
_LOOKING = "Look"
_SITE = "Site"


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print_text(f"rlhf-flows {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # handled by its callback
    for name, meant in misspelt(os.environ):
        output.warn(f"{name} has no effect: rlhf knows no such variable; did you mean {meant}?")
    make_absolute(os.environ)


app.command("init", rich_help_panel=_RUNNING)(check_commands.init)
app.command("wrap", rich_help_panel=_RUNNING, context_settings={"allow_interspersed_args": False})(wrap_command.wrap)
app.add_typer(config_app, name="config", rich_help_panel=_RUNNING)
config_app.command("show", cls=config_commands.CommandWithSettings)(config_commands.show)
config_app.command("migrate")(config_commands.migrate)
app.command("check", rich_help_panel=_RUNNING, epilog=_SETTINGS)(check_commands.check)
app.command("plan", rich_help_panel=_RUNNING, epilog=_SETTINGS)(plan_command.plan)
app.command("run", rich_help_panel=_RUNNING, epilog=_SETTINGS)(run_commands.run)
app.command("resume", rich_help_panel=_RUNNING)(run_commands.resume)
app.command("cancel", rich_help_panel=_RUNNING)(run_commands.cancel)
app.command("deploy", rich_help_panel=_RUNNING)(deploy_commands.deploy)
app.command("submit", rich_help_panel=_RUNNING)(deploy_commands.submit)

app.command("approve", rich_help_panel=_RUNNING)(promote_commands.approve)
app.command("refuse", rich_help_panel=_RUNNING)(promote_commands.refuse)

app.command("runs", rich_help_panel=_LOOKING)(runs_command.runs)
app.command("show", rich_help_panel=_LOOKING)(show_command.show)
app.command("watch", rich_help_panel=_LOOKING)(run_commands.watch)
app.command("logs", rich_help_panel=_LOOKING)(run_commands.logs)
app.command("report", rich_help_panel=_LOOKING)(report_command.report)
app.command("compare", rich_help_panel=_LOOKING)(compare_command.compare)
app.command("export", rich_help_panel=_LOOKING)(export_command.export)
app.command("nodes", rich_help_panel=_LOOKING)(nodes_command.nodes)
app.command("sql", rich_help_panel=_LOOKING)(sql_command.sql)

app.command("up", rich_help_panel=_SITE)(service_commands.up)
app.command("down", rich_help_panel=_SITE)(service_commands.down)
app.command("password", rich_help_panel=_SITE)(service_commands.password)
app.command("serve", rich_help_panel=_SITE)(service_commands.serve)
app.command("notify", rich_help_panel=_SITE)(promote_commands.notify)
app.command("reconcile", rich_help_panel=_SITE)(reconcile_command.reconcile)
app.command("doctor", rich_help_panel=_SITE)(run_commands.doctor)
app.add_typer(env_app, name="env", rich_help_panel=_SITE)
env_app.command("create")(env_commands.create)
env_app.command("list")(env_commands.list_)
env_app.command("show")(env_commands.show)
app.add_typer(db_app, name="db", rich_help_panel=_SITE)
db_app.command("upgrade")(db_commands.upgrade)
db_app.command("rebuild")(db_commands.rebuild)
db_app.command("prune")(db_commands.prune)
db_app.command("reader")(db_commands.reader)


_python_format = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if issubclass(category, OldSettings):
        return f"Warning: {message}\n"
    return _python_format(message, category, filename, lineno, line)


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _explain_disk_error(error: OSError) -> RlhfError:
    place = error.filename or "a file: this error does not say which"
    remedy = "Make its file system writable" if error.errno == errno.EROFS else "Make room on its file system"
    return RlhfError(f"cannot write {place} ({error.strerror}). {remedy}, then try again; `rlhf doctor` may tell more")


def _log_folder() -> Path | None:
    with contextlib.suppress(BadConfig):
        return expanded(os.environ.get("RLHF_HOME") or "~/.rlhf") / "logs"
    return None


def execute(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Everything is printed; nothing is raised."""
    try:
        app(args=list(arguments), prog_name="rlhf")
    except RlhfError as error:
        output.print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe, as in `rlhf sql ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:  # noqa: BLE001 - last resort: the user gets a sentence, a file gets the traceback
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:  # not a bug, wherever it is raised
            output.print_error(_explain_disk_error(error))
            return 1
        output.report_unexpected(error, _log_folder())
        return 1
    return 0


def main() -> None:
    """Entry point of the ``rlhf`` command."""
    collect_rarely()
    warnings.formatwarning = _format_warning
    output.escape_unprintable()
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    main()
