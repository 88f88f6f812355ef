"""Truth of docstrings about the whole project: the tree of errors, handlers of all exceptions, importers of torch."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import english
import pytest
from english import nodes

from rlhf_core import errors
from rlhf_core.worker import roles, worker_process
from rlhf_core.worker.channel import store

ROOT = Path(__file__).parents[2]
SOURCES = [path for package in ("flows", "rlhf_core", "migrations") for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def trees() -> dict[str, ast.Module]:
    """Parse all sources when the first test needs them: every test process imports this module."""
    return {path.relative_to(ROOT).as_posix(): english.parsed(path.read_text()) for path in SOURCES}


def of_worker() -> dict[str, ast.Module]:
    """Sources of the worker."""
    return {path: tree for path, tree in trees().items() if path.startswith("rlhf_core/worker/")}


# ---------------------------------------------------------------------------------------------------------------------
# errors.py


def test_the_tree_of_errors_is_the_one_in_its_docstring() -> None:
    text = errors.__doc__ or ""
    shown, above = dict[str, tuple[str, str]](), ["RlhfError"]
    for indent, name, code in re.findall(r"^    ((?:│   |    )*)[├└]── (\w+)(?: \((\d+)\))?", text, re.MULTILINE):
        above[len(indent) // 4 + 1 :] = [name]
        shown[name] = above[-2], code
    classes = {
        name: value for name, value in vars(errors).items() if isinstance(value, type) and value is not errors.RlhfError
    }
    assert shown == {
        name: (value.__base__.__name__, str(vars(value).get("exit_code", ""))) for name, value in classes.items()
    }
    assert all(issubclass(value, errors.RlhfError) for value in classes.values())


# ---------------------------------------------------------------------------------------------------------------------
# Handlers of all exceptions


def catches_everything(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(one is None or getattr(one, "id", "") in ("Exception", "BaseException") for one in caught)


def without_a_plan(path: str, text: str) -> Iterator[str]:
    """Handlers of all exceptions that neither re-raise, nor keep the traceback, nor give a reason on their line."""
    lines = text.splitlines()
    for node in nodes(english.parsed(text)):
        if not isinstance(node, ast.ExceptHandler) or not catches_everything(node):
            continue
        inside = [one for statement in node.body for one in ast.walk(statement)]
        goes_on = any(isinstance(one, ast.Raise) for one in inside)
        logs = any(isinstance(one, ast.Attribute) and one.attr == "exception" for one in inside)
        says_why = re.search(r"# (noqa: BLE001 - )?(?!noqa)\w.{10,}", lines[node.lineno - 1])
        if not (goes_on or logs or says_why):
            yield f"{path}:{node.lineno}"


def test_handlers_of_every_exception_say_why() -> None:
    assert [found for path in SOURCES for found in without_a_plan(path.name, path.read_text())] == []
    assert "has a comment that justifies it" in " ".join((worker_process.__doc__ or "").split())


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("except Exception:\n    pass", True),
        ("except Exception:  # noqa: BLE001\n    pass", True),
        ("except (ValueError, BaseException):\n    pass", True),
        ("except:\n    pass", True),
        ("except Exception:\n    raise", False),
        ("except Exception:\n    log.exception('it failed')", False),
        ("except Exception:  # noqa: BLE001 - user code may raise anything\n    pass", False),
        ("except ValueError:\n    pass", False),
    ],
)
def test_a_handler_without_a_plan_is_seen(line: str, is_found: bool) -> None:
    assert bool(list(without_a_plan("new.py", f"try:\n    work()\n{line}\n"))) == is_found


# ---------------------------------------------------------------------------------------------------------------------
# Imports of torch and the training package by the agent


def imports(tree: ast.AST, *, late: bool) -> set[str]:
    """Modules that are imported when a module is loaded, or, ``late``, inside its functions."""
    functions = [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(one) for function in functions for one in ast.walk(function)}
    found = set()
    for node in nodes(tree):
        if (id(node) in inside) == late:
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return found


def importers(package: str, *, late: bool) -> set[str]:
    """Files of the agent that import a package, or a part of it."""
    return {
        Path(path).name
        for path, tree in of_worker().items()
        if any(name == package or name.startswith(f"{package}.") for name in imports(tree, late=late))
    }


def test_the_store_of_several_nodes_alone_imports_torch() -> None:
    assert importers("torch", late=False) == set()
    assert importers("torch", late=True) == {"store.py"}
    assert "an agent of several nodes alone imports torch" in " ".join((store.__doc__ or "").split())


def test_roles_alone_names_functions_of_training() -> None:
    naming = {
        Path(path).name
        for path, tree in of_worker().items()
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"rlhf_core\.training\.[\w.]+:\w+", str(node.value))
    }
    assert naming == {"roles.py"}
    followers = {
        *("follower.py", "job_record.py", "launch.py", "launch_order.py"),
        *("published.py", "save_requests.py"),
    }
    assert importers("rlhf_core.training", late=False) == {"worker_process.py", *followers}
    assert importers("rlhf_core.training", late=True) == set()
    used = {
        name
        for tree in of_worker().values()
        for name in imports(tree, late=False)
        if name.startswith("rlhf_core.training")
    }
    assert used == {"rlhf_core.training.types"}
    assert "``training/types.py``" in (roles.__doc__ or "")


def test_a_log_is_opened_by_its_worker() -> None:
    """The run directory documents this: the agent never writes into the log."""
    page = (ROOT / "docs" / "run_directory.md").read_text()
    (row,) = [line for line in page.splitlines() if "logs/<role>-<node>-<local>.log" in line]
    assert "that worker opens it" in row
    assert "folder.log(" in (ROOT / "rlhf_core/worker/worker_process.py").read_text()
