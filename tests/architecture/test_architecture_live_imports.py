"""The two planes, live: each one imports in a fresh interpreter in which the other's libraries cannot be imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TORCH_AND_KIN = ("torch", "transformers", "deepspeed", "vllm", "tokenizers", "datasets", "safetensors", "accelerate")
CONTROL_LIBRARIES = ("prefect", "sqlalchemy", "alembic", "submitit")

IMPORT_ALL = """
import importlib, json, pkgutil, sys
from rlhf_core.garbage import collect_rarely

collect_rarely()
packages, left_out, blocked = json.loads(sys.argv[1])

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} must not be imported here")
        return None

sys.meta_path.insert(0, Blocker())

def modules(package):
    yield package.__name__
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        yield info.name

imported = []
for package in packages:
    for name in modules(importlib.import_module(package)):
        if name.endswith("__main__") or any(name == out or name.startswith(out + ".") for out in left_out):
            continue
        importlib.import_module(name)
        imported.append(name)
print(json.dumps(imported))
"""


def _import_all(packages: list[str], left_out: list[str], blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    arguments = json.dumps([packages, left_out, blocked])
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_control_plane_imports_without_torch() -> None:
    other_plane = ["rlhf_core.training", "rlhf_core.weight_sync", "rlhf_core.worker"]
    left_out = [*other_plane, "rlhf_core.callback"]  # the last one is for other trainers
    done = _import_all(["rlhf_core", "flows"], left_out, TORCH_AND_KIN)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"rlhf_core.cli.main", "rlhf_core.history.store", "rlhf_core.watchdog.watcher", "flows.run"} <= imported


@pytest.mark.training
def test_the_compute_plane_imports_without_the_control_libraries() -> None:
    # Loaded by the ranks of other programs, and by vLLM.
    left_out = ["rlhf_core.worker.in_rank", "rlhf_core.training.rollouts.vllm.worker"]
    done = _import_all(["rlhf_core.training", "rlhf_core.weight_sync", "rlhf_core.worker"], left_out, CONTROL_LIBRARIES)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"rlhf_core.training.trainers.online", "rlhf_core.worker.agent.phases"} <= imported


def test_an_agent_and_a_worker_of_another_program_import_without_torch() -> None:
    done = _import_all(["rlhf_core.worker"], ["rlhf_core.worker.in_rank"], TORCH_AND_KIN)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"rlhf_core.worker.agent.bootstrap", "rlhf_core.worker.command.follower"} <= imported


def test_the_blocker_blocks() -> None:
    done = _import_all(["rlhf_core.training"], [], ("torch",))
    assert done.returncode != 0
    assert "torch must not be imported here" in done.stderr


SHOW_MODULES = """
import json, sys
from rlhf_core.cli.main import main
sys.argv = ["rlhf", *sys.argv[1:]]
try:
    code = main()
except SystemExit as end:
    code = end.code
print(json.dumps([code or 0, sorted({name.partition(".")[0] for name in sys.modules}), sorted(sys.modules)]))
"""


def _modules_after(*arguments: str) -> tuple[set[str], set[str], str]:
    """Top-level and full names of the modules loaded by ``rlhf ARGUMENTS``, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW_MODULES, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    code, top, names = json.loads(last)
    assert code == 0, done.stdout
    return set(top), set(names), "\n".join(printed)


def test_help_loads_nothing_heavy() -> None:
    top, names, printed = _modules_after("--help")
    assert "Usage" in printed
    heavy = {*TORCH_AND_KIN, *CONTROL_LIBRARIES, "matplotlib", "numpy", "pydantic", "flows"}
    assert heavy & top == set()
    assert "rlhf_core.schemas.run" not in names, "the schemas cost 0.15 s: import them inside the commands"


def test_help_of_a_training_command_loads_no_torch() -> None:
    top, _, printed = _modules_after("run", "--help")
    assert "Usage" in printed
    assert set(TORCH_AND_KIN) & top == set()
    assert "pydantic" in top, "negative control of the previous test: its settings are listed"
