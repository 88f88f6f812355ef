"""The import contracts of pyproject.toml hold, and each of them breaks on the import it forbids."""

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "rlhf_core", "migrations")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UNTOUCHED = "untouched"


@dataclass(frozen=True)
class WrongImport:
    """A forbidden line, and the ids of exactly those contracts that it must break."""

    file: str
    line: str
    breaks: frozenset[str]


def _wrong(file: str, line: str, *breaks: str) -> WrongImport:
    return WrongImport(file, line, frozenset(breaks))


TORCH, PLANE = "torch-lives-in-the-compute-plane", "compute-is-started-by-name"
PREFECT, FLOWS = "prefect-lives-in-flows", "flows-serve-the-command-line"
CYCLES = "no-cycles"

WRONG_IMPORTS: dict[str, WrongImport] = {
    "torch inside a function of history": _wrong(
        "rlhf_core/history/queries/open_runs.py", "def _late() -> None:\n    import torch", TORCH
    ),
    "torch for its types only": _wrong(
        "rlhf_core/watchdog/watcher.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        TORCH,
    ),
    "cli reaches torch": _wrong("rlhf_core/cli/main.py", "import torch", TORCH),
    "preflight loads a tokenizer": _wrong("rlhf_core/preflight/__init__.py", "import tokenizers", TORCH),
    "cli reaches training": _wrong("rlhf_core/cli/main.py", "from rlhf_core.training import types", PLANE),
    "flow reaches training": _wrong("flows/run.py", "import rlhf_core.training", PLANE),
    "flow reaches the worker": _wrong("flows/run.py", "import rlhf_core.worker", PLANE, "layers"),
    "preflight asks weight sync": _wrong(
        "rlhf_core/preflight/facts.py", "from rlhf_core.weight_sync import base", PLANE
    ),
    "the callback reaches training": _wrong("rlhf_core/callback.py", "from rlhf_core.training import types", PLANE),
    "prefect in a report": _wrong("rlhf_core/render/run_page.py", "import prefect", PREFECT),
    "prefect in the watchdog, which the steps use": _wrong("rlhf_core/watchdog/watcher.py", "import prefect", PREFECT),
    "prefect in the order of the steps": _wrong("rlhf_core/control/steps.py", "import prefect", PREFECT),
    "prefect inside a function of a command": _wrong(
        "rlhf_core/cli/main.py", "def _late() -> None:\n    import prefect", PREFECT
    ),
    "worker imports prefect": _wrong("rlhf_core/worker/roles.py", "import prefect", PREFECT),
    "a schema imports the package of the flows": _wrong("rlhf_core/schemas/journal.py", "import flows", FLOWS),
    "the reconciler asks Prefect itself": _wrong(
        "rlhf_core/control/reconcile/actions.py", "from flows.flow_runs import facts", FLOWS
    ),
    "the drawing in flows": _wrong(
        "flows/publishing/artifacts.py", "from rlhf_core.control.views import curves", "flows-draw-nothing"
    ),
    "sqlalchemy in flows": _wrong("flows/tasks.py", "import sqlalchemy", "sqlalchemy-lives-in-history"),
    "alembic in cli": _wrong("rlhf_core/cli/main.py", "from alembic import command", "sqlalchemy-lives-in-history"),
    "submitit in launch": _wrong("rlhf_core/launch/start.py", "import submitit", "submitit-lives-in-scheduler"),
    "preflight imports its sibling launch": _wrong(
        "rlhf_core/preflight/__init__.py", "from rlhf_core.launch import start", "layers"
    ),
    "history imports its sibling scheduler": _wrong(
        "rlhf_core/history/store.py", "from rlhf_core import scheduler", "layers"
    ),
    "errors climb a floor": _wrong("rlhf_core/errors.py", "from rlhf_core.schemas import checks", "layers"),
    "a schema climbs a floor": _wrong(
        "rlhf_core/schemas/checks.py", "from rlhf_core.run_dir import run", "layers", CYCLES
    ),
    "a stage reaches up to a command": _wrong(
        "rlhf_core/control/stages.py", "from rlhf_core.cli import output", "layers", CYCLES
    ),
    "weight sync climbs to its trainers": _wrong(
        "rlhf_core/weight_sync/base.py", "from rlhf_core.training.models import gathering", "layers", CYCLES
    ),
    "a room that has no floor": _wrong("rlhf_core/foo.py", '"""Not placed on a floor."""', "layers"),
    "a room of training that has no place": _wrong(
        "rlhf_core/training/foo.py", '"""Not placed among the layers."""', "layers-of-training"
    ),
    "a room of the worker that has no place": _wrong(
        "rlhf_core/worker/foo.py", '"""Not placed among the layers."""', "layers-of-worker"
    ),
    "data reaches the model": _wrong(
        "rlhf_core/training/data/loading.py",
        "from rlhf_core.training.models import packing",
        "layers-of-training",
        CYCLES,
    ),
    "a data module reaches deepspeed through the engine": _wrong(
        "rlhf_core/training/data/loading.py",
        "from rlhf_core.training.trainers import engine",
        "layers-of-training",
        CYCLES,
    ),
    "a beat asks the agent": _wrong(
        "rlhf_core/worker/liveness/heartbeat.py", "from rlhf_core.worker.agent import job", "layers-of-worker", CYCLES
    ),
    "two modules of a package import each other": _wrong(
        "rlhf_core/render/series.py", "from rlhf_core.render import plots", CYCLES
    ),
    "two packages of flows import each other": _wrong(
        "flows/server/settings.py", "from flows.deployments import work_pool", CYCLES
    ),
    "training imports history": _wrong(
        "rlhf_core/training/data/loading.py", "from rlhf_core.history import store", "compute-has-no-database"
    ),
    "worker imports the scheduler": _wrong(
        "rlhf_core/worker/roles.py", "import rlhf_core.scheduler", "compute-has-no-database"
    ),
    "deepspeed in an algorithm": _wrong(
        "rlhf_core/training/algorithms/grpo.py", "import deepspeed", "only-trainers-know-deepspeed"
    ),
    "diagnosis looks at files": _wrong("rlhf_core/diagnosis/classify.py", "import pathlib", "diagnosis-is-pure"),
    "diagnosis looks at the clock": _wrong(
        "rlhf_core/diagnosis/policy.py", "from time import monotonic", "diagnosis-is-pure"
    ),
    "a migration uses the store": _wrong(
        "migrations/env.py", "from rlhf_core.history import store", "migrations-know-only-tables"
    ),
    "a migration uses a schema that will change": _wrong(
        "migrations/env.py", "from rlhf_core.schemas import attempts", "migrations-know-only-tables"
    ),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    """Contracts broken by each wrong import, and by none: name of the edit to ids."""
    root = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    edits = {UNTOUCHED: {"file": "rlhf_core/errors.py", "append": ""}}
    for name, wrong in WRONG_IMPORTS.items():
        assert wrong.line.startswith('"""') or (root / wrong.file).exists(), (
            f"{wrong.file} is gone: point {name!r} elsewhere"
        )
        edits[name] = {"file": wrong.file, "append": f"\n\n{wrong.line}\n"}
    (root / "edits.json").write_text(json.dumps(edits))
    program = Path(__file__).with_name("lint.py")
    done = subprocess.run(
        [sys.executable, str(program), str(root), str(root / "edits.json"), str(root / "result.json")],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: set(ids) for name, ids in json.loads((root / "result.json").read_text()).items()}


def test_contracts_hold(broken: Mapping[str, set[str]]) -> None:
    assert broken[UNTOUCHED] == set(), "run `lint-imports` for the import chain"


@pytest.mark.parametrize("name", WRONG_IMPORTS)
def test_wrong_import_breaks_the_contract_meant_for_it(broken: Mapping[str, set[str]], name: str) -> None:
    assert broken[name] - broken[UNTOUCHED] == WRONG_IMPORTS[name].breaks


def test_every_contract_was_seen_to_break() -> None:
    contracts = {contract["id"] for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
    assert contracts == {contract for wrong in WRONG_IMPORTS.values() for contract in wrong.breaks}


# ---------------------------------------------------------------------------------------------------------------------
# Permitted third-party imports: an allow-list, which import-linter does not support


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """All imports of our packages, including those of libraries."""
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


def _is_in(module: str, packages: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def _libraries_of(graph: grimp.ImportGraph, *ours: str, but: Sequence[str] = ()) -> dict[str, str]:
    """Third-party top-level packages that the modules under ``ours`` import, without those under ``but``: name to one
    importer."""
    found = {}
    for module in graph.modules:
        if not _is_in(module, ours) or _is_in(module, but):
            continue
        for imported in graph.find_modules_directly_imported_by(module):
            library = imported.partition(".")[0]
            if library not in PACKAGES and library not in sys.stdlib_module_names:
                found[library] = module
    return found


PARTS = {
    "pydantic": {"pydantic_core"},
    "typer": {"click"},
    "torch": {"numpy"},
    "matplotlib": {"numpy"},
    "nvidia_ml_py": {"pynvml"},
    "pillow": {"PIL"},
    "mlflow_skinny": {"mlflow"},
    "tensorboard": {"google"},  # protobuf, to which its events belong
}
"""Import names that a declared library provides: its own, if it differs, and parts of its interface."""


def _declared(*extras: str) -> set[str]:
    """Import names of the dependencies that pyproject.toml declares for the base installation and ``extras``."""
    project = PYPROJECT["project"]
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    names = {Requirement(line).name.lower().replace("-", "_") for line in lines}
    return names.union(*(PARTS.get(name, set()) for name in names))


COMPUTE_PLANE = ("rlhf_core.training", "rlhf_core.weight_sync", "rlhf_core.worker")


EXPORTS = "rlhf_core.render.exports"
"""Module that imports its libraries when they are needed, and explains how to install a missing one."""

NOT_CONTROL_PLANE = (*COMPUTE_PLANE, "rlhf_core.callback", EXPORTS)


def test_schemas_stand_on_pydantic_alone(graph: grimp.ImportGraph) -> None:
    assert set(_libraries_of(graph, "rlhf_core.schemas", "rlhf_core.errors")) == {"pydantic"}


def test_the_control_plane_imports_only_what_the_base_installation_declares(graph: grimp.ImportGraph) -> None:
    libraries = _libraries_of(graph, *PACKAGES, but=NOT_CONTROL_PLANE)
    assert {library: by for library, by in libraries.items() if library not in _declared()} == {}


def test_the_exports_import_only_what_their_extra_declares(graph: grimp.ImportGraph) -> None:
    libraries = _libraries_of(graph, EXPORTS)
    assert {"mlflow", "pyarrow", "tensorboard", "wandb"} <= set(libraries)
    assert {library: by for library, by in libraries.items() if library not in _declared("export")} == {}


def test_the_compute_plane_imports_only_what_the_training_extra_declares(graph: grimp.ImportGraph) -> None:
    libraries = _libraries_of(graph, *COMPUTE_PLANE)
    known = _declared("training") | {
        "rlhf_flight_recorder",
        "rlhf_rank_file",
    }  # beside their importer, on the path of other programs
    further = {library: by for library, by in libraries.items() if library not in known}
    assert {library: by.rpartition(".")[0] for library, by in further.items()} == {
        "vllm": "rlhf_core.training.rollouts.vllm"
    }
    assert "vllm" in _declared("vllm")


def test_an_undeclared_library_would_be_seen(graph: grimp.ImportGraph) -> None:
    libraries = _libraries_of(graph, *PACKAGES, but=NOT_CONTROL_PLANE)
    assert "prefect" in libraries
    assert set(libraries) - (_declared() - {"prefect"}) == {"prefect"}
