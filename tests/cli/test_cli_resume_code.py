"""``rlhf resume`` after a fix of a reward function: the run uses its copy, or the current files with ``--code``."""

from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeAgent, FakeScheduler, only_scheduler
from history_tools import events_of
from process_tools import Rlhf

from rlhf_core.cli.main import execute
from rlhf_core.config.site import load_site
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir.run import RunDir, run_dirs
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.failures import FailureKind

Printed = pytest.CaptureFixture[str]

BROKEN = "def score(**columns):\n    return []\n"
MENDED = "def score(*, completions, **columns):\n    return [0.5 + len(text) for text in completions]\n"


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """Scheduler whose first job fails and whose later jobs succeed."""
    found = only_scheduler(monkeypatch)

    def work(request: Any) -> None:
        agent = FakeAgent(newest_run(), request.placement.attempt)
        if request.placement.attempt > 1:
            agent.whole_run(request.placement.resumed_from_step)
            return
        agent.begin()
        agent.fail(FailureKind.DATA)

    found.on_submit = work
    return found


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Reward module of the user in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_rewards.py"
    path.write_text(BROKEN)
    return path


def newest_run() -> RunDir:
    return run_dirs(load_site().runs_dir)[-1]


def failed_run(rewards: Path) -> RunDir:
    """A run with the broken function, which is fixed afterwards."""
    options = ("--no-prefect", "--set", 'reward.functions=["my_rewards:score"]')
    assert execute(["run", "quickstart", *options, "--set", 'preflight.off={"content.rewards"="broken"}']) == 1
    rewards.write_text(MENDED)
    return newest_run()


def used_code(run_dir: RunDir) -> str:
    return (run_dir.code / "snapshot" / "my_rewards.py").read_text()


@pytest.mark.usefixtures("scheduler")
def test_resume_reports_that_the_run_uses_its_copy_of_changed_files(rlhf: Rlhf, rewards: Path, capsys: Printed) -> None:
    run_dir = failed_run(rewards)
    assert f"rlhf resume {run_dir.run_id} --code" in capsys.readouterr().err, "the diagnosis"
    output = rlhf("resume", "last", "--no-prefect").stderr
    assert "my_rewards.py changed since this run copied its code" in output
    assert f"`rlhf resume {run_dir.run_id} --code`" in output
    assert used_code(run_dir) == BROKEN


@pytest.mark.usefixtures("scheduler")
def test_resume_with_code_uses_the_current_files_and_records_it(
    rewards: Path, tmp_path: Path, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = failed_run(rewards)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "copied the code again; changed: my_rewards.py" in rlhf("resume", "last", "--no-prefect", "--code").stderr
    assert used_code(run_dir) == MENDED
    assert (run_dir.root / "code" / "snapshot" / "my_rewards.py").read_text() == BROKEN, "the first copy is kept"
    with HistoryStore(load_site().database_url) as store:
        (event,) = (one for one in events_of(store, run_dir.run_id) if one["kind"] == "code_taken")
    assert "had the code copied again; changed: my_rewards.py" in event["message"]


@pytest.mark.usefixtures("scheduler")
def test_resume_of_unchanged_code_reports_and_copies_nothing(rlhf: Rlhf, rewards: Path) -> None:
    run_dir = failed_run(rewards)
    rewards.write_text(BROKEN)
    assert "nothing changed" in rlhf("resume", "last", "--no-prefect", "--code").stderr
    assert run_dir.code == run_dir.root / "code"


@pytest.mark.usefixtures("scheduler")
def test_code_is_not_replaced_while_a_job_may_be_running(rlhf: Rlhf, rewards: Path) -> None:
    run_dir = failed_run(rewards)
    journal = Journal(run_dir, 9)
    for state in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING):
        journal.move_run(state, "another controller, which died")
    journal.close()
    assert f"`rlhf cancel {run_dir.run_id}` ends it" in rlhf("resume", "last", "--no-prefect", "--code", code=2).stderr
    assert used_code(run_dir) == BROKEN


@pytest.mark.usefixtures("scheduler")
def test_missing_code_does_not_replace_the_copy(rlhf: Rlhf, rewards: Path) -> None:
    run_dir = failed_run(rewards)
    rewards.unlink()
    (rewards.parent / "my_rewards").mkdir()
    (rewards.parent / "my_rewards" / "__init__.py").write_text(MENDED)
    answer = rlhf("resume", "last", "--no-prefect", "--code", code=2)
    assert "my_rewards.py of this run's code is no longer in" in answer.stderr
    assert used_code(run_dir) == BROKEN
