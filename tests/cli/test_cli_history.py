"""``rlhf runs``, ``show``, ``sql`` and ``db``: output as text and as JSON, and exit codes."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from history_tools import RunFiles, at, ingested, whole_run
from process_tools import Rlhf

from rlhf_core.cli.run_output import print_summary
from rlhf_core.config.site import load_site
from rlhf_core.control.views.summary import summarise
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import SCHEMA_REVISION, VIEWS, metadata
from rlhf_core.launch.lease import Owner
from rlhf_core.machine.accounts import account
from rlhf_core.render.summary import summary_markdown
from rlhf_core.schemas.attempts import PromotionState, RunState, StageName, StageState
from rlhf_core.schemas.command_trainer import STEPS_HINT
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import (
    AttemptPlanned,
    ControllerStarted,
    PromotionMoved,
    RunMoved,
    StageEnded,
    StageStarted,
)
from rlhf_core.schemas.resources import Placement


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def runs() -> Path:
    """The site's folder of run directories."""
    return load_site().runs_dir


@pytest.fixture
def known(runs: Path) -> RunFiles:
    """A whole run that is in the history."""
    return ingested(whole_run(runs))


def test_runs_of_a_new_site(rlhf: Rlhf) -> None:
    assert rlhf("runs").stdout == "No runs yet.\n"
    assert rlhf("runs", "--json").json() == []
    assert rlhf("runs", "--state", "failed").stdout == "No such runs.\n"


def test_a_cut_list_says_so(rlhf: Rlhf, runs: Path) -> None:
    for index in range(3):
        ingested(RunFiles(runs, tail=f"aaaaa{index}").created())
    assert rlhf("runs", "--limit", "2").stdout.endswith("These are the newest 2; --limit 4 lists more.\n")
    assert "newest" not in rlhf("runs", "--limit", "3").stdout
    assert len(rlhf("runs", "--limit", "2", "--json").json()) == 2


def test_the_days_before_a_resume_do_not_count_as_run_time(rlhf: Rlhf, runs: Path) -> None:
    run = RunFiles(runs).created()
    for state, seconds in ((RunState.PREFLIGHT, 1), (RunState.FAILED, 10), (RunState.PREFLIGHT, 172_810)):
        run.moved(state, seconds)
    run.moved(RunState.FAILED, 172_815)
    ingested(run)
    assert "│ 15 s │" in rlhf("runs").stdout
    shown = rlhf("show", run.run_id).stdout
    assert "│ 15 s │" in shown
    assert "Not counted: 48 h 00 min in which nothing drove the run." in shown


def test_runs_as_json(rlhf: Rlhf, known: RunFiles) -> None:
    (run,) = rlhf("runs", "--json").json()
    assert (run["run_id"], run["name"], run["state"], run["num_attempts"]) == (known.run_id, "sort", "completed", 2)
    assert run["created_at"] == "2026-03-01T12:00:00+00:00"
    assert rlhf("runs", "--json", "--state", "failed").json() == []
    assert len(rlhf("runs", "--json", "--name", "sort", "--limit", "1").json()) == 1


def test_runs_as_text(rlhf: Rlhf, known: RunFiles) -> None:
    lines = rlhf("runs").stdout.splitlines()
    assert [word.strip() for word in lines[2].split("│")] == [
        known.run_id,
        "completed",
        "2026-03-01 12:00:00",
        "55 s",
        "10/10",
        "2",
    ]
    assert max(map(len, lines)) <= 100


def test_steps_without_metrics_are_listed_in_every_view(rlhf: Rlhf, runs: Path) -> None:
    """A completed run without metrics for steps 6 to 8 and 10: their lines were lost."""
    run = whole_run(runs)
    metrics = run.dir.attempt(2).restart(0).metrics
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0] + lines[4])
    ingested(run)
    output = "no metrics of 4 of 10 steps: 6-8, 10"
    assert rlhf("runs").stdout.splitlines()[-1] == f"{run.run_id}: {output}"
    assert f"The run left {output}." in rlhf("show").stdout
    assert rlhf("runs", "--json").json()[0]["missing_steps"] == output
    assert rlhf("show", "--json").json()["run"]["missing_steps"] == output
    with HistoryStore(load_site().database_url) as store:
        from rlhf_core.render.gather import gather

        assert any(output in note for note in gather(store, run.dir).notes)


def test_steps_that_another_program_does_not_log_are_not_missing(rlhf: Rlhf, runs: Path) -> None:
    run = whole_run(runs)
    metrics = run.dir.attempt(2).restart(0).metrics
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[4:]))
    stored = json.loads(run.dir.spec.read_text())
    stored["spec"]["trainer"] = {"kind": "command", "argv": ["torchrun"], "num_steps": 10}
    stored["spec"]["loops"] = {}
    run.dir.spec.write_text(json.dumps(stored))
    ingested(run)
    assert rlhf("runs", "--json").json()[0]["missing_steps"] == ""
    assert rlhf("show", "--json").json()["run"]["missing_steps"] == ""


def test_a_trainer_without_steps_is_told_how_they_are_read(
    rlhf: Rlhf, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = whole_run(runs)
    stored = json.loads(run.dir.spec.read_text())
    stored["spec"] |= {"trainer": {"kind": "command", "argv": ["torchrun"], "num_steps": 10}, "loops": {}}
    run.dir.spec.write_text(json.dumps(stored))
    print_summary(run.dir, as_json=False)
    assert "trainer.stdout_patterns" not in capsys.readouterr().out
    for restart in run.dir.restarts():
        restart.metrics.unlink(missing_ok=True)
    print_summary(run.dir, as_json=False)
    summary = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "steps none reported, of 10; steps are read, with their metrics, from TensorBoard files" in summary
    assert STEPS_HINT in summary
    assert STEPS_HINT in summary_markdown(summarise(run.dir), read_timeline(run.dir), None, "").replace("\\", "")
    ingested(run)
    shown = rlhf("show").stdout
    assert f"The trainer reported no steps; {STEPS_HINT}." in " ".join(shown.split())


def test_runs_fit_a_narrow_terminal(rlhf: Rlhf, known: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = rlhf("runs").stdout.splitlines()
    assert len(lines) == 3
    assert known.run_id in lines[2]
    assert max(map(len, lines)) <= 80


def test_an_answer_that_is_too_wide_is_printed_line_by_line(
    rlhf: Rlhf, known: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    question = "SELECT run_id, state, owner, run_id AS the_same FROM runs"
    assert rlhf("sql", question).stdout.splitlines() == [
        f"run_id    {known.run_id}",
        "state     completed",
        "owner     anna",
        f"the_same  {known.run_id}",
    ]
    monkeypatch.setenv("COLUMNS", "100")
    assert "┃" in rlhf("sql", question).stdout


def test_the_reasons_for_excluded_nodes_are_shown(rlhf: Rlhf, known: RunFiles) -> None:
    assert "excluded" not in rlhf("show").stdout
    known.journal(AttemptPlanned(placement=Placement(attempt=7, num_nodes=1, phases=(),
                                                     exclusion_reasons={"node7": "3 strikes"})), 60)  # fmt: skip
    assert "Attempt 7 excluded node7: 3 strikes\n" in rlhf("show").stdout


def test_the_driver_of_a_run_and_the_promotion_of_its_model_are_shown(rlhf: Rlhf, known: RunFiles) -> None:
    assert rlhf("show", "--json").json()["promotion"] == {}
    assert "Promotion" not in rlhf("show").stdout
    for process, page in ((1, "http://prefect/1"), (2, "")):
        controller = f"anna, login-1, process {process}"
        known.journal(ControllerStarted(controller=controller, flow_run_url=page), 60 + process)
    known.journal(PromotionMoved(state=PromotionState.WAITING, checkpoint_step=10), 70)
    known.journal(PromotionMoved(state=PromotionState.APPROVED, checkpoint_step=10, by="bert", reason="it sorts"), 80)
    text = rlhf("show").stdout
    assert "Driven by: anna, login-1, process 2, after 1 other\n" in text
    assert "In Prefect: http://prefect/1\n" in text
    assert "Promotion: approved, checkpoint of step 10, by bert (it sorts)\n" in text
    shown = rlhf("show", "--json").json()
    assert [one["controller"][-1] for one in shown["controllers"]] == ["1", "2"]
    assert (shown["promotion"]["state"], shown["promotion"]["decided_by"]) == ("approved", "bert")


def test_a_run_is_driven_since_its_controller_took_it(rlhf: Rlhf, known: RunFiles) -> None:
    """The controller's process was there before: the worker of a deployment, or the command that made the run."""
    owner = Owner("anna", "login-1", 7, at(-90).timestamp())
    known.journal(ControllerStarted(controller=str(owner)), 60)
    text = rlhf("show").stdout
    assert "Created: 2026-03-01 12:00:00 UTC" in text
    assert "Driven by: anna on login-1, process 7, since 2026-03-01 12:01:00 UTC\n" in text


def test_trials_are_listed_on_request(rlhf: Rlhf, runs: Path, known: RunFiles) -> None:
    trial = ingested(RunFiles(runs, "sort", "bbbbbb", 100, trial_of=known.run_id).created())
    assert trial.run_id not in rlhf("runs").stdout
    lines = rlhf("runs", "--trials").stdout.splitlines()
    assert trial.run_id in lines[2]
    assert [word.strip() for word in lines[2].split("│")][2] == known.run_id
    assert f"Trial of: {known.run_id}" in rlhf("show", trial.run_id).stdout


def test_an_unknown_state_is_bad_input(rlhf: Rlhf) -> None:
    rlhf("runs", "--state", "sleeping", code=2)


def test_show_as_json(rlhf: Rlhf, known: RunFiles) -> None:
    shown = rlhf("show", "sort", "--json").json()
    assert {
        *("run", "stages", "checks", "attempts", "restarts", "incidents", "decisions", "checkpoints", "evaluations"),
    } <= shown.keys()
    assert shown["run"]["run_id"] == known.run_id


def test_show_as_text(rlhf: Rlhf, known: RunFiles) -> None:
    text = rlhf("show").stdout
    assert not [line for line in text.splitlines() if "│" in line and len(line) > 100], (
        "sentences are the terminal's to wrap"
    )
    for expected in (
        "exact match went from 0.75 to 0.93",
        "node n2 was lost",
        "3 GiB free",
        "worker killed (attempt 1; step 4; rollout; rank 1, n2)",
        "-> restart in place (by the agent): one restart is left",
        "0.750 [0.700, 0.800]",
        "+0.180",
        "checkpoints/step-000010",
        "train/loss",
        "Productive training: 20 s (38% of the time outside of queues).",
        "Lost to node lost: 14 s in 1 incident.",
    ):
        assert expected in text, expected
    assert "batch.divides_ranks" not in text, "a check that passed is no finding"


def test_show_of_a_new_run(rlhf: Rlhf, runs: Path) -> None:
    ingested(RunFiles(runs).created())
    shown = rlhf("show")
    assert "pending" in shown.stdout
    assert "Stages" not in shown.stdout


def test_show_says_once_why_a_run_failed(rlhf: Rlhf, runs: Path) -> None:
    run, why = RunFiles(runs).created(), "5 checks block the run:\n  the first of them"
    run.journal(StageStarted(stage_index=0, name=StageName.PREFLIGHT, attempt=0), 1)
    run.journal(StageEnded(stage_index=0, state=StageState.FAILED, message=why), 2)
    run.journal(RunMoved(state=RunState.FAILED, cause=why), 2)
    ingested(run)
    assert rlhf("show").stdout.count("the first of them") == 1


def test_show_of_a_run_that_failed_before_its_first_step(rlhf: Rlhf, runs: Path) -> None:
    run = RunFiles(runs).created()
    run.planned(1, 2)
    run.incident(1, 0, FailureKind.WORKER_KILLED, 12, step=0)
    run.moved(RunState.FAILED, 20)
    ingested(run)
    shown = rlhf("show").stdout
    assert "Lost to worker killed: 18 s in 1 incident." in shown
    assert "Productive training" not in shown


def test_show_ingests_lines_left_by_a_killed_controller(rlhf: Rlhf, known: RunFiles) -> None:
    known.metrics(2, 0, 11, 60)
    assert rlhf("show", "--json").json()["metrics"]["train/loss"]["step"] == 11


def test_show_reports_a_failed_ingestion(rlhf: Rlhf, known: RunFiles) -> None:
    known.moved(RunState.QUEUED, 60)
    answer = rlhf("show")
    assert "could not be updated" in answer.stderr
    assert "cannot become queued" in " ".join(answer.stderr.split())


def test_show_without_the_run_directory(rlhf: Rlhf, known: RunFiles) -> None:
    shutil.rmtree(known.dir.root)
    assert rlhf("show", "--json").json()["run"]["state"] == "completed"


def test_show_of_an_unknown_run(rlhf: Rlhf, known: RunFiles) -> None:
    answer = rlhf("show", "nothing", code=2)
    assert answer.stdout == ""
    assert answer.stderr == "error: the history has no run 'nothing'. `rlhf runs` lists them; `last` is the newest.\n"


def test_nodes_of_a_new_site(rlhf: Rlhf) -> None:
    assert rlhf("nodes", "--json").json() == []
    assert "No node has strikes" in rlhf("nodes").stdout


def test_a_node_is_cleared_with_user_and_reason(rlhf: Rlhf, known: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.schemas.base.utc_now", lambda: at(3600))
    before = rlhf("nodes", "--json").json()
    assert [one["node"] for one in before if one["excluded_until"]] == ["n2"]
    rlhf("nodes", "--clear", "n2", code=2)
    rlhf("nodes", "--reason", "why", code=2)
    assert rlhf("nodes", "--json").json() == before, "nothing was written"
    output = rlhf("nodes", "--clear", "n2", "--reason", "new cable", "--by", "bea").stdout
    assert "n2 is cleared (1 strike, " in output
    assert f"by bea ({account()}): new cable" in output
    (node,) = [one for one in rlhf("nodes", "--json").json() if one["node"] == "n2"]
    assert (node["excluded_until"], node["num_strikes"], node["num_cleared"]) == (None, 0, 1)
    assert (node["cleared"]["by"], node["cleared"]["reason"]) == (f"bea ({account()})", "new cable")
    table = " ".join(rlhf("nodes").stdout.replace("│", " ").split())
    assert f"bea ({account()}): new cable" in table
    assert rlhf("sql", "SELECT node FROM node_strikes", "--json").json() != [], "the history keeps it"


def test_sql_as_text_and_json(rlhf: Rlhf, known: RunFiles) -> None:
    question = "SELECT number, state FROM attempts ORDER BY number"
    assert rlhf("sql", question, "--json").json() == [
        {"number": 1, "state": "failed"},
        {"number": 2, "state": "completed"},
    ]
    assert "completed" in rlhf("sql", question).stdout


def test_sql_refuses_json_with_two_columns_of_one_name(rlhf: Rlhf, known: RunFiles) -> None:
    """The state of the attempt would replace that of the run. Control: a table shows both."""
    question = "SELECT runs.state, attempts.state FROM runs JOIN attempts USING (run_id)"
    refused = rlhf("sql", question, "--json", code=2)
    assert refused.stdout == ""
    assert "several columns named state" in refused.stderr
    assert "completed" in rlhf("sql", question).stdout


def test_sql_reports_further_rows(rlhf: Rlhf, known: RunFiles) -> None:
    limited = rlhf("sql", "SELECT step FROM run_curve", "--limit", "3", "--json")
    assert len(limited.json()) == 3
    assert "only the first 3 rows" in limited.stderr
    everything = rlhf(
        "sql", "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 2000) SELECT x FROM n", "--json"
    )
    assert len(everything.json()) == 2000


@pytest.mark.parametrize("statement", ["DROP TABLE runs", "INSERT INTO metric_keys (name) VALUES ('x')", "SELEC"])
def test_sql_that_is_refused(rlhf: Rlhf, known: RunFiles, statement: str) -> None:
    answer = rlhf("sql", statement, code=2)
    assert answer.stdout == ""
    assert answer.stderr.startswith("error: ")
    assert len(rlhf("runs", "--json").json()) == 1


def test_sql_help_names_every_table(rlhf: Rlhf) -> None:
    text = rlhf("sql", "--help").stdout
    for name in (*metadata.tables, *VIEWS):
        assert name in text or name in ("leases", "ingest_offsets"), name


def test_metrics_of_old_runs_are_removed_and_every_view_says_so(rlhf: Rlhf, runs: Path) -> None:
    run, long_ago = RunFiles(runs).created(), -1_000_000_000.0
    for state in (RunState.PREFLIGHT, RunState.FAILED):
        run.moved(state, long_ago)
    run.metrics(1, 0, 1, long_ago)
    known = ingested(whole_run(runs, tail="bbbbbb"))
    ingested(run)
    planned = rlhf("db", "prune", "--days", "30", "--dry-run")
    assert "To remove: 1 metric value and 0 telemetry readings of 1 run that ended before" in planned.stdout
    assert "Nothing was removed" in planned.stdout
    assert not rlhf("show", run.run_id, "--json").json()["run"]["metrics_pruned"]
    removed = rlhf("db", "prune", "--days", "30", "--json").json()
    assert removed["removed"] is True
    assert [(one["run_id"], one["num_metrics"]) for one in removed["runs"]] == [(run.run_id, 1)]
    assert "removed with `rlhf db prune`" in rlhf("show", run.run_id).stdout
    assert "removed of A with `rlhf db prune`" in rlhf("compare", run.run_id, known.run_id).stdout
    assert "removed with `rlhf db prune`" in rlhf("export", run.run_id, "--to", "csv", "--out", runs / "csv").stderr
    rlhf("report", run.run_id)
    assert "removed with `rlhf db prune`" in run.dir.report.read_text()
    assert "To remove: 0 metric values" in rlhf("db", "prune", "--days", "30").stdout
    assert rlhf("db", "prune", "--days", "7", code=2).stderr
    rlhf("db", "rebuild")
    assert not rlhf("show", run.run_id, "--json").json()["run"]["metrics_pruned"]


@pytest.mark.usefixtures("real_migrations")
def test_upgrade(rlhf: Rlhf) -> None:
    assert f"upgraded from nothing to schema {SCHEMA_REVISION}" in rlhf("db", "upgrade").stdout
    assert f"is up to date (schema {SCHEMA_REVISION})" in rlhf("db", "upgrade").stdout


def test_the_script_of_the_reading_role_names_the_owner_of_the_tables(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite = rlhf("db", "reader", code=2)
    assert sqlite.stdout == ""
    assert "has no roles" in " ".join(sqlite.stderr.split())
    monkeypatch.setenv("RLHF_DATABASE_URL", "postgresql://o'hara@localhost/history")
    assert rlhf("db", "reader").stdout.startswith(r"\set owner 'o\'hara'")
    assert rlhf("db", "reader", "--owner", "site").stdout.splitlines()[0] == r"\set owner 'site'"


def test_a_database_of_something_else(rlhf: Rlhf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE experiments (id INTEGER)")
    connection.close()
    monkeypatch.setenv("RLHF_DATABASE_URL", f"sqlite:///{tmp_path}/other.db")
    for command in (("runs",), ("db", "upgrade"), ("db", "rebuild")):
        answer = rlhf(*command, code=1)
        expected = "is not a history of rlhf-flows: it contains other tables (experiments)"
        assert expected in " ".join(answer.stderr.split())


def test_rebuild_of_a_lost_database(rlhf: Rlhf, known: RunFiles) -> None:
    before = rlhf("show", "--json").json()
    home = load_site().home
    for path in home.glob("history.db*"):
        path.unlink()
    answer = rlhf("db", "rebuild")
    assert answer.stdout == f"1 run rebuilt from {load_site().runs_dir}.\n"
    assert rlhf("show", "--json").json() == before


def test_rebuild_reports_failures(rlhf: Rlhf, known: RunFiles, runs: Path) -> None:
    broken = RunFiles(runs, "broken", "eeeeee", 400).created()
    broken.moved(RunState.COMPLETED, 1)
    with known.dir.attempt(1).restart(0).metrics.open("ab") as file:
        file.write(b"torn\n")
    answer = rlhf("db", "rebuild", "--json", code=1)
    report = answer.json()
    assert (report["rebuilt"], report["kept"]) == ([known.run_id], [])
    assert "cannot become completed" in report["failed"][broken.run_id]
    assert "1 line could not be read, the first in attempts/1/restarts/0/metrics.jsonl" in " ".join(
        answer.stderr.split()
    )


def test_rebuild_keeps_runs_without_a_directory(rlhf: Rlhf, known: RunFiles) -> None:
    shutil.rmtree(known.dir.root)
    assert "1 run without a readable directory there left" in " ".join(rlhf("db", "rebuild").stdout.split())
    assert len(rlhf("runs", "--json").json()) == 1
