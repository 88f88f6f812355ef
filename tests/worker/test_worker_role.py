"""The process of one worker, without an agent: its imports, its files, and its exit."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agent_runs import REPOSITORY, make_spec
from made_reports import stored_spec

from rlhf_core.files.whole import read_model, write_model, write_text
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import Phase, WorkerOutcome
from rlhf_core.schemas.resources import GroupPlan, Placement, in_order
from rlhf_core.worker.channel.signing import MAX_MESSAGE_BYTES
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.worker_process import MAX_CHARACTERS, SLOTS_VARIABLE, _shortened

HEAD = (
    "from rlhf_core.training.types import RoleResult\nfrom rlhf_core.schemas.reports import Phase\ndef run(context):\n"
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "toy-20260101-000000-abcdef")
    write_model(found.spec, stored_spec(found.run_id, make_spec()))
    phases = in_order(GroupPlan.on_all_nodes(Role.TRAINER, 2, 1))
    write_model(found.attempt(1).placement, Placement(attempt=1, num_nodes=1, phases=phases))
    return found


def work(run_dir: RunDir, body: str, slots: Path | None = None) -> tuple[int, WorkerOutcome | None, str]:
    """Run a role whose code is in the run's snapshot; returns exit code, outcome and log."""
    write_text(
        run_dir.code / "snapshot" / "user_role.py", HEAD + "".join(f"    {line}\n" for line in body.splitlines())
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    if slots is not None:
        environment[SLOTS_VARIABLE] = str(slots)
    command = [sys.executable, "-m", "rlhf_core.worker", "role", "trainer", "--run-dir", str(run_dir.root)]
    command += ["--attempt", "1", "--restart", "2", "--node", "here", "--target", "user_role:run"]
    process = subprocess.run(command, env=environment, check=False, timeout=30)
    restart_dir = run_dir.attempt(1).restart(2)
    outcome = read_model(restart_dir.worker_outcome("trainer", "here", 1), WorkerOutcome)
    return process.returncode, outcome, restart_dir.log("trainer", "here", 1).read_text(encoding="utf-8")


def test_a_role_knows_its_rank_and_its_output_is_kept(run_dir: RunDir) -> None:
    body = (
        "import subprocess, sys\nprint(context.rank, context.local_rank, context.num_ranks, context.restart)\n"
        "subprocess.run([sys.executable, '-c', 'import user_role; print(user_role.__file__)'], check=True)\n"
        "return RoleResult.STOPPED_EARLY"
    )
    code, outcome, log = work(run_dir, body)
    assert code == 0
    assert outcome is not None
    assert (outcome.ok, outcome.stopped_early, outcome.rank) == (True, True, 3)
    assert "3 1 4 2" in log.splitlines()
    # The snapshot is importable for child processes of the role, too.
    assert str(run_dir.code / "snapshot" / "user_role.py") in log


def test_an_error_is_passed_on_as_text_with_its_step_and_phase(run_dir: RunDir) -> None:
    """No thread keeps the process alive, since peers notice only when the connections close; its output is kept."""
    slots = SlotFile(run_dir.run_id, 1, "here", 2)
    try:
        body = (
            "import threading, time\nfrom rlhf_core.errors import RewardFailed\n"
            "threading.Thread(target=time.sleep, args=(60,)).start()\nprint('said before', end='')\n"
            "context.reporter.beat(Phase.REWARD, 8)\n"
            "raise RewardFailed('no')"
        )
        code, outcome, log = work(run_dir, body, slots.path)  # times out if the thread keeps it alive
    finally:
        slots.remove()
    assert code == 1
    assert outcome is not None
    assert (outcome.ok, outcome.error_type, outcome.message) == (False, "rlhf_core.errors.RewardFailed", "no")
    assert (outcome.phase, outcome.step) == (Phase.REWARD, 8)
    assert 'user_role.py", line' in outcome.traceback
    assert "RewardFailed: no" in log
    assert "said before" in log


@pytest.mark.parametrize(
    ("body", "error_type"),
    [
        ("raise SystemExit(0)", "builtins.SystemExit"),
        ("class Own(Exception): pass\nraise Own", "user_role.run.<locals>.Own"),
    ],
)
def test_only_a_return_is_a_success(run_dir: RunDir, body: str, error_type: str) -> None:
    code, outcome, _ = work(run_dir, body)
    assert code == 1
    assert outcome is not None
    assert outcome.error_type == error_type


def test_an_error_may_quote_whole_batches_and_broken_text(run_dir: RunDir) -> None:
    """The agents of several nodes could not report a longer one, and files hold no half characters."""
    body = (
        "try:\n    raise KeyError('first' + 3_000_000 * 'a prompt ')\n"
        "except KeyError as error:\n    raise ValueError('row \\ud83d: ' + 3_000_000 * 'a row ' + 'the end') from error"
    )
    code, outcome, log = work(run_dir, body)
    assert code == 1
    assert outcome is not None
    assert outcome.error_type == "builtins.ValueError"
    assert outcome.message.startswith("row \\ud83d: a row")
    assert outcome.message.endswith("the end")
    for text in (outcome.traceback, log):
        assert all(words in text for words in ("KeyError: 'first", "in run", "ValueError: row \\ud83d: ", "the end"))
    assert 16 * len(outcome.model_dump_json()) < MAX_MESSAGE_BYTES


def test_no_part_of_a_secret_is_left_where_a_long_error_is_cut() -> None:
    """Wherever the cut falls: half a token would not be recognised as one, and so not be masked."""
    token = "hf_" + 30 * "Ab"
    for shift in range(0, 2 * len(token), 7):
        words = "a " * ((MAX_CHARACTERS // 2 - shift) // 2) + token
        found = _shortened(f"{words} {'word ' * 9000}{token} {'b ' * (MAX_CHARACTERS // 4 - shift)}")
        assert len(found) <= MAX_CHARACTERS
        assert "[...]" in found
        assert re.sub(r"\bhf_\w+", "", found.replace(token, "")) == found.replace(token, "")
        assert "AbAb" not in found.replace(token, "")
    assert _shortened(MAX_CHARACTERS * "x" + "y") == "[...]", "one word"


def test_a_missing_placement_is_named(run_dir: RunDir) -> None:
    run_dir.attempt(1).placement.unlink()
    code, outcome, _ = work(run_dir, "return RoleResult.DONE")
    assert code == 1
    assert outcome is not None
    assert outcome.error_type == "rlhf_core.errors.RunDirError"
    assert "placement.json is missing" in outcome.message
