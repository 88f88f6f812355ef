"""``python -m rlhf_core.worker``: a fast start and correct results of the import check."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent_runs import REPOSITORY
from control_fakes import make_run

from rlhf_core.errors import BadInput
from rlhf_core.files.whole import write_model
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import WorkerOutcome
from rlhf_core.schemas.resources import GroupPlan, Placement, in_order
from rlhf_core.worker.__main__ import main
from rlhf_core.worker.roles import TARGETS, load, target_of


def _worker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "rlhf_core.worker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_help_names_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rlhf_core.worker.__main__ import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'psutil', 'rlhf_core.training'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "check-import" in done.stdout
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("content", "target", "error"),
    [
        ("def reward(**_): return []", "user_code:reward", ""),
        ("print('noise while importing')\ndef reward(**_): return []", "user_code:reward", ""),
        ("import not_installed_anywhere", "user_code:reward", "ModuleNotFoundError: No module named 'not_installed"),
        ("x = 1", "user_code:reward", "ImportError: module user_code has no reward"),
        ("reward = 3", "user_code:reward", "BadInput: user_code:reward is not a function but int"),
        ("raise SystemExit('I am a script')", "user_code:reward", "SystemExit: I am a script"),
        ("1 / 0", "user_code:reward", "ZeroDivisionError"),
        ("", "user_code", "BadInput: found 'user_code', expected module:function"),
    ],
)
def test_check_import_answers_with_one_json_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
    target: str,
    error: str,
) -> None:
    (tmp_path / "user_code.py").write_text(content, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = main(["check-import", target, "--path", str(tmp_path)])
    sys.modules.pop("user_code", None)
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is not bool(error)
    assert answer["error"].startswith(error)
    assert code == (1 if error else 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agent", "--target", "juggler=a:b"], "expected ROLE=MODULE:FUNCTION"),
        (["role", "juggler", "--restart", "0", "--node", "n"], "juggler"),
    ],
)
def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--run-dir", "x", "--attempt", "1"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_damaged_run_directory_ends_with_an_outcome(tmp_path: Path) -> None:
    done = _worker("agent", "--run-dir", str(tmp_path), "--attempt", "1")
    assert done.returncode == 1
    outcome = json.loads((tmp_path / "attempts" / "1" / "outcome.json").read_bytes())
    assert (outcome["state"], outcome["failure_kind"]) == ("failed", "config")
    assert "has no spec.json" in outcome["message"]


def test_a_given_target_takes_precedence_over_the_native_one() -> None:
    assert target_of(Role.TRAINER, {Role.TRAINER: "mine:run"}) == "mine:run"
    assert target_of(Role.EVALUATOR, {}) == TARGETS[Role.EVALUATOR]
    with pytest.raises(BadInput, match="found no target for role reward"):
        target_of(Role.REWARD, {})


@pytest.mark.training
@pytest.mark.parametrize("target", TARGETS.values())
def test_the_native_targets_exist(target: str) -> None:
    assert callable(load(target))


def test_an_abort_during_teardown_does_not_change_the_outcome_of_a_worker(tmp_path: Path) -> None:
    """Library threads can abort the interpreter at exit, when the work has already succeeded."""
    (tmp_path / "abrupt.py").write_text(
        "import atexit, os\n"
        "from rlhf_core.training.types import RoleResult\n"
        "def role(context):\n    atexit.register(os.abort)\n    print('said')\n    return RoleResult.DONE\n",
        encoding="utf-8",
    )
    run = make_run(tmp_path / "runs")
    placement = Placement(attempt=1, num_nodes=1, phases=in_order(GroupPlan.on_all_nodes(Role.TRAINER, 1, 1)))
    write_model(run.attempt(1).placement, placement)
    where = ("--run-dir", str(run.root), "--attempt", "1", "--restart", "0", "--node", "here")
    done = _worker("role", "trainer", *where, "--target", "abrupt:role", "--path", str(tmp_path))
    assert done.returncode == 0, done.stderr
    restart = run.attempt(1).restart(0)
    outcome = WorkerOutcome.model_validate_json(restart.worker_outcome("trainer", "here", 0).read_bytes())
    assert outcome.ok
    assert "said" in restart.log("trainer", "here", 0).read_text(), "its output must not be lost"
