"""Values that parse but fit no column, in every field of every file, on both databases."""

import copy
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from control_fakes import FakeAgent, FakeScheduler, make_run, only_scheduler
from history_tools import RunFiles, at, dump, events_of, new_sqlite, remove_run, run_sql, whole_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_reports import decision_of, incident_of
from process_tools import Rlhf
from pydantic import BaseModel

from rlhf_core.config.site import load_site
from rlhf_core.control.ingester import Ingester
from rlhf_core.errors import RlhfError
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas import checkpoint_files, checks, failures, journal, probe, reports, resources, stored_spec
from rlhf_core.schemas.attempts import AttemptState, RunState
from rlhf_core.schemas.base import LABEL_CHARACTERS, MESSAGE_CHARACTERS
from rlhf_core.schemas.journal import (
    AttemptMoved,
    AttemptPlanned,
    AttemptSubmitted,
    ChecksMade,
    ControllerStarted,
    DecisionMade,
    IncidentFound,
    PromotionMoved,
    RunMoved,
    TrialPlanned,
)
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.watchdog.ingest import rebuild, sync

HOSTILE: tuple[Any, ...] = (
    *(10**20, 2**63, 2**63 - 1, 2**31, 2**31 - 1, -(2**31) - 1, -1, 10**4299, None),
    *("", "a\x00b", "x" * 8_192, "\U0001f600" * 700, "x" * 70_000, "\x1b]52;c;AA\x07", "../../etc"),
    *("2026-03-01T12:00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2999-12-31T23:59:59Z"),
    *(-99999999999, "NaN", "Infinity", [[]], {"a\x00": "b\x00"}, {"x" * 8_192: 1.0}),
)
RAW = (b"1e400", b"NaN", b'"\\ud800"', b"9" * 5_000, b"[" * 300 + b"]" * 300)


def _leaves(value: Any, at_path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a document, including nested ones."""
    if at_path:
        yield at_path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _leaves(item, (*at_path, key))


def mutants(content: bytes) -> Iterator[bytes]:
    """A JSON document with each of its values replaced by each hostile value, and with hostile keys."""
    whole = json.loads(content)
    for path in _leaves(whole):
        for hostile in (*HOSTILE, *RAW):
            changed = copy.deepcopy(whole)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = "<hostile>" if isinstance(hostile, bytes) else hostile
            text = json.dumps(changed).encode()
            yield text.replace(b'"<hostile>"', hostile) if isinstance(hostile, bytes) else text
        if path and isinstance(path[-1], str):
            changed = copy.deepcopy(whole)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder |= dict.fromkeys(("a\x00b", "x" * 8_192, ""), holder[path[-1]])
            yield json.dumps(changed).encode()


def _hostile_run(runs: Path) -> RunFiles:
    """A whole run with all mutants of its files beside them."""
    found = whole_run(runs, "evil")
    first = found.dir.attempt(1).restart(1)
    appended = [found.dir.attempt(1).restart(0).metrics, first.events("n1"), first.telemetry("n2")]
    for path in appended:
        lines = path.read_bytes().splitlines()
        path.write_bytes(b"\n".join([*mutants(lines[0]), *lines]) + b"\n")
    found.dir.housekeeping.write_bytes(
        b"\n".join(mutants(b'{"time":"2026-03-01T12:00:00Z","kind":"k","message":"m","attempt":1,"data":{"a":"b"}}'))
        + b"\n"
    )
    for number, content in enumerate(mutants(first.agent_status("n1").read_bytes())):
        (first.agents / f"m{number}.json").write_bytes(content)
    for number, content in enumerate(mutants(found.dir.checkpoint(8).complete.read_bytes())):
        path = found.dir.checkpoint(1_000_000 + number).complete
        path.parent.mkdir()
        path.write_bytes(content)
    report = json.loads(found.dir.evaluation("after", "greedy").read_bytes())
    report["samples"] = report["samples"][:1]
    for number, content in enumerate(mutants(json.dumps(report).encode())):
        (found.dir.evaluations_dir / f"after-m{number}.json").write_bytes(content)
    incident, decision = (
        [*mutants(first.incident(0).read_bytes())],
        [*mutants(found.dir.attempt(1).restart(0).decision(0).read_bytes())],
    )
    for number in range(max(len(incident), len(decision))):
        restart = found.dir.attempt(1).restart(2 + number)
        restart.incidents_dir.mkdir(parents=True)
        for path, contents in ((restart.incident(0), incident), (restart.decision(0), decision)):
            if number < len(contents):
                path.write_bytes(contents[number])
    return found


@pytest.fixture(scope="module")
def hostile_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("hostile") / "runs"
    _hostile_run(runs)
    whole_run(runs)
    return runs


def _with_numbers_alike(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The row with all JSON numbers written as floats: PostgreSQL writes 1e20 in JSON as an integer."""
    return tuple(
        (name, json.dumps(json.loads(text, parse_int=float), sort_keys=True) if text[:1] in "[{" else text)
        for name, text in row
    )


_rows_of: dict[str, dict[str, list[Any]]] = {}


def test_every_hostile_value_is_stored_or_set_aside_alike_on_both_databases(
    store: HistoryStore, hostile_runs: Path
) -> None:
    report = rebuild(hostile_runs, store)
    assert report.failed == {}
    (evil,) = [run_id for run_id in report.runs if run_id.startswith("evil")]
    assert report.runs[evil].num_skipped > 1_000
    assert sync(RunDir.of(hostile_runs, evil), store).batches == 0, "nothing is left to be retried"
    set_aside = [event for event in events_of(store, evil) if event["kind"] == "set_aside"]
    assert {"metrics.jsonl", "events-n1.jsonl", "telemetry-n2.jsonl"} <= {Path(one["source"]).name for one in set_aside}
    assert {run["state"] for run in queries.list_runs(store)} == {"completed"}
    queries.show_run(store, evil)
    for view in ("run_goodput", "run_curve", "node_health", "node_figures", "node_imbalance", "run_step_time"):
        run_sql(store, f"SELECT * FROM {view}")
    rows = {
        name: [_with_numbers_alike(row) for row in found]
        for name, found in dump(store).items()
        if name not in ("goodput_cache", "ingest_offsets")
    }
    rows["events"] = [row for row in rows["events"] if dict(row)["kind"] != "'set_aside'"]
    for other, theirs in _rows_of.items():
        for name in rows:
            assert rows[name] == theirs[name], f"{name} differs from that of {other}"
    _rows_of[store.url.get_backend_name()] = rows


# ---------------------------------------------------------------------------------------------------------------------
# Files that are written once: the spec and the journal


TEXTS = (
    "",
    "a\x00b",
    "\x00" * 9_000,
    "x" * 8_192,
    "ü" * 2_000,
    "\U0001f600" * 9_000,
    "x" * 200_000,
    "\x1b[2J",
    "a\r\n# b",
)


def test_texts_of_any_length_and_character_keep_no_run_out_of_the_history(store: HistoryStore, tmp_path: Path) -> None:
    """Texts of owner, tags, config source, overrides, promoter and controller, from a form, an environment variable or
    a path."""
    runs = tmp_path / "runs"
    for number, text in enumerate(TEXTS):
        files = RunFiles(runs, created=number)
        content = json.loads(files.dir.spec.read_bytes())
        named = ("owner", "config_source", "package_version", "code_revision", "trial_of", "flow_run_id")
        content |= dict.fromkeys(named, text) | {"tags": [text, "b"], "overrides": [text]}
        files.dir.spec.write_text(json.dumps(content))
        for event in (
            ControllerStarted(controller=text, flow_run_id=text, flow_run_url=text),
            RunMoved(state=RunState.PREFLIGHT, cause=text),
            TrialPlanned(check_id=text, run_id=text),
            AttemptPlanned(placement=Placement(attempt=1, num_nodes=1, phases=(), excluded_nodes=(text,))),
            AttemptSubmitted(
                submission=Submission(attempt=1, scheduler=text, job_id="1", command=(text,), host=text, marker=text)
            ),
            AttemptMoved(attempt=1, state=AttemptState.RUNNING, cause=text),
            IncidentFound(
                incident=incident_of(
                    failures.FailureKind.HANG,
                    1,
                    0,
                    message=text,
                    seen_at=at(1),
                    **dict.fromkeys(("phase", "fingerprint", "evidence_dir", "collective"), text),
                    suspect_nodes=(text,),
                )
            ),
            DecisionMade(
                decision=decision_of(
                    failures.Action.STOP, reason=text, excluded_nodes=(text,), config_diff={text: text}
                )
            ),
            PromotionMoved(state="waiting", checkpoint_step=2**31 - 1, by=text, reason=text, path=text),
        ):
            files.journal(event, 5)
    report = rebuild(runs, store)
    assert report.failed == {}
    found = queries.list_runs(store, trials=True)
    assert len(found) == len(TEXTS)
    for one in found:
        shown = queries.show_run(store, one["run_id"])
        texts = [shown.run["owner"], *shown.run["tags"], shown.controllers[0]["controller"]]
        assert all("\x00" not in text and len(text) <= LABEL_CHARACTERS for text in texts)
        assert len(shown.run["message"]) <= MESSAGE_CHARACTERS


def test_no_field_of_a_record_is_without_bounds() -> None:
    """Every number, time and text that is stored has a type of ``schemas/base.py``; the others are in JSON columns or
    in no column."""
    free = {"SampleLine", "Inventory", "PartitionSettings", "EvaluationSample.prompt", "EvaluationSample.completion"}
    free |= {"EvaluationSample.answer", "Submission.command"}
    unbounded = []
    for module in (checkpoint_files, checks, failures, journal, probe, reports, resources, stored_spec):
        for name, schema in vars(module).items():
            is_record = (
                isinstance(schema, type) and issubclass(schema, BaseModel) and schema.__module__ == module.__name__
            )
            if not is_record or name in free:
                continue
            unbounded += [
                f"{name}.{field}"
                for field, info in schema.model_fields.items()
                if not info.metadata and f"{name}.{field}" not in free and _has_a_plain_part(info.annotation)
            ]
    assert unbounded == []


def _has_a_plain_part(annotation: Any) -> bool:
    """True if a type contains an unbounded one, also within a union or a tuple. Tables are in JSON columns."""
    if get_origin(annotation) in (Annotated, Literal, dict):
        return False
    return annotation in (int, str, datetime) or any(map(_has_a_plain_part, get_args(annotation)))


@given(st.text(max_size=600), st.integers(), st.datetimes() | st.floats())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_its_schema_takes_a_line_can_be_stored(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: int, moment: Any
) -> None:
    store = _hypothesis_store(tmp_path_factory)
    files = RunFiles(tmp_path_factory.mktemp("one") / "runs").created()
    restart = files.dir.attempt(1).restart(0)
    restart.root.mkdir(parents=True)
    line = {"step": number, "time": str(moment), "stage": "sft", "metrics": {text: number}}
    restart.metrics.write_text(json.dumps(line) + "\n")
    event = {"time": "2026-03-01T12:00:00Z", "kind": "file", "node": text, "message": text, "data": {text: [number]}}
    restart.events("n1").write_text(json.dumps(event) + "\n")
    remove_run(store, files.run_id)
    sync(files.dir, store)
    assert len(events_of(store, files.run_id)) >= 2


_stores: list[HistoryStore] = []


def _hypothesis_store(tmp_path_factory: pytest.TempPathFactory) -> HistoryStore:
    if not _stores:
        _stores.append(HistoryStore(new_sqlite(tmp_path_factory.mktemp("history"))))
    return _stores[0]


# ---------------------------------------------------------------------------------------------------------------------
# A hostile run beside healthy ones, through the commands


LINES: Sequence[bytes] = (
    b'{"step": 100000000000000000000, "time": "2026-03-01T12:00:00Z", "stage": "grpo", "metrics": {}}',
    b'{"step": 3, "time": "2026-03-01T12:00:00", "stage": "grpo", "metrics": {"a": 1.0}}',
    b'{"step": 3, "time": "2026-03-01T12:00:00Z", "stage": "grpo", "metrics": {"a\\u0000b": 1.0}}',
    b'{"step": 2147483648, "time": "2026-03-01T12:00:00Z", "stage": "grpo", "metrics": {"a": 1.0}}',
    b'{"step": 3, "time": "0001-01-01T00:00:00+14:00", "stage": "grpo", "metrics": {"a": 1.0}}',
)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    return only_scheduler(monkeypatch)


def begun(scheduler: FakeScheduler) -> RunDir:
    """Run whose job is running and whose controller is gone."""
    run_dir = make_run(load_site().runs_dir)
    ledger = Journal(run_dir, token=0)
    for run_state in (RunState.PREFLIGHT, RunState.QUEUED):
        ledger.move_run(run_state, "")
    placement = Placement(attempt=1, num_nodes=1, phases=())
    ledger.append(AttemptPlanned(placement=placement))
    job = Submission(attempt=1, scheduler="local", job_id="101", command=("x",))
    ledger.append(AttemptSubmitted(submission=job))
    for state in (AttemptState.SUBMITTED, AttemptState.RUNNING):
        ledger.move_attempt(1, state, "")
    ledger.move_run(RunState.TRAINING, "")
    ledger.append(ChecksMade(results=()))
    ledger.close()
    agent = FakeAgent(run_dir)
    agent.begin()
    agent.step(1)
    return run_dir


def poison(run_dir: RunDir) -> None:
    """Insert lines that parse and cannot be stored into the middle of the run's own lines."""
    path = run_dir.attempt(1).restart(0).metrics
    with path.open("ab") as file:
        file.write(b"\n".join(LINES) + b"\n")
    FakeAgent(run_dir).step(2)
    events = run_dir.attempt(1).restart(0).events("n9")
    events.write_bytes(b'{"time": "2026-03-01T12:00:00", "kind": "file", "node": "n9", "message": "m"}\n')


def test_hostile_lines_stop_neither_their_run_nor_any_command(rlhf: Rlhf, scheduler: FakeScheduler) -> None:
    hostile, healthy = begun(scheduler), begun(scheduler)
    poison(hostile)
    site = load_site()
    with HistoryStore(site.database_url) as store:
        messages: list[str] = []
        ingester = Ingester(site, store, messages.append)
        assert ingester.ingest() == 2
        assert (ingester.ingest(), messages) == (0, [])
        for run_dir, last in ((hostile, 2), (healthy, 1)):
            assert queries.show_run(store, run_dir.run_id).metrics["train/loss"]["step"] == last
        set_aside = [one for one in events_of(store, hostile.run_id) if one["kind"] == "set_aside"]
    assert sorted(Path(one["source"]).name for one in set_aside) == ["events-n9.jsonl", "metrics.jsonl"]
    assert "5 lines were left out, the first at byte" in set_aside[1]["message"] + set_aside[0]["message"]
    for run_dir in (hostile, healthy):
        rlhf("show", run_dir.run_id)
    rlhf("db", "rebuild")
    rlhf("cancel", hostile.run_id)
    assert read_record(hostile).state is RunState.CANCELLED
    scheduler.on_submit = lambda request: FakeAgent(hostile, request.placement.attempt).whole_run()
    rlhf("resume", hostile.run_id, "--no-prefect")
    assert read_record(hostile).state is RunState.COMPLETED
    rlhf("report", hostile.run_id)


def test_without_bounds_such_a_line_ends_its_reader(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the former behaviour, with a schema that accepts any number and a store without a safety net."""
    hostile = begun(scheduler)
    with HistoryStore(load_site().database_url) as store:
        monkeypatch.setattr(reports.MetricsLine, "model_validate_json", _boundless)
        monkeypatch.setattr("rlhf_core.history.store.HistoryError", RuntimeError)
        with pytest.raises(RuntimeError, match="OverflowError"):
            sync(hostile, store)


def _boundless(text: bytes) -> Any:
    return reports.MetricsLine.model_construct(**{**json.loads(text), "time": at(1), "step": 10**20})


def test_what_slips_through_fails_its_run_alone(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The safety net below the schemas: a schema without a bound must not cost all other runs their reader."""
    hostile, healthy = begun(scheduler), begun(scheduler)
    site = load_site()
    with HistoryStore(site.database_url) as store:
        sync(healthy, store)
        with monkeypatch.context() as patch:
            patch.setattr(reports.MetricsLine, "model_validate_json", _boundless)
            with pytest.raises(RlhfError, match="cannot be stored: OverflowError"):
                sync(hostile, store)
            assert rebuild(site.runs_dir, store).failed.keys() == {hostile.run_id, healthy.run_id}
        assert rebuild(site.runs_dir, store).failed == {}


def test_a_run_is_ended_without_a_history(scheduler: FakeScheduler, rlhf: Rlhf) -> None:
    run_dir = begun(scheduler)
    file = load_site().home / "history.db"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"this is no database, but somebody's letter" * 100)
    shown = rlhf("cancel", run_dir.run_id)
    assert scheduler.cancelled == ["101"]
    assert "is not a SQLite database" in shown.stderr
    assert "none of its jobs is running" in shown.stdout
    assert run_dir.cancel_request.exists(), "the next controller marks it"
    file.unlink()
    rlhf("cancel", run_dir.run_id)
    assert read_record(run_dir).state is RunState.CANCELLED
    rlhf("cancel", "sort-20260301-120000-ffffff", code=2)


def test_a_run_is_ended_whose_journal_cannot_be_read(rlhf: Rlhf, scheduler: FakeScheduler) -> None:
    run_dir = begun(scheduler)
    job = Submission(attempt=1, scheduler="local", job_id="101", command=("x",))
    run_dir.attempt(1).submission.write_text(job.model_dump_json())
    with run_dir.control.open("ab") as file:
        file.write(b'{"version": 1, "sequence": 99999999999999999999, "token": 1}\n')
    answer = rlhf("cancel", run_dir.run_id)
    assert scheduler.cancelled == ["101"]
    assert "the state of the run is unknown" in answer.stdout
