"""`rlhf init`, `check`, `run`, `resume`, `cancel`, `logs`, `watch`, `doctor` in one process, on a fake scheduler."""

import json
import os
import shlex
import shutil
import signal
import threading
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from control_fakes import FakeAgent, FakeScheduler, make_run, make_spec, only_scheduler, training_snapshot
from history_tools import living_controller
from made_reports import rank_status
from process_tools import Rlhf
from rich.console import Console
from site_files import options

from flows.server.settings import own_url
from rlhf_core.cli import doctor, log_files, watching
from rlhf_core.cli.commands import check as check_commands
from rlhf_core.cli.progress import TerminalProgress
from rlhf_core.config.fields import describe_fields
from rlhf_core.config.loading import load
from rlhf_core.config.site import load_site
from rlhf_core.control.reconcile.loop import take_lease
from rlhf_core.control.views.progress import RunReader, StepTimer, progress_of_poll
from rlhf_core.errors import SchedulerError
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.machine.accounts import account
from rlhf_core.preflight.facts import Disk
from rlhf_core.preflight.gather_facts import Surroundings
from rlhf_core.preflight.runner import make_checks
from rlhf_core.presets import PRESETS, preset_path
from rlhf_core.render.progress import progress_text
from rlhf_core.render.timeline import TimelineIncident
from rlhf_core.run_dir.run import RunDir, run_dirs
from rlhf_core.schemas.attempts import Role, RunState
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import ControllerStarted
from rlhf_core.schemas.resources import Placement
from rlhf_core.schemas.run import RunSpec
from rlhf_core.services.presence import holding
from rlhf_core.watchdog.watcher import AttemptSnapshot, Watcher

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """Scheduler of this site whose jobs finish all their work at once."""
    found = only_scheduler(monkeypatch)

    def whole(request: Any) -> None:
        FakeAgent(newest_run(), request.placement.attempt).whole_run(request.placement.resumed_from_step)

    found.on_submit = whole
    return found


def newest_run() -> RunDir:
    return run_dirs(load_site().runs_dir)[-1]


# ---------------------------------------------------------------------------------------------------------------------
# init


@pytest.mark.parametrize("preset", PRESETS)
def test_a_starter_config_is_equivalent_to_its_preset(rlhf: Rlhf, preset: str, tmp_path: Path) -> None:
    answer = rlhf("init", str(tmp_path / "new"), "--preset", preset)
    path = tmp_path / "new" / f"{preset}.toml"
    assert load(path) == load(preset)
    text = path.read_text()
    spec = load(preset)
    chosen = {spec.trainer.kind, *(loop.algorithm.name for loop in spec.loops.named.values())}
    for field in describe_fields():
        of_another = bool(field.only_for) and chosen.isdisjoint(field.only_for)
        if of_another or (field.name.startswith("loops.") and not spec.loops.named):
            continue
        leaf = field.name.rpartition(".")[2]
        assert f"{leaf} = " in text or f"[{field.name}]" in text, field.name
    assert f"rlhf run {path}" in answer.stdout


def test_init_does_not_take_a_preset_for_a_folder(tmp_path: Path, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "`rlhf init --preset gsm8k`" in rlhf("init", "gsm8k", code=2).stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "gsm8k").mkdir()
    rlhf("init", "gsm8k")
    assert (tmp_path / "gsm8k" / "quickstart.toml").exists()


def test_the_next_commands_can_be_pasted(tmp_path: Path, rlhf: Rlhf) -> None:
    assert f"rlhf run '{tmp_path}/my runs/quickstart.toml'" in rlhf("init", str(tmp_path / "my runs")).stdout
    quoted = shlex.quote(str(tmp_path / "my runs" / "quickstart.toml"))
    assert f"#   rlhf run {quoted} " in (tmp_path / "my runs" / "quickstart.toml").read_text()


def test_defaults_in_a_starter_config_are_the_defaults(rlhf: Rlhf, tmp_path: Path) -> None:
    """Uncommenting the settings changes nothing, except in a section that is left out with its header."""
    rlhf("init", str(tmp_path))
    path = tmp_path / "quickstart.toml"
    names = {field.name.rpartition(".")[2] for field in describe_fields()}
    lines = []
    is_left_out = False
    for line in path.read_text().splitlines():
        bare = line.removeprefix("# ")
        if bare.startswith("["):
            is_left_out = line.startswith("# ")
        is_default = not is_left_out and line.startswith("# ") and bare.partition(" = ")[0] in names
        lines.append(bare if is_default else line)
    assert sum(line.startswith("#") for line in lines) < sum(
        line.startswith("#") for line in path.read_text().splitlines()
    )
    tomllib.loads("\n".join(lines))
    path.write_text("\n".join(lines))
    assert load(path) == load("quickstart")


def test_init_overwrites_nothing(rlhf: Rlhf, tmp_path: Path) -> None:
    path = tmp_path / "quickstart.toml"
    path.write_text("mine")
    answer = rlhf("init", str(tmp_path), code=2)
    assert path.read_text() == "mine"
    assert "already exists" in answer.stderr


def test_init_writes_to_the_file_that_is_named(rlhf: Rlhf, tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.toml"
    rlhf("init", str(path))
    assert load(path) == load("quickstart")


def test_init_names_what_is_wrong(tmp_path: Path, rlhf: Rlhf) -> None:
    assert 'did you mean the preset "quickstart"' in rlhf("init", str(tmp_path), "--preset", "quickstrt", code=2).stderr
    file = tmp_path / "notes.txt"
    file.touch()
    assert f"{file} is a file" in rlhf("init", str(file), code=2).stderr


# ---------------------------------------------------------------------------------------------------------------------
# check, dry run


@pytest.mark.usefixtures("scheduler")
def test_check_shows_all_findings_and_blocks(rlhf: Rlhf) -> None:
    changes = options("loops.main.algorithm.prompts_per_step=7", "loops.warm_start.algorithm.batch_size=33")
    findings = rlhf("check", "quickstart", *changes, "--json", code=2).json()
    assert {one["id"] for one in findings if one["status"] == "blocked"} >= {
        "batch.prompts_divide_ranks",
        "batch.rows_divide_ranks",
    }
    assert load_site().runs_dir.exists() is False, "checking leaves no run behind"


def test_findings_can_be_copied_from_a_narrow_terminal(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "set resources.num_nodes=1 and resources.ranks_per_node to the number of ranks"
    results = [
        CheckResult(id="batch.prompts_divide_ranks", status=CheckStatus.PASSED, found="each rank has 8"),
        CheckResult(
            id="resources.nodes", status=CheckStatus.BLOCKED, found="x" * 60, expected="one node", advice=advice
        ),
    ]
    monkeypatch.setenv("COLUMNS", "200")
    check_commands._print_checks(results)
    assert "each rank has 8" in capsys.readouterr().out, "control: there is room for a table"
    monkeypatch.setenv("COLUMNS", "80")
    check_commands._print_checks(results)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["passed  batch.prompts_divide_ranks: each rank has 8", ""]
    assert lines[2].split() == ["status", "blocked"]
    assert lines[-3:] == [f"what to do  {advice}", "", "1 blocked, 1 passed"]


@pytest.mark.usefixtures("scheduler")
def test_check_reports_missing_code_and_looks_into_the_rest(
    tmp_path: Path, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def checks(spec: RunSpec, around: Surroundings) -> Sequence[CheckResult]:
        seen.extend(path.name for path in around.code_path.iterdir())
        return make_checks(spec, around)

    monkeypatch.setattr("rlhf_core.preflight.runner.make_checks", checks)
    (tmp_path / "lib.py").touch()
    paths = [str(tmp_path / "lib.py"), str(tmp_path / "gone.py")]
    answer = rlhf("check", "quickstart", "--set", f"code.paths={json.dumps(paths)}", "--json", code=2)
    (finding,) = [one for one in answer.json() if one["status"] == "blocked"]
    assert (finding["id"], seen) == ("code.paths", ["lib.py"])
    assert "gone.py, which does not exist" in finding["found"]


@pytest.mark.usefixtures("scheduler")
def test_check_of_a_good_config_is_fine_with_a_damaged_history_too(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    good = CheckResult(id="a.check", status=CheckStatus.PASSED, found="all is well")
    monkeypatch.setattr("rlhf_core.preflight.runner.make_checks", lambda spec, around: (good,))
    shown = rlhf("check", "quickstart").stdout
    assert "a.check" in shown
    assert "1 passed" in shown
    file = load_site().home / "history.db"
    assert not file.exists(), "checking makes no history"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("this is no database" * 100)
    assert "skipping the comparison with earlier runs" in rlhf("check", "quickstart").stderr


def test_a_file_that_is_only_beside_the_config_is_warned_of_by_check_and_refused_by_run(
    rlhf: Rlhf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/helpers.py").touch()
    shutil.copy(preset_path("quickstart"), tmp_path / "configs/trial.toml")
    good = CheckResult(id="a.check", status=CheckStatus.PASSED, found="all is well")
    monkeypatch.setattr("rlhf_core.preflight.runner.make_checks", lambda spec, around: (good,))
    words = ("configs/trial.toml", "--set", 'code.paths=["helpers.py"]')
    shown = rlhf("check", *words).stderr
    hint = 'beside the config; write "configs/helpers.py", or call rlhf in'
    assert f"warning: code.paths: found no helpers.py in {tmp_path}" in shown
    assert hint in shown
    assert hint not in rlhf("config", "show", *words).stderr
    assert hint in rlhf("run", *words, code=2).stderr


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_wrong_key_is_answered_with_the_right_one(command: str, rlhf: Rlhf) -> None:
    answer = rlhf(command, "quickstart", "--set", "loops.main.num_stepps=3", code=2)
    assert 'did you mean "loops.main.num_steps"' in answer.stderr
    assert not load_site().runs_dir.exists()


def test_a_dry_run_starts_nothing(scheduler: FakeScheduler, rlhf: Rlhf) -> None:
    shown = rlhf("run", "quickstart", "--dry-run", "--json").json()
    assert shown["command"][1:5] == ["-P", "-m", "rlhf_core.worker", "agent"]
    assert [group["role"] for (group,) in shown["placement"]["phases"]] == ["probe", "trainer", "evaluator"]
    assert "Nothing was started" in rlhf("run", "quickstart", "--dry-run").stdout
    assert scheduler.submitted == []
    assert not load_site().home.exists()


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_a_dry_run_without_room_says_what_to_do(
    scheduler: FakeScheduler, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(scheduler, "name", name)
    answer = rlhf("run", "quickstart", "--dry-run", "--set", "resources.gpus_per_node=8", code=2)
    message = " ".join(answer.stderr.split())
    assert "8 GPUs per node requested, 0 there; change [resources] to fit" in message
    assert ("RLHF_SCHEDULER=slurm" in message) == (name == "local")


def test_a_dry_run_shows_the_layout_of_the_nodes(
    scheduler: FakeScheduler, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    scheduler.nodes = ("n1", "n2", "n3")
    changes = ("resources.num_nodes=3", "rollout.engines=2", "rollout.nodes=1")
    shown = " ".join(rlhf("run", "quickstart", "--dry-run", *options(*changes)).stdout.split())
    assert "3 nodes, 0 GPUs each" in shown
    assert "trainer with 2 workers per node on the first 2 of 3 nodes" in shown
    assert "rollout with 2 workers per node on the last 1 of 3 nodes" in shown


# ---------------------------------------------------------------------------------------------------------------------
# run, resume, cancel


@pytest.mark.usefixtures("scheduler")
def test_a_run_ends_with_its_summary(rlhf: Rlhf) -> None:
    printed = rlhf("run", "quickstart", "--no-prefect", "--name", "mine", "--set", "seed=4")
    assert "0.900 [0.800, 1.000]" in printed.stdout
    assert "train attempt 1" in printed.stderr
    run_dir = newest_run()
    assert run_dir.run_id.startswith("mine-")
    assert run_dir.read_spec().spec.seed == 4
    assert run_dir.read_spec().overrides == ("seed=4",)


@pytest.mark.usefixtures("scheduler")
def test_standard_output_has_only_the_json_summary(rlhf: Rlhf) -> None:
    summary = rlhf("run", "quickstart", "--no-prefect", "--json").json()
    assert summary["state"] == "completed"
    assert {(one["when"], one["value"]) for one in summary["evaluations"]} == {("before", 0.2), ("after", 0.9)}


def test_a_failed_run_exits_with_1_and_the_diagnosis(scheduler: FakeScheduler, rlhf: Rlhf) -> None:
    def fail(request: Any) -> None:
        agent = FakeAgent(newest_run(), request.placement.attempt)
        agent.begin()
        agent.fail(FailureKind.DATA)

    scheduler.on_submit = fail
    printed = rlhf("run", "quickstart", "--no-prefect", code=1).stderr
    assert "failed in attempt 1: data" in printed
    assert "Traceback" not in printed


def test_a_run_whose_scheduler_cannot_be_used_says_what_to_do(
    rlhf: Rlhf, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(FakeScheduler, "inventory", Mock(side_effect=SchedulerError("sinfo lists no nodes")))
        answer = rlhf("run", "quickstart", "--no-prefect", code=1)
    run_dir = newest_run()
    printed = answer.stderr
    assert "sinfo lists no nodes" in printed
    assert f"`rlhf resume {run_dir.run_id}` continues it" in printed
    assert f"`rlhf cancel {run_dir.run_id}` ends it" in printed
    rlhf("resume", run_dir.run_id, "--no-prefect")
    assert read_record(run_dir).state is RunState.COMPLETED
    assert len(scheduler.submitted) == 1


def test_a_completed_run_is_not_resumed(scheduler: FakeScheduler, rlhf: Rlhf) -> None:
    rlhf("run", "quickstart", "--no-prefect")
    before = newest_run().control.read_bytes()
    assert "nothing to resume" in rlhf("resume", "last", "--no-prefect").stderr
    assert newest_run().control.read_bytes() == before
    assert len(scheduler.submitted) == 1


def test_a_run_with_a_controller_is_refused_at_once(rlhf: Rlhf, scheduler: FakeScheduler) -> None:
    """And taken over at once if the controller died: the same lease, in the name of a dead process."""
    run_dir = make_run(load_site().runs_dir)
    with living_controller() as owner:
        link = ControllerStarted(controller=str(owner), flow_run_id="f", flow_run_url="https://prefect/runs/f")
        with HistoryStore(load_site().database_url) as store:
            journal = Journal(run_dir, store.acquire_lease(run_dir.run_id, str(owner), 3600))
            journal.append(link)
            journal.close()
        began = time.monotonic()
        answer = rlhf("resume", run_dir.run_id, code=1)  # with Prefect: no server is started for it either
        assert time.monotonic() - began < 10
    output = answer.stderr
    assert f"on {owner.host}, process {owner.pid}, since 20" in output
    assert "flow run https://prefect/runs/f" in output
    assert f"`rlhf watch {run_dir.run_id}`" in output
    assert f"`rlhf cancel {run_dir.run_id}`" in output
    assert scheduler.submitted == []
    began = time.monotonic()
    rlhf("resume", run_dir.run_id, "--no-prefect")
    assert time.monotonic() - began < 10
    assert read_record(run_dir).state is RunState.COMPLETED


def test_ctrl_c_cancels_the_run(rlhf: Rlhf, scheduler: FakeScheduler) -> None:
    def trains(request: Any) -> None:
        FakeAgent(newest_run()).begin()
        FakeAgent(newest_run()).role(Role.TRAINER)
        os.kill(os.getpid(), signal.SIGINT)

    scheduler.on_submit = trains
    # A shell that starts the tests in the background makes them ignore the signal.
    before = signal.getsignal(signal.SIGINT)
    answer = rlhf("run", "quickstart", "--no-prefect", code=130)
    assert read_record(newest_run()).state is RunState.CANCELLED
    assert scheduler.cancelled == ["101"]
    assert "was cancelled" in answer.stderr
    assert signal.getsignal(signal.SIGINT) is before, "the handler must be restored"


def test_cancel_of_a_run_without_a_controller(scheduler: FakeScheduler, rlhf: Rlhf) -> None:
    run_dir = make_run(load_site().runs_dir)
    answer = rlhf("cancel", run_dir.run_id, "--reason", "not needed")
    assert "is cancelled (cancelled); none of its jobs is running" in answer.stdout
    assert read_record(run_dir).cause == f"not needed (by {account()})"
    answer = rlhf("cancel", run_dir.run_id, "--json")
    assert answer.json() == {"run_id": run_dir.run_id, "state": "cancelled", "job_ended": True}


@pytest.mark.parametrize("command", ["resume", "cancel", "watch", "logs"])
def test_an_unknown_run_exits_with_2(command: str, rlhf: Rlhf) -> None:
    assert "nothing" in rlhf(command, "nothing", code=2).stderr


def test_cancel_of_an_unknown_name_says_what_withdraws_a_request(rlhf: Rlhf) -> None:
    assert "withdrawn by its whole name in `rlhf runs --queued`" in rlhf("cancel", "nothing", code=2).stderr


# ---------------------------------------------------------------------------------------------------------------------
# logs, watch


@pytest.fixture
def with_logs() -> RunDir:
    """A run with an attempt in which trainer and evaluator have written logs."""
    run_dir = make_run(load_site().runs_dir)
    for restart, role in ((0, Role.TRAINER), (1, Role.EVALUATOR)):
        FakeAgent(run_dir, restart=restart).role(role)
        folder = run_dir.attempt(1).restart(restart)
        folder.logs.mkdir(parents=True)
        for rank in (0, 1):
            text = "".join(f"{role.value} {rank} line {number}\n" for number in range(100))
            folder.log(role.value, "n1", rank).write_text(text)
    scheduler_dir = run_dir.attempt(1).scheduler_dir
    scheduler_dir.mkdir(parents=True)
    (scheduler_dir / "101_log.out").write_text("agent says\n")
    return run_dir


def test_logs_of_one_rank_of_one_role(with_logs: RunDir, rlhf: Rlhf) -> None:
    shown = rlhf("logs", with_logs.run_id, "--role", "trainer", "--rank", "1", "--tail", "2").stdout
    assert "trainer 1 line 98\ntrainer 1 line 99\n" in shown
    assert "line 97" not in shown
    assert "trainer 0" not in shown


def test_logs_show_the_newest_start_and_the_agents(with_logs: RunDir, rlhf: Rlhf) -> None:
    printed = rlhf("logs", with_logs.run_id, "--tail", "0")
    assert "evaluator 0 line 0\n" in printed.stdout
    assert "agent says" in printed.stdout
    assert "trainer" not in printed.stdout
    assert printed.stderr == "Also here: --role trainer\n"


def test_the_last_lines_of_a_log_are_whole_however_long_they_are(with_logs: RunDir) -> None:
    error = f"RuntimeError: {'x' * 3000}\n"
    path = with_logs.attempt(1).restart(1).log("evaluator", "n1", 0)
    with path.open("a") as file:
        file.write(error)
    for num_lines, expected in ((1, error), (2, f"evaluator 0 line 99\n{error}")):
        assert log_files.last_lines(path, num_lines) == expected
    assert log_files.last_lines(path, 1000) == log_files.last_lines(path, 0) == path.read_text()


def test_the_title_of_a_log_begins_a_line(with_logs: RunDir, rlhf: Rlhf) -> None:
    path = with_logs.attempt(1).restart(1).log("evaluator", "n1", 0)
    with path.open("a") as file:
        file.write("killed in the middle of")
    answer = rlhf("logs", with_logs.run_id, "--role", "evaluator", "--tail", "1")
    assert "killed in the middle of\n==> evaluator rank 1" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--attempt", "4"), "has attempts 1, not 4"),
        (("--restart", "7"), "has restarts 0, 1, not 7"),
        (("--rank", "9"), "no log of rank 9"),
    ],
)
def test_missing_logs(with_logs: RunDir, arguments: tuple[str, ...], message: str, rlhf: Rlhf) -> None:
    assert message in rlhf("logs", with_logs.run_id, *arguments, code=2).stderr


def test_following_goes_on_while_a_new_attempt_has_no_logs(rlhf: Rlhf, with_logs: RunDir) -> None:
    rounds = []

    def meanwhile(seconds: float) -> None:
        rounds.append(seconds)
        folder = with_logs.attempt(2).restart(0)
        if len(rounds) == 1:
            with_logs.attempt(2).root.mkdir(parents=True)
        elif len(rounds) == 2:
            folder.logs.mkdir(parents=True)
            folder.log("trainer", "n1", 0).write_text("second attempt\n")
        else:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "time", SimpleNamespace(sleep=meanwhile))
        answer = rlhf("logs", with_logs.run_id, "--follow", "--rank", "0", "--tail", "1", code=130)
    assert "second attempt\n" in answer.stdout


def test_following_prints_new_lines_until_the_run_ends(rlhf: Rlhf, with_logs: RunDir) -> None:
    path = with_logs.attempt(1).restart(1).log("evaluator", "n1", 0)
    rounds = []

    def meanwhile(seconds: float) -> None:
        rounds.append(seconds)
        with path.open("a") as file:
            file.write(f"added {len(rounds)}\n")
        if len(rounds) == 2:
            with with_logs.control.open("a") as journal:
                journal.write(
                    '{"sequence":9,"token":1,"time":"2026-01-01T00:00:00Z",'
                    '"event":{"kind":"run_moved","state":"failed","cause":"x"}}\n'
                )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "time", SimpleNamespace(sleep=meanwhile))
        answer = rlhf("logs", with_logs.run_id, "--follow", "--rank", "0", "--tail", "1")
    shown = answer.stdout
    assert shown.count("added 1\n") == shown.count("added 2\n") == 1


def test_following_waits_for_the_rest_of_a_character(rlhf: Rlhf, with_logs: RunDir) -> None:
    path = with_logs.attempt(1).restart(1).log("evaluator", "n1", 0)
    parts = [b"caf\xc3", b"\xa9 \xe6\x97", b"\xa5\n"]

    def meanwhile(seconds: float) -> None:
        if not parts:
            raise KeyboardInterrupt
        with path.open("ab") as file:
            file.write(parts.pop(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "time", SimpleNamespace(sleep=meanwhile))
        answer = rlhf("logs", with_logs.run_id, "--follow", "--rank", "0", "--tail", "1", code=130)
    assert answer.stdout.endswith("evaluator 0 line 99\ncafé 日\n")


def test_following_prints_lines_written_during_a_reading_once(rlhf: Rlhf, with_logs: RunDir) -> None:
    path = with_logs.attempt(1).restart(1).log("evaluator", "n1", 0)
    rounds = []
    really_open = os.open

    def opened(opened_path: str | Path, *more: Any, **options: Any) -> int:
        if Path(opened_path) == path and not rounds:
            rounds.append("opened")
            with path.open("a") as file:
                file.write("written meanwhile\n")
        return really_open(opened_path, *more, **options)

    def meanwhile(seconds: float) -> None:
        rounds.append("slept")
        if len(rounds) == 4:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(log_files, "time", SimpleNamespace(sleep=meanwhile))
        answer = rlhf("logs", with_logs.run_id, "--follow", "--rank", "0", "--tail", "2", code=130)
    assert answer.stdout.count("written meanwhile\n") == 1


def interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["rlhf_core.control.controller.opened", "rlhf_core.control.steps.drive"])
def test_a_run_that_is_interrupted_before_its_job_is_listed(
    rlhf: Rlhf, moment: str, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(moment, interrupt)
        answer = rlhf("run", "quickstart", "--no-prefect", code=130)
    run_id = newest_run().run_id
    assert f"run {run_id} stays as it is: `rlhf resume {run_id}` continues it" in answer.stderr
    assert run_id in rlhf("show", "last").stdout
    rlhf("resume", "last", "--no-prefect")
    assert read_record(newest_run()).state is RunState.COMPLETED


def test_a_job_that_is_no_longer_watched_continues(
    rlhf: Rlhf, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watcher, "poll", interrupt)
    answer = rlhf("run", "quickstart", "--no-prefect", code=130)
    run_id = newest_run().run_id
    assert f"the job of {run_id} continues. `rlhf resume {run_id}` adopts it" in answer.stderr


def test_a_run_that_is_no_longer_watched_while_it_is_cancelled_is_not_said_to_continue(
    rlhf: Rlhf, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C was pressed twice."""
    scheduler.on_submit = lambda _: signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr("rlhf_core.control.cancel._end_attempt", interrupt)
    answer = rlhf("run", "quickstart", "--no-prefect", code=130)
    run_id = newest_run().run_id
    assert f"while run {run_id} is being cancelled: `rlhf cancel {run_id}` completes that" in answer.stderr
    assert "continues." not in answer.stderr


def test_watch_prints_a_line_for_a_run_that_has_ended(rlhf: Rlhf, scheduler: FakeScheduler) -> None:
    rlhf("run", "quickstart", "--no-prefect")
    shown = rlhf("watch", "last").stdout
    assert f"completed, attempt 1, grpo step 10/{load('quickstart').total_steps}" in shown
    (line,) = rlhf("watch", "last", "--json").stdout.splitlines()
    assert (json.loads(line)["state"], json.loads(line)["step"]) == ("completed", 10)


@pytest.mark.parametrize(
    ("state", "code", "message"),
    [
        (RunState.COMPLETED, 0, ""),
        (RunState.FAILED, 1, "failed: because"),
        (RunState.CANCELLED, 130, "cancelled: because"),
    ],
)
def test_submitting_and_watching_reports_the_end(
    state: RunState, code: int, message: str, monkeypatch: pytest.MonkeyPatch, rlhf: Rlhf
) -> None:
    from flows.deployments.submission import Submitted

    run_dir = make_run(load_site().runs_dir)
    journal = Journal(run_dir, 1)
    for step in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING, RunState.EVALUATING, state):
        journal.move_run(step, "because")
    submitted = Submitted(run_dir.run_id, "00000000-0000-0000-0000-000000000000", "http://prefect")
    monkeypatch.setattr("flows.server.required.require", lambda site: None)
    monkeypatch.setattr("flows.deployments.submission.submit_config", lambda *given, **named: submitted)
    for command in (("submit", "quickstart", "--watch"), ("watch", run_dir.run_id)):
        assert message in rlhf(*command, code=code).stderr


@pytest.mark.parametrize(("when", "is_open"), [("approved", True), ("never", False)])
def test_watching_ends_with_the_question_for_the_model(when: str, is_open: bool, rlhf: Rlhf) -> None:
    run_dir = make_run(load_site().runs_dir, make_spec(promote={"when": when}))
    with closing(Journal(run_dir, 1)) as journal:
        for state in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING, RunState.EVALUATING, RunState.COMPLETED):
            journal.move_run(state, "because")
    assert (f"rlhf approve {run_dir.run_id}" in rlhf("watch", run_dir.run_id).stderr) is is_open


def test_a_config_that_the_worker_of_another_user_cannot_read_is_reported(
    rlhf: Rlhf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.deployments.submission import Submitted

    monkeypatch.setattr("flows.server.required.require", lambda site: None)
    asked = Submitted("small-20260101-000000-abcdef", "00000000-0000-0000-0000-000000000000", "http://prefect")
    monkeypatch.setattr("flows.deployments.submission.submit_config", lambda *given, **named: asked)
    config = tmp_path / "my.toml"
    rlhf("init", str(config))
    assert "another user" not in rlhf("submit", str(config)).stderr, "the server is that of this user"
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example.com/api")
    assert "another user" not in rlhf("submit", "quickstart").stderr, "a deployment is stored where its worker reads it"
    assert "prefect.example.com/api belongs to another user, it cannot start the run" in " ".join(
        rlhf("submit", str(config)).stderr.split()
    )
    with holding(load_site().home, "worker"):
        answer = rlhf("submit", str(config))
    assert "another user" not in answer.stderr, "the worker is that of this user"


def test_logs_as_json(with_logs: RunDir, rlhf: Rlhf) -> None:
    (log,) = rlhf("logs", with_logs.run_id, "--role", "agent", "--json").json()
    assert log["text"] == "agent says\n"


def test_the_view_of_a_run_in_trouble_has_its_timeline(with_logs: RunDir) -> None:
    agent = FakeAgent(with_logs)
    agent.incident(FailureKind.WORKER_KILLED)
    agent.step(3, **{"reward/mean": 0.5})
    view = RunReader(with_logs).read()
    lines = watching.timeline_lines(view)
    assert any("worker killed" in line and "it was worker_killed" in line for line in lines)
    (shown,) = watching.json_lines(view)
    assert json.loads(shown)["timeline"] == lines
    assert "attempt 1, evaluating" in watching.headline(view)
    assert view.progress.metrics["reward/mean"] == 0.5
    assert [rank.rank for rank in view.ranks] == [0, 1]
    console = Console(width=100, record=True)
    console.print(watching.draw(view))
    assert "evaluator" in console.export_text()


def test_many_ranks_leave_room_for_the_rest_of_the_view(with_logs: RunDir) -> None:
    FakeAgent(with_logs).step(3, **{"reward/mean": 0.5})
    for restart in range(watching.MAX_ENTRIES + 1):
        FakeAgent(with_logs, restart=restart).incident(FailureKind.WORKER_KILLED)
    view = RunReader(with_logs).read()
    ranks = [rank_status(number, node="n1", age_s=90.0 if number == 300 else 0.1) for number in range(512)]
    console = Console(width=200, record=True)
    console.print(watching.draw(replace(view, ranks=ranks)))
    shown = console.export_text()
    assert "90.0 s ago" in shown
    assert "500 more, with a later beat" in shown
    assert shown.count("│ n1   │ train │") == watching.MAX_RANKS
    assert shown.count("it was worker_killed") == watching.MAX_ENTRIES
    assert "reward/mean" in shown


def test_steps_before_a_restart_are_not_shown_as_its_progress() -> None:
    run_dir = make_run(load_site().runs_dir)
    reader, agent, spec = RunReader(run_dir), FakeAgent(run_dir), run_dir.read_spec().spec
    placement = Placement(attempt=1, num_nodes=1, phases=())
    watcher = Watcher(run_dir, placement, None, FakeScheduler(), None)  # type: ignore[arg-type]

    def texts() -> set[str]:
        seen = reader.read().progress, progress_of_poll(watcher.poll(), spec, StepTimer())
        return {progress_text(progress) for progress in seen}

    agent.role(Role.TRAINER)
    agent.step(8)
    assert texts() == {f"grpo step 8/{spec.total_steps}, loss 0.500"}
    agent.restart = 1
    agent.role(Role.TRAINER)
    assert texts() == {"trainer: train"}
    agent.step(7)
    assert texts() == {f"grpo step 7/{spec.total_steps}, loss 0.500"}
    agent.restart = 2
    agent.role(Role.EVALUATOR)
    assert texts() == {"evaluating"}


# ---------------------------------------------------------------------------------------------------------------------
# progress


def snapshot(step: int = 60, **changes: Any) -> AttemptSnapshot:
    return training_snapshot(step, **{"metrics": {"reward/mean": 0.61, "speed/tokens_per_s": 5021.0}, **changes})


def test_progress_in_one_line() -> None:
    spec, timer = load("quickstart", ["loops.warm_start.num_steps=40", "loops.main.num_steps=80"]), StepTimer()
    measured = {**snapshot().progress.metrics, "time/step_s": 2.0}

    def text(**changes: Any) -> str:
        return progress_text(progress_of_poll(snapshot(**changes), spec, timer))

    assert text(metrics=measured) == "grpo step 60/120, reward 0.610, 5,021 tokens/s, 2 min 00 s left"
    supervised = {"loop": "sft", "step": 3, "metrics": {"train/loss": 1.5}, "restarts_made": 2}
    assert text(**supervised) == "sft step 3/120, loss 1.500, restart 2"
    assert text(loop="", phase="setup") == "trainer starts"
    assert text(loop="", phase="", role=None) == "waiting for nodes"
    assert text(evaluating=True) == "evaluating"


def test_ctrl_c_asks_once_and_continues_after_a_no() -> None:
    person = Mock(side_effect=[False, True])
    with TerminalProgress(load("quickstart"), "the-run", person) as progress:
        assert not progress.stop_requested()
        os.kill(os.getpid(), signal.SIGINT)
        assert not progress.stop_requested()
        assert person.call_count == 1
        os.kill(os.getpid(), signal.SIGINT)
        assert progress.stop_requested()
        assert progress.stop_requested(), "it is not asked again"
        assert person.call_count == 2


def test_a_second_ctrl_c_while_cancelling_exits_at_once() -> None:
    with TerminalProgress(load("quickstart"), "the-run", None) as progress:
        os.kill(os.getpid(), signal.SIGINT)
        assert progress.stop_requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_steps_shown_are_those_of_the_trial_while_it_is_made(capsys: Printed) -> None:
    spec = load("quickstart")
    with TerminalProgress(spec, "the-run") as progress:
        progress.follow(load("quickstart", ["loops.warm_start.num_steps=1", "loops.main.num_steps=2"]))
        progress.polled(snapshot(step=2, loop="grpo"))
        progress.follow(spec)
        progress._last_line = ("", float("-inf"))
        progress.polled(snapshot(step=1, loop="grpo"))
    shown = capsys.readouterr().err
    assert "step 2/3" in shown
    assert f"step 1/{spec.total_steps}" in shown


def test_a_late_history_is_reported_once_and_so_is_its_recovery(capsys: Printed) -> None:
    with TerminalProgress(load("quickstart"), "the-run") as progress:
        for behind in ("away", "away", ""):
            progress.polled(replace(snapshot(), history_behind=behind))
    shown = capsys.readouterr().err
    assert shown.count("history behind: away") == 1
    assert "up to date again" in shown


# ---------------------------------------------------------------------------------------------------------------------
# doctor


@pytest.mark.usefixtures("scheduler")
def test_doctor_reports_present_and_missing_parts(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_COMPUTE_PYTHON", "/nowhere/python")
    items = {one["name"]: one for one in rlhf("doctor", "--json", code=1).json()}
    assert items["compute interpreter"]["ok"] is False
    assert items["torch"]["ok"] is False
    assert "or set RLHF_COMPUTE_PYTHON" in items["torch"]["advice"]
    assert items["py-spy"]["advice"] == "/nowhere/python -m pip install py-spy", "not into the control plane"
    assert items["Prefect"]["ok"] is True
    assert items["history"]["ok"] is True
    assert "`rlhf up` starts" in items["Prefect"]["found"]
    assert items["services"]["ok"] is True, "they are optional"
    assert not load_site().home.exists(), "looking changes nothing"
    told = rlhf("doctor", code=1).stdout.count("rlhf-flows[training]")
    assert told == 1, "one command installs all missing packages"


def items_of_doctor(rlhf: Rlhf) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in rlhf("doctor", "--json", code=1).json()}


def test_doctor_finds_a_full_disk(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.gather_facts, "inspect_disk", lambda folder: Disk(folder, free_bytes=5 << 20))
    items = items_of_doctor(rlhf)
    assert not any(items[name]["ok"] for name in ("run directories", "home folder", "history"))
    assert "free some space, or set RLHF_RUNS" in items["run directories"]["advice"]
    assert "free some space, or set RLHF_HOME" in items["home folder"]["advice"]
    assert "history.db can hardly grow: its disk has 5.0 MiB free" in items["history"]["found"]


@pytest.mark.parametrize(
    ("disk", "ok"),
    [
        (Disk(Path(), free_bytes=101 << 20), False),
        (Disk(Path(), free_bytes=10 << 30, total_bytes=100 << 30), True),
        (Disk(Path(), free_bytes=10 << 30, total_bytes=1 << 40), False),
        (Disk(Path(), free_bytes=1 << 40, total_bytes=100 << 40), True),
        (Disk(Path(), free_bytes=1 << 40, total_bytes=2 << 40, free_files=50, total_files=100), False),
        (Disk(Path(), free_bytes=1 << 40, total_bytes=2 << 40, free_files=50_000, total_files=10**8), False),
        (Disk(Path(), free_bytes=1 << 40, total_bytes=2 << 40, free_files=2 * 10**6, total_files=10**8), True),
    ],
)
def test_doctor_knows_how_much_of_a_disk_is_little(disk: Disk, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.gather_facts, "inspect_disk", lambda folder: disk)
    found = doctor._folder("run directories", Path("/runs"), "RLHF_RUNS")
    assert found.ok is ok
    assert ("more files" in found.found) == (disk.free_files is not None)


def test_doctor_names_the_daemon_that_holds_the_lease(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_COMPUTE_PYTHON", "/nowhere/python")  # not looked at: this takes a second
    assert "site daemon" not in items_of_doctor(rlhf), "there is no history yet"
    site = load_site()
    with HistoryStore(site.database_url) as store:
        assert items_of_doctor(rlhf)["site daemon"]["found"] == f"none looks after {site.runs_dir}"
        assert not doctor._daemon(site, store, {"daemon": "running"}).ok, "it cannot get its lease"
        lease = take_lease(site, store)
        found = items_of_doctor(rlhf)["site daemon"]
        lease.release()
    assert found["ok"]
    assert f", process {os.getpid()}, since " in found["found"]


def test_doctor_asks_the_configured_server(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    def prefect() -> dict[str, Any]:
        return items_of_doctor(rlhf)["Prefect"]

    monkeypatch.setenv("RLHF_COMPUTE_PYTHON", "/nowhere/python")  # not looked at: this takes a second
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # its answer is an error
        address = f"http://127.0.0.1:{server.server_port}/api"
        monkeypatch.setenv("PREFECT_API_URL", address)
        server.timeout = 5.0
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert prefect()["ok"], "any answer is one"
    silent = prefect()
    assert (silent["ok"], f"{address} does not answer" in silent["found"]) == (False, True)
    assert "unset PREFECT_API_URL" in silent["advice"]
    monkeypatch.setattr("flows.server.proxies.status_of", lambda url, timeout_s: 502)
    assert not prefect()["ok"], "the answer of a proxy"
    monkeypatch.setenv("PREFECT_API_URL", own_url(load_site()))
    assert prefect()["advice"] == "`rlhf up` starts it"


def test_doctor_knows_the_services_of_the_site() -> None:
    up = dict.fromkeys(("server", "worker", "daemon"), "running")
    assert doctor._services("", up).ok
    assert "server of `rlhf up`" in doctor._prefect("", up, answers=False, is_own=False).found
    half = doctor._services("", {**up, "worker": "silent"})
    assert (half.ok, half.advice) == (False, "rlhf up")
    elsewhere = {**up, "server": "stopped"}
    assert doctor._services("http://elsewhere/api", elsewhere).ok
    assert not doctor._services("", elsewhere).ok


@pytest.mark.parametrize(("most", "is_enough"), [(97, True), (74, False), (None, None)])
def test_doctor_compares_the_connections_of_postgresql(most: int | None, is_enough: bool | None) -> None:
    """Before, controllers were started for which the server had no connection. SQLite has no limit."""
    site, store = load_site(), Mock(max_connections=lambda: most)
    assert site.prefect.max_runs == 50
    items = list(doctor._connections(site, store))
    assert [one.ok for one in items] == ([] if is_enough is None else [is_enough])
    assert all(("raise max_connections" in one.advice) is not is_enough for one in items)


def test_watching_in_lines_prints_each_entry_once(with_logs: RunDir) -> None:
    lines, view = watching.NewLines(), RunReader(with_logs).read()
    first, second = (
        TimelineIncident(with_logs, FakeAgent(with_logs, restart=restart).incident(FailureKind.HANG))
        for restart in (0, 1)
    )
    one = replace(view, timeline=replace(view.timeline, incidents=[first]))
    both = replace(view, timeline=replace(view.timeline, incidents=[first, second]))
    assert lines(one) == [*watching.timeline_lines(one), watching.headline(view)]
    assert lines(both) == watching.timeline_lines(both)[1:]
    assert lines(both) == []


def test_requests_are_not_filtered_like_runs(rlhf: Rlhf) -> None:
    answer = rlhf("runs", "--queued", "--owner", "ada", code=2)
    assert "expected --queued alone" in " ".join(answer.stderr.split())
    assert answer.stdout == ""
