"""``rlhf wrap``: make a config from the launch line of a trainer."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlhf_core.cli import output
from rlhf_core.errors import BadConfig, BadInput
from rlhf_core.files.reading import read_document
from rlhf_core.machine.accounts import expanded

if TYPE_CHECKING:
    from rlhf_core.launch.wrap.wrapping import WrapOptions, WrappedLine

_MAX_FILE = 1 << 20
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
"""Suffixes of files with which a trainer is configured: none is a program."""
_SHELLS = ("bash", "sh", "sbatch", "source", ".")


def wrap(
    line: Annotated[
        list[str],
        typer.Argument(
            metavar="LINE...",
            help="The launch command, or a shell script that contains it, with its arguments.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="Config to write; - for standard output.")
    ] = Path("wrapped.toml"),
    name: Annotated[str, typer.Option(help="Name of the run; by default derived from the command.")] = "",
    framework: Annotated[
        Literal["script", "transformers", "swift", "trl", "openrlhf"] | None,
        typer.Option(help="Family of the program; detected by default."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=2**31 - 1, help="Number of optimizer steps, if the command gives epochs or no length."),
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Make a config from the command that launches your current trainer: torchrun, accelerate, swift, a script ...

    Put options of rlhf first. Nothing is run. The output shows the values found, with their place in the config, then
    those that could not be read, with what to do about them. Next: rlhf check FILE, rlhf run FILE.

    For instance: rlhf wrap -o my.toml -- torchrun --nproc_per_node 8 train.py --max_steps 500

    For a script with arguments: rlhf wrap -o my.toml --steps 500 grpo.sh
    """
    from rlhf_core.launch.wrap.wrapping import WrapOptions

    if str(out) != "-" and out.exists():
        raise BadInput(f"{out} already exists; choose another file with -o, or remove it first")
    found = _wrapped(line, WrapOptions(name=name, framework=framework, steps=steps))
    if str(out) == "-":
        sys.stdout.write(found.text)
        return
    _write(out, found.text)
    if as_json:
        output.print_json(
            {
                "config": str(out),
                "num_steps": found.num_steps,
                "read": [vars(part) for part in found.read],
                "unread": [vars(part) for part in found.unread],
            }
        )
    else:
        _print(found, out)


def _wrapped(line: Sequence[str], options: "WrapOptions") -> "WrappedLine":
    from rlhf_core.launch.wrap.draft import WrapSurroundings
    from rlhf_core.launch.wrap.scripts import SCRIPTS
    from rlhf_core.launch.wrap.wrapping import wrap_line, wrap_script

    folder = Path.cwd()
    active = _active_environment()
    around = WrapSurroundings(
        str(folder),
        _read_file,
        lambda path: _place(path).is_dir(),
        lambda path: _place(path).exists(),
        active,
        lambda name: bool(active) and "/" not in name and (Path(active) / "bin" / name).is_file(),
    )
    words = list(line)
    if len(words) > 1 and words[0] in _SHELLS and words[1].endswith(SCRIPTS):
        words = words[1:]
    if len(words) == 1 and len(words[0].split()) > 1 and not Path(words[0]).is_file():
        raise BadInput(f"found the whole line as one word; leave out the quotes around it: rlhf wrap -- {words[0]}")
    _require_program(words)
    known = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
    if not words[0].endswith(SCRIPTS):
        return wrap_line(words, around, options, known)
    text = _read_script(words[0])
    known |= {"0": words[0]}
    return wrap_script(text, words[0], around, options, known, words[1:])


def _require_program(words: Sequence[str]) -> None:
    """Refuse a launch line that begins with a file that cannot be started.

    Raises:
        BadInput: it begins with a config of a trainer, or with a Python file that is not executable.
    """
    first, rest = words[0], [shlex.quote(word) for word in words[1:]]
    if first.lower().endswith(_CONFIGS):
        raise BadInput(
            f"found {first}, which is a config, expected the command that trains with it, for instance: "
            f"rlhf wrap -- trl grpo --config {shlex.quote(first)}"
        )
    if first.endswith(".py") and _place(first).is_file() and not os.access(_place(first), os.X_OK):
        line = " ".join(["python", shlex.quote(first), *rest])
        raise BadInput(f"found {first}, which is not executable, expected the program too: rlhf wrap -- {line}")


def _active_environment() -> str:
    """Absolute path of the active virtual environment; empty without one, or if it is that of rlhf, which jobs have."""
    found = os.environ.get("VIRTUAL_ENV", "")
    return "" if not found or Path(found).resolve() == Path(sys.prefix).resolve() else str(Path(found).absolute())


def _place(path: str) -> Path:
    try:
        return expanded(path)
    except BadConfig:
        return Path(path)  # the home of a user of another machine: there is no such file here


def _read_script(path: str) -> str:
    try:
        return _read_text(path)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise BadInput(f"cannot read {path}: it is not a UTF-8 text file") from None


def _read_file(path: str) -> str | None:
    try:
        return _read_text(path)
    except (OSError, ValueError):
        return None


def _read_text(path: str) -> str:
    text = read_document(_place(path), _MAX_FILE, follow_link=True).decode("utf-8")
    if "\0" in text:
        raise ValueError("found a null character")
    return text


def _write(file: Path, text: str) -> None:
    from rlhf_core.files.whole import write_for_user

    try:
        write_for_user(file, text)
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror}") from None


def _print(found: "WrappedLine", file: Path) -> None:
    rows = [(part.what, part.found, part.place) for part in found.read]
    output.print_table(("read", "found", "where it is now"), rows)
    output.print_section(("could not be read", "what to do"), [(part.what, part.advice) for part in found.unread])
    output.print_text("")
    if found.num_steps is None:
        output.print_text(
            f"{file} written, but the number of optimizer steps is missing: set trainer.num_steps in it, or remove it "
            "and wrap again with --steps N."
        )
    else:
        quoted = shlex.quote(str(file))
        output.print_text(f"{file} written. Next: rlhf check {quoted}, then rlhf run {quoted}")
