"""``python -m rlhf_core.worker``: the command line that schedulers and agents start.

    agent         one per node: starts, supervises and stops the workers of an attempt
    role          one worker; started by an agent
    fork-server   preloads a worker's imports and forks workers; started by an agent
    check-import  reports whether a module:function can be imported here; one JSON line
    probe         measures the node before training; started by an agent, writes one JSON line per step
    check-content checks the rows, tokenizer and rewards of a spec; one JSON line
    count-rows    counts the training rows of a spec; one JSON line

Heavy modules are imported only after the arguments are parsed.
"""

import argparse
import contextlib
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import cast

from rlhf_core.garbage import collect_rarely
from rlhf_core.schemas.attempts import Role
from rlhf_core.worker.roles import CONTENT, ROWS


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parsed = _parser().parse_args(arguments)
    return cast("int", parsed.run(parsed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlhf_core.worker", description="Programs that run on a node.")
    commands = parser.add_subparsers(dest="command", required=True)

    agent = commands.add_parser("agent", help="start, supervise and end the workers of an attempt on this node")
    agent.set_defaults(run=_agent)
    _add_attempt(agent)
    agent.add_argument(
        "--target",
        type=_target,
        action="append",
        default=[],
        metavar="ROLE=MODULE:FUNCTION",
        help="function to run for a role instead of the native training code",
    )
    agent.add_argument("--path", type=Path, action="append", default=[], help="folder to import targets from")

    role = commands.add_parser("role", help="one worker; started by an agent")
    role.set_defaults(run=_role)
    role.add_argument("role", type=Role, choices=list(Role))
    _add_attempt(role)
    role.add_argument("--restart", type=int, required=True, help="number of the restart, from 0")
    role.add_argument("--generation", type=int, help="generation of its group, if not counted as a restart")
    role.add_argument("--node", required=True, help="name of this node")
    role.add_argument("--store", type=Path, help="rendezvous file of the ranks if all are on this node")
    role.add_argument("--target", help="module:function to run instead of the native training code")
    role.add_argument(
        "--path",
        type=Path,
        action="append",
        default=[],
        dest="import_paths",
        metavar="PATH",
        help="folder to import the target from",
    )
    role.add_argument("--damaged", action="append", default=[], help="checkpoint to ignore")

    server = commands.add_parser("fork-server", help="import the modules of a worker and fork workers; for agents")
    server.set_defaults(run=_fork_server)
    server.add_argument("orders", type=int, help="file descriptor from which orders are read")
    server.add_argument("answers", type=int, help="file descriptor to which answers are written")
    server.add_argument("room", help="maximum number of characters in the command line of a worker")

    check = commands.add_parser("check-import", help="check the import of a module:function; one JSON line")
    check.set_defaults(run=_check_import)
    check.add_argument("target", metavar="MODULE:FUNCTION")
    check.add_argument("--path", type=Path, action="append", default=[], help="folder to import from")

    probe = commands.add_parser("probe", help="measure this node together with all others; started by an agent")
    probe.set_defaults(run=_probe)
    probe.add_argument("place", type=json.loads, help="state of this process as a JSON object")
    probe.add_argument("--output", type=Path, required=True, help="file for the measurements, one JSON line per step")
    probe.add_argument("--log", type=Path, required=True, help="file to which messages are appended")
    content = commands.add_parser("check-content", help="inspect rows, tokenizer and rewards of a spec; one JSON line")
    content.set_defaults(target=CONTENT)
    rows = commands.add_parser("count-rows", help="count the training rows of a spec; one JSON line")
    rows.set_defaults(target=ROWS)
    for of_data in (content, rows):
        of_data.set_defaults(run=_report_on_data)
        of_data.add_argument("--spec", type=Path, required=True, help="the spec as JSON, with absolute paths")
        of_data.add_argument("--path", type=Path, action="append", default=[], help="folder to import functions from")
    return parser


def _add_attempt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt, from 1")


def _target(text: str) -> tuple[Role, str]:
    role, equals, path = text.partition("=")
    if not equals or role not in list(Role):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected ROLE=MODULE:FUNCTION with one of {', '.join(Role)}")
    return Role(role), path


def _agent(parsed: argparse.Namespace) -> int:
    from rlhf_core.worker.agent.bootstrap import run_agent

    code = run_agent(parsed.run_dir, parsed.attempt, dict(parsed.target), parsed.path)
    # Skip the interpreter's teardown: the threads of torch's store may abort the process during it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _role(parsed: argparse.Namespace) -> int:
    from rlhf_core.worker.worker_process import WorkerArguments, run_worker

    return run_worker(WorkerArguments(**{one.name: getattr(parsed, one.name) for one in fields(WorkerArguments)}))


def _fork_server(parsed: argparse.Namespace) -> int:
    from rlhf_core.worker.groups.fork_server_process import serve

    return serve(parsed.orders, parsed.answers, main)


def _check_import(parsed: argparse.Namespace) -> int:
    from rlhf_core.survival import Survived
    from rlhf_core.worker.roles import load

    sys.path[:0] = [str(path) for path in parsed.path]
    # User code may raise anything, and the answer carries its message. Modules may also print on import, but standard
    # output is reserved for the one line of the answer.
    with Survived(also=(SystemExit,)) as failed, contextlib.redirect_stdout(sys.stderr):
        load(parsed.target)
    print(json.dumps({"ok": failed.error is None, "error": failed.problem}))
    return 0 if failed.error is None else 1


def _probe(parsed: argparse.Namespace) -> int:
    from rlhf_core.worker.roles import PROBE, load
    from rlhf_core.worker.worker_process import prepare_signals, write_output_to

    prepare_signals()
    write_output_to(parsed.output, [1])
    write_output_to(parsed.log, [2])
    code = load(PROBE)(parsed.place)
    sys.stdout.flush()
    # Skip the teardown of process groups: their peers may be gone.
    os._exit(cast("int", code))


def _report_on_data(parsed: argparse.Namespace) -> int:
    from rlhf_core.machine.parent_death import die_with_parent
    from rlhf_core.schemas.content import ContentReport, RowCount
    from rlhf_core.worker.roles import load

    die_with_parent()
    sys.path[:0] = [str(path) for path in parsed.path]
    with contextlib.redirect_stdout(sys.stderr):  # generators and tokenizers may print
        report = load(parsed.target)(parsed.spec)
    assert isinstance(report, ContentReport | RowCount)
    print(report.model_dump_json())
    return 0


if __name__ == "__main__":
    collect_rarely()
    sys.exit(main())
