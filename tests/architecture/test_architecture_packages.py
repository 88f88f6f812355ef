"""Packages of the program: small enough to grasp at a glance, described, and named correctly in every text."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ("flows", "rlhf_core")

LIMIT = 21
"""Maximum number of modules in one package."""
ONE_OF_A_KIND = {"rlhf_core/schemas": 37, "rlhf_core/training/algorithms": 24}
"""Packages of many similar modules: one table of the settings each, one loss each."""

NAME = re.compile(r"(?<![\w./-])(?:flows|rlhf_core)(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"(?<![\w./-])(?:flows|rlhf_core)/[\w/]+\.py\b")
PLANTED = "tests/architecture/"
"""Tests that name modules which do not exist."""


def too_full(files: list[str]) -> dict[str, int]:
    """Packages with more modules than their limit, mapped to their number of modules."""
    numbers = Counter(
        PurePosixPath(file).parent.as_posix()
        for file in files
        if file.endswith(".py") and not file.endswith(("__init__.py", "__main__.py"))
    )
    return {name: number for name, number in numbers.items() if number > ONE_OF_A_KIND.get(name, LIMIT)}


@cache
def files_below(*folders: str) -> list[str]:
    """Files of the checkout, relative to it."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")))
    return [path.relative_to(ROOT).as_posix() for path in found if path.suffix in (".md", ".py", ".toml")]


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Names that a module of the program defines; None if there is no such module."""
    path = ROOT / module.replace(".", "/")
    file = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
    if file is None:
        return None
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return frozenset(named | stored | imported)


def is_there(name: str) -> bool:
    """True if a dotted name is a module of the program, or a name defined in one."""
    module, rest = name, ""
    while names_of(module) is None:
        module, _, rest = module.rpartition(".")
    return not rest or rest.startswith("__") or rest in (names_of(module) or ())


def named_in_vain(text: str) -> Iterator[str]:
    """Modules and files of the program that a text names although they do not exist."""
    yield from (name for name in NAME.findall(text) if not is_there(name))
    yield from (name for name in FILE.findall(text) if not (ROOT / name).is_file())


def test_no_package_is_too_full() -> None:
    assert too_full(files_below(*PROGRAM)) == {}


def test_a_package_that_is_too_full_is_seen() -> None:
    files = [f"rlhf_core/new/m{number}.py" for number in range(LIMIT)]
    assert too_full(files) == {}
    assert too_full([*files, "rlhf_core/new/__init__.py", "rlhf_core/new/more.py"]) == {"rlhf_core/new": LIMIT + 1}


def test_every_package_says_what_is_in_it() -> None:
    folders = {PurePosixPath(file).parent.as_posix() for file in files_below(*PROGRAM) if file.endswith(".py")}
    files = {folder: ROOT / folder / "__init__.py" for folder in folders}
    silent = [
        folder
        for folder, file in files.items()
        if not file.is_file() or not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_every_module_that_a_text_names_is_there() -> None:
    pages = [path.name for path in ROOT.glob("*.md")]
    below = files_below(*PROGRAM, "docs", "infra", "migrations", "tests")
    texts = [name for name in (*pages, "pyproject.toml", *below) if not name.startswith(PLANTED)]
    found = {
        name: in_vain for name in texts if (in_vain := list(named_in_vain((ROOT / name).read_text(encoding="utf-8"))))
    }
    assert found == {"tests/test_garbage.py": ["rlhf_core.no_such_module"]}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see rlhf_core.errors.BadConfig and rlhf_core/errors.py", []),
        ("python -m rlhf_core.worker, flows.run:rlhf_run, rlhf_core.training.rewards:exact_match", []),
        ("see rlhf_core.gone and flows/gone.py", ["rlhf_core.gone", "flows/gone.py"]),
        ("from rlhf_core.errors.BadConfig to rlhf_core.errors.Gone", ["rlhf_core.errors.Gone"]),
    ],
)
def test_a_module_that_is_named_in_vain_is_seen(text: str, found: list[str]) -> None:
    assert list(named_in_vain(text)) == found
