"""Python interpreters of other programs: finding one, and listing what is installed there without importing it."""

import importlib.metadata
import re
import shutil
from pathlib import Path

LISTING_CODE = """
import importlib.machinery, importlib.metadata, importlib.util, json, os, re, sys
packages = {}
for found in importlib.metadata.distributions():
    # The folder's name holds name and version: to read and parse its files takes longer than all else here.
    folder = re.fullmatch("([^-]+)-([^-]+)[.](?:dist|egg)-info", os.path.basename(str(getattr(found, "_path", ""))))
    name, version = folder.groups() if folder else (found.metadata["Name"], found.version)
    if name:
        packages.setdefault(re.sub("[-_.]+", "-", name).lower(), version)
modules = {}
for name in sys.argv[1:]:
    places, found = None, True
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, places)
        found = spec is not None or (places is None and part in sys.builtin_module_names)
        places = spec.submodule_search_locations if spec is not None else None
        if not found or places is None:
            break
    modules[name] = found
try:
    import rlhf_core
    ours = rlhf_core.__version__
except ImportError:
    ours = ""
spec = importlib.util.find_spec("transformers")
folders = list(spec.submodule_search_locations or ()) if spec is not None else []
print(json.dumps({
    "version": list(sys.version_info[:3]), "packages": packages, "modules": modules, "rlhf_flows": ours,
    "transformers": folders[0] if folders else "",
}))
"""
"""Program for ``python -c``: prints the version, the packages, which of the modules named in its arguments exist, and
the folder of transformers. It imports only the top-level package rlhf_core, and runs on Python 3.8 and newer."""

_PYTHON = re.compile(r"python(3(\.\d+)?)?t?$")
_LONGEST_FIRST_LINE = 512


def find_program(name: str, environment: str, search: str) -> Path | None:
    """Find the program that a shell would run.

    Args:
        name: first word of the command.
        environment: folder of a virtual environment, looked in first; empty for none.
        search: value of PATH.
    """
    places = f"{environment}/bin:{search}" if environment else search
    found = shutil.which(name, path=places)
    return Path(found) if found else None


def interpreter_of(program: Path) -> Path | None:
    """Interpreter that runs a program: the program itself if it is a Python, otherwise the one in its shebang line;
    None for anything else."""
    if _PYTHON.fullmatch(program.name):
        return program
    try:
        with program.open("rb") as file:
            start = file.read(_LONGEST_FIRST_LINE)
    except OSError:
        return None
    words = start.partition(b"\n")[0].decode("utf-8", errors="replace").removeprefix("#!").split()
    if not start.startswith(b"#!"):
        return None
    if words[:1] == ["/bin/sh"]:
        # The path is too long for a shebang line: pip writes `'''exec' "/path/to/python" "$0" "$@"`.
        quoted = re.search(rb"^'''exec' \"?([^\"\n]+?)\"? \"\$0\"", start, re.MULTILINE)
        return Path(quoted[1].decode()) if quoted else None
    if words and Path(words[0]).name == "env":
        found = shutil.which(words[-1]) if len(words) > 1 else None
        words = [found] if found else []
    return Path(words[0]) if words and _PYTHON.fullmatch(Path(words[0]).name) else None


def versions_beside(program: Path, name: str) -> list[str]:
    """Versions of a distribution in the environment of a program, found without running its interpreter.

    Empty if there is none or it is not in the environment's own folder for packages; several for a folder that several
    versions of Python share.
    """
    python = interpreter_of(program)
    folders = (python.parent.parent / "lib").glob("python*/site-packages") if python is not None else ()
    return [found.version for found in importlib.metadata.distributions(name=name, path=[*map(str, folders)])]
