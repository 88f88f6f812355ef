"""The English of the code: openings of docstrings, impersonal actors, names that are pictures."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from rlhf_core.garbage import uncollected

ROOT = Path(__file__).parents[2]
PACKAGES = ("rlhf_core", "flows", "tests")

OPENING = re.compile(r"(what|whether|how|who|where|when|which|why)(ever)?\b", re.IGNORECASE)
"""Openings that a docstring must not have: it begins with a noun phrase or an imperative."""

IMPERSONAL = re.compile(r"\b(some|no|every|any)(body|one)\b|\bwhoever\b|\ba person\b", re.IGNORECASE)
"""Actors without a name, where the subject has one: the user, the controller, another process."""

NAMES = {
    "again_s": "RETRY_INTERVAL_S",
    "announce": "publish",
    "asker": "client",
    "by_hand": "on request, once",
    "desk": "harness",
    "endings": "exit reports",
    "farewell": "SHUTDOWN_TIMEOUT_S",
    "gives_way": "fail_if_alive",
    "happened": "timeline",
    "heard": "received",
    "keeper": "site daemon",
    "keeping": "reconcile",
    "look": "poll, snapshot",
    "looks": "polls, observations",
    "patience": "timeout",
    "shop": "site",
    "story": "timeline",
    "teller": "publisher",
    "tidying": "cleanup",
    "untold": "unpublished",
    "zombies": "processes",
}
"""Words that may not be part of an identifier, and the field's word for each."""

MODULES = frozenset(
    [
        "adopting",
        "answering",
        "asking",
        "board",
        "by_hand",
        "caps",
        "desk",
        "endings",
        "findings",
        "gone",
        "happened",
        "keeper",
        "keeping",
        "kept",
        "late",
        "ledger",
        "parts",
        "passed",
        "past",
        "preparation",
        "questions",
        "script_text",
        "shop",
        "shop_floor",
        "starter",
        "static",
        "story",
        "team",
        "tell",
        "tidying",
        "told",
        "turned_off",
        "untold",
        "view",
        "withdrawing",
        "words",
        "zombies",
    ]
)
"""Names of modules and packages that do not tell their content."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def parsed(text: str) -> ast.Module:
    """Parse a module, once for all measures. The garbage collector would traverse all trees repeatedly and in vain."""
    with uncollected():
        return ast.parse(text)


@cache
def nodes(tree: ast.AST) -> Sequence[ast.AST]:
    """List all nodes of a tree, which takes as long as parsing it."""
    return [*ast.walk(tree)]


# ---------------------------------------------------------------------------------------------------------------------
# Sentences


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of modules, classes and functions, and of those below fields."""
    for node in nodes(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value.strip()


def riddles(text: str) -> list[int]:
    """Lines of docstrings that open with an interrogative."""
    return [line for line, found in docstrings(parsed(text)) if OPENING.match(found)]


def impersonal(text: str) -> list[str]:
    """Impersonal actors in the docstrings and comments of a module."""
    if not IMPERSONAL.search(text):
        return []  # finding the comments takes longer than everything else here
    comments = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    of_docstrings = [found for _, found in docstrings(parsed(text))]
    return [found.group() for one in [*comments, *of_docstrings] for found in IMPERSONAL.finditer(one)]


# ---------------------------------------------------------------------------------------------------------------------
# Names


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the identifiers that a module defines: functions, classes, arguments, variables and attributes."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words_of(identifier: str) -> list[str]:
    """Split ``SHOWN_WORDS`` and ``ShownWords`` into lower-case words."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier)
    return [word for word in spaced.lower().split("_") if word]


def pictures(text: str) -> list[str]:
    """Identifiers of a module that contain a word of :data:`NAMES`; names of tests are sentences and not judged."""
    found = {name for name in defined(parsed(text)) if not name.startswith("test_")}
    spaced = {name: f"_{'_'.join(words_of(name))}_" for name in found}
    return sorted(name for name, text in spaced.items() if any(f"_{word}_" in text for word in NAMES))


def unclear_modules(paths: Iterable[str]) -> set[str]:
    """Modules and packages named as one of :data:`MODULES`, given and returned relative to the root."""
    places = {place for path in map(PurePosixPath, paths) for place in (path, *path.parents)}
    return {place.as_posix() for place in places if place.stem in MODULES}


def classes_used_twice(texts: Iterable[tuple[str, str]]) -> set[str]:
    """Names of classes that several modules define; tables of the history may be named as their schema.

    Args:
        texts: Paths and texts of modules.
    """
    where = defaultdict(set)
    for path, text in texts:
        if "/history/tables/" not in path:
            for node in nodes(parsed(text)):
                if isinstance(node, ast.ClassDef):
                    where[node.name].add(path)
    return {name for name, paths in where.items() if len(paths) > 1}
