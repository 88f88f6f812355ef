"""Measure the code base: size, names, docstrings, excepts and imports, beside the values before the redesign and its
goals.

``python tests/architecture/measure.py [FOLDER]`` prints a table in Markdown; ``--list`` also prints the counted items.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import english

PROGRAM, TESTS = ("rlhf_core", "flows"), ("tests",)
LONG = 400
"""Number of lines from which a file counts as long."""


@dataclass(frozen=True)
class Module:
    """One Python file."""

    path: Path
    """Path relative to the measured folder."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree, parsed on first use: this takes longer than most measures."""
        return english.parsed(self.text)

    @property
    def num_lines(self) -> int:
        """Number of lines of the file."""
        return self.text.count("\n")


@dataclass(frozen=True)
class Measure:
    """One row of the table."""

    title: str
    before: str
    """Value before the redesign."""
    goal: str
    value: Callable[["House"], str]
    listed: Callable[["House"], Sequence[str]] = lambda _: ()
    """Places that were counted."""


class House:
    """The Python files of a checkout."""

    def __init__(self, root: Path) -> None:
        self.program = [*_modules(root, PROGRAM)]
        self.tests = [*_modules(root, TESTS)]


def _modules(root: Path, folders: Sequence[str]) -> Iterator[Module]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield Module(path.relative_to(root), text)


def lines(modules: Sequence[Module]) -> int:
    """Lines of some files, without blank ones."""
    return sum(_filled(module.text.splitlines()) for module in modules)


def lines_of_helpers(modules: Sequence[Module]) -> int:
    """Lines outside test functions and the cases in their decorators, without blank ones."""
    inside = 0
    for module in modules:
        text = module.text.splitlines()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                inside += _filled(text[first - 1 : node.end_lineno])
    return lines(modules) - inside


def _filled(text: Sequence[str]) -> int:
    return sum(bool(line.strip()) for line in text)


def questions(modules: Sequence[Module]) -> list[str]:
    """Docstrings that open with a question word (``english.OPENING``)."""
    return [
        f"{module.path}:{line}: {text.split()[0]}"
        for module in modules
        for line, text in english.docstrings(module.tree)
        if english.OPENING.match(text)
    ]


def share_of_questions(modules: Sequence[Module]) -> str:
    """Share of docstrings that open with a question word."""
    total = sum(len([*english.docstrings(module.tree)]) for module in modules)
    return f"{100 * len(questions(modules)) / max(1, total):.1f} %"


def repeated_classes(modules: Sequence[Module]) -> list[str]:
    """Class names that are used more than once, with their files; tables named after the schema of their rows are
    exempt."""
    found: Mapping[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(module.path))
    return [
        f"{name}: {', '.join(paths)}"
        for name, paths in sorted(found.items())
        if len(paths) > 1 and not _is_table_of_schema(paths)
    ]


def _is_table_of_schema(paths: Sequence[str]) -> bool:
    homes = ("rlhf_core/history/tables", "rlhf_core/schemas/")
    return len(paths) == 2 and all(any(path.startswith(home) for path in paths) for home in homes)


def broad_excepts(modules: Sequence[Module]) -> list[str]:
    """Handlers of all exceptions that do not raise one."""
    return [
        f"{module.path}:{node.lineno}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and _is_broad(node.type)
        and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    ]


def _is_broad(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(one is None or (isinstance(one, ast.Name) and one.id in ("Exception", "BaseException")) for one in kinds)


def long_files(modules: Sequence[Module]) -> list[str]:
    """Files of more than :data:`LONG` lines."""
    return [f"{module.path} ({module.num_lines})" for module in modules if module.num_lines > LONG]


def flows_imports(modules: Sequence[Module]) -> list[str]:
    """Imports of the flows by the command line."""
    found = []
    for module in modules:
        if module.path.parts[:2] == ("rlhf_core", "cli"):
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    of_module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                    names = of_module or [one.name for one in node.names]
                    found += [f"{module.path}:{node.lineno}" for name in names if name.split(".")[0] == "flows"]
    return found


def _counted(count: Callable[[Sequence[Module]], list[str]]) -> Callable[[House], str]:
    return lambda house: str(len(count(house.program)))


def _row(title: str, before: str, goal: str, count: Callable[[Sequence[Module]], list[str]]) -> Measure:
    return Measure(title, before, goal, _counted(count), lambda house: count(house.program))


MEASURES = (
    Measure("lines of `rlhf_core` + `flows`", "41,200", "<= 34,000", lambda house: f"{lines(house.program):,}"),
    Measure(
        "lines of tests, in brackets those outside of test functions and their cases",
        "35,800 (17,600)",
        "<= 28,000",
        lambda house: f"{lines(house.tests):,} ({lines_of_helpers(house.tests):,})",
    ),
    Measure(
        "docstrings that open with what, whether, how ...",
        "22.9 %",
        "< 3 %",
        lambda house: share_of_questions(house.program),
        lambda house: questions(house.program),
    ),
    _row("class names used twice, tables named as their schema left out", "31", "0", repeated_classes),
    _row("broad excepts that keep the error", "26", "<= 8", broad_excepts),
    _row(f"files over {LONG} lines", "19", "<= 6", long_files),
    _row("imports of `flows` in the command line, which stands above it now", "37", "Prefect only", flows_imports),
)
"""Rows of the table that can be counted; the others of the plan are times, and names that a reader judges."""


def table(house: House) -> str:
    """The table, in Markdown."""
    rows = [f"| {one.title} | {one.before} | {one.value(house)} | {one.goal} |" for one in MEASURES]
    return "\n".join(["| | before | now | goal |", "|---|---|---|---|", *rows])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[2])
    parser.add_argument("--list", action="store_true", help="print what was counted")
    given = parser.parse_args()
    house = House(given.folder)
    print(table(house))
    for one in MEASURES if given.list else ():
        print(f"\n{one.title}:", *one.listed(house), sep="\n  ")


if __name__ == "__main__":
    main()
