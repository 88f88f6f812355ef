"""``rlhf export``: the content of each format, read back with the reader of the target program."""

import csv
import errno
import json
import math
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from history_tools import RunFiles, at, ingested, postgres, synced, whole_run
from process_tools import Rlhf
from tracker_readers import scalars, wandb_history, wandb_records

from rlhf_core.cli.main import execute
from rlhf_core.config.loading import load
from rlhf_core.config.site import load_site
from rlhf_core.files.whole import write_model
from rlhf_core.history.queries import evaluation_samples
from rlhf_core.history.queries.exports import curve_points, reading_tables
from rlhf_core.history.store import HistoryStore
from rlhf_core.machine.installation import pip_install
from rlhf_core.render.exports import destination
from rlhf_core.schemas.attempts import PromotionState, RunState
from rlhf_core.schemas.journal import PromotionMoved
from rlhf_core.schemas.stored_spec import StoredSpec

pytestmark = pytest.mark.usefixtures("plots_drawn_once")

# The loss that RunFiles writes is 1 / step + attempt + restart / 10. Of the whole run, steps 1 and 2 of the first start
# count, steps 3 and 4 of the second start, and steps 5 to 10 of the second attempt.
LOSS = {1: 2.0, 2: 1.5, 3: 1 / 3 + 1.1, 4: 1.35, **{step: 1 / step + 2 for step in range(5, 11)}}
ENDS = {1: 10, 2: 12, 3: 22, 4: 24, **{step: 30 + 2 * step for step in range(5, 11)}}


@pytest.fixture
def run() -> RunFiles:
    """A whole run with two rewinds, known to the history."""
    return ingested(whole_run(load_site().runs_dir))


@pytest.fixture(scope="module")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow database without a run: creating it takes MLflow longer than most of these tests."""
    folder = tmp_path_factory.mktemp("mlflow")
    _mlflow(folder).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def mlflow_database(mlflow_template: Path, tmp_path: Path) -> None:
    shutil.copyfile(mlflow_template, tmp_path / "mlflow.db")


def export(to: str, out: Path | str, *runs: str) -> None:
    """Run the command and check that it succeeds."""
    assert execute(["export", *(runs or ("last",)), "--to", to, "--out", str(out)]) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def test_csv(run: RunFiles, tmp_path: Path) -> None:
    export("csv", tmp_path / "out")
    tables = {path.stem: list(csv.DictReader(path.open(newline=""))) for path in (tmp_path / "out").glob("*.csv")}
    curve = [row for row in tables["run_curve"] if row["key"] == "train/loss"]
    assert {int(row["step"]): float(row["value"]) for row in curve} == pytest.approx(LOSS)
    assert [datetime.fromisoformat(row["time"]) for row in curve] == [at(ENDS[step]) for step in LOSS]
    assert (
        len([row for row in tables["metrics"] if row["key"] == "train/loss"]) == 13
    )  # all steps, including those made again
    assert [row["failure_kind"] for row in tables["incidents"]] == ["worker_killed", "node_lost"]
    assert json.loads(tables["runs"][0]["spec"])["name"] == "sort"
    assert (tables["runs"][0]["started_at"] != "", tables["promotions"]) == (True, [])
    assert {"leases", "ingest_offsets", "goodput_cache"} & tables.keys() == set()


def test_parquet(run: RunFiles, tmp_path: Path) -> None:
    from pyarrow import parquet

    export("parquet", tmp_path)
    curve = parquet.read_table(tmp_path / "run_curve.parquet").to_pylist()
    assert {row["step"]: row["value"] for row in curve if row["key"] == "train/loss"} == pytest.approx(LOSS)
    times = {row["step"]: row["time"] for row in curve}
    assert times == {step: at(ends).astimezone(UTC) for step, ends in ENDS.items()}
    (goodput,) = parquet.read_table(tmp_path / "run_goodput.parquet").to_pylist()
    assert (goodput["productive_s"], goodput["repeated_s"]) == (20.0, 6.0)
    assert parquet.read_table(tmp_path / "promotions.parquet").num_rows == 0
    assert json.loads(parquet.read_table(tmp_path / "runs.parquet").to_pylist()[0]["spec"])["seed"] == 7
    assert list(tmp_path.glob(".*")) == []


def test_parquet_of_postgresql_is_the_same(run: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import parquet

    export("parquet", tmp_path / "sqlite")
    url = postgres().migrated_database()
    with HistoryStore(url) as store:
        synced(run, store)
    monkeypatch.setenv("RLHF_DATABASE_URL", url)
    export("parquet", tmp_path / "postgresql")
    stamped = {"runs", "run_goodput", "run_lost_time"}  # the time of ingestion; sums in another order
    for path in sorted((tmp_path / "sqlite").glob("*.parquet")):
        other = parquet.read_table(tmp_path / "postgresql" / path.name)
        assert other.schema.equals(parquet.read_table(path).schema), path.name
        if path.stem not in stamped:
            rows, others = (
                sorted(json.dumps(_loaded(row), sort_keys=True, default=str) for row in table.to_pylist())
                for table in (parquet.read_table(path), other)
            )
            assert rows == others, path.name


def _loaded(row: dict[str, Any]) -> dict[str, Any]:
    """Row with its JSON parsed: PostgreSQL does not keep the order of keys."""
    return {
        name: json.loads(value) if isinstance(value, str) and value[:1] in ("{", "[") else value
        for name, value in row.items()
    }


def test_only_the_requested_runs_are_exported(run: RunFiles, tmp_path: Path) -> None:
    runs = load_site().runs_dir
    others = [ingested(whole_run(runs, "other", tail, 10)) for tail in ("bbbbbb", "cccccc")]
    export("csv", tmp_path, run.run_id, others[0].run_id, others[0].run_id)
    for path in tmp_path.glob("*.csv"):
        found = {row["run_id"] for row in csv.DictReader(path.open(newline=""))}
        assert found == {run.run_id, others[0].run_id} or (not found and path.stem != "runs"), path.name


def test_only_one_batch_is_in_memory(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.history.queries.exports.BATCH_ROWS", 10)
    with HistoryStore(load_site().database_url) as store, reading_tables(store, [run.run_id]) as tables:
        metrics = next(table for table in tables if table.name == "metrics")
        assert [len(batch) for batch in metrics.batches()] == [10, 10, 6]


# ---------------------------------------------------------------------------------------------------------------------
# TensorBoard


def test_tensorboard(run: RunFiles, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export("tensorboard", out)
    export("tensorboard", out)  # again: replaced, not doubled
    shown = scalars(out / run.run_id)
    assert [step for step, _, _ in shown["train/loss"]] == list(LOSS)
    assert {step: value for step, value, _ in shown["train/loss"]} == pytest.approx(LOSS)
    assert [wall for _, _, wall in shown["train/loss"]] == [at(ENDS[step]).timestamp() for step in LOSS]
    assert shown["evaluation/after/greedy"] == [(10, pytest.approx(0.93), at(52).timestamp())]
    assert shown["evaluation/before/greedy"][0][0] == 2
    assert [path.name for path in out.iterdir()] == [run.run_id]


def test_nan_and_infinity_reach_tensorboard(run: RunFiles, tmp_path: Path) -> None:
    run.metrics(2, 0, 11, 60, **{"reward/mean": math.nan})
    export("tensorboard", tmp_path)
    ((step, value, _),) = scalars(tmp_path / run.run_id)["reward/mean"]
    assert step == 11
    assert math.isnan(value)


# ---------------------------------------------------------------------------------------------------------------------
# MLflow


def _mlflow(folder: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")


def _mlflow_runs(folder: Path) -> list[Any]:
    client = _mlflow(folder)
    return list(client.search_runs([client.get_experiment_by_name("sort").experiment_id]))


def test_mlflow(run: RunFiles, tmp_path: Path) -> None:
    export("mlflow", tmp_path)
    (found,) = _mlflow_runs(tmp_path)
    assert (found.info.run_name, found.info.status) == (run.run_id, "FINISHED")
    assert (found.info.start_time, found.info.end_time) == (at(0).timestamp() * 1000, at(55).timestamp() * 1000)
    assert (found.data.tags["rlhf.run_id"], found.data.tags["rlhf.owner"]) == (run.run_id, "anna")
    assert (found.data.params["loops.main.num_steps"], found.data.params["model.tokenizer"]) == ("8", "char")
    history = _mlflow(tmp_path).get_metric_history(found.info.run_id, "train/loss")
    assert {point.step: point.value for point in history} == pytest.approx(LOSS)
    assert {point.step: point.timestamp for point in history} == {
        step: at(ends).timestamp() * 1000 for step, ends in ENDS.items()
    }
    assert found.data.metrics["evaluation/after/greedy"] == 0.93
    assert found.data.metrics["evaluation/before/sampled_ci_low"] == 0.25


def _artifacts(client: Any, run_id: str, folder: str | None = None) -> list[str]:
    found = []
    for one in client.list_artifacts(run_id, folder):
        found += _artifacts(client, run_id, one.path) if one.is_dir else [one.path]
    return sorted(found)


@pytest.mark.usefixtures("mlflow_database")
def test_mlflow_has_the_expected_artifacts(run: RunFiles, tmp_path: Path) -> None:
    import mlflow

    model = tmp_path / "models" / run.run_id
    model.mkdir(parents=True)
    (model / "README.md").write_text("# sort\n")
    (model / "rlhf.json").write_text('{"run_id": "x"}')
    (model / "model.safetensors").write_bytes(b"weights")
    for number, state in enumerate((PromotionState.WAITING, PromotionState.APPROVED, PromotionState.PROMOTED)):
        path = str(model) if state is PromotionState.PROMOTED else ""
        event = PromotionMoved(state=state, checkpoint_step=10, by="bea", reason="good", path=path)
        run.journal(event, 60 + number)
    export("mlflow", tmp_path)
    export("mlflow", tmp_path)  # again: replaced, not doubled
    (found,) = _mlflow_runs(tmp_path)
    client = _mlflow(tmp_path)
    assert _artifacts(client, found.info.run_id) == [
        "config/config.toml",
        "config/spec.json",
        "evaluation/after_greedy.json",
        "evaluation/after_sampled.json",
        "evaluation/before_greedy.json",
        "evaluation/before_sampled.json",
        "model_card/README.md",
        "model_card/rlhf.json",
        "report.html",
    ]

    def read(path: str) -> str:
        place = client.download_artifacts(found.info.run_id, path, str(tmp_path))
        return Path(place).read_text(encoding="utf-8")

    assert "was promoted" in read("report.html")
    toml = tmp_path / "again.toml"
    toml.write_text(read("config/config.toml"))
    assert load(toml).model_dump(mode="json") == json.loads(read("config/spec.json"))
    assert read("model_card/README.md") == "# sort\n"
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")  # this client is not the only one used
    try:
        table = client.load_table(found.info.experiment_id, "evaluation/after_greedy.json", [found.info.run_id])
    finally:
        mlflow.set_tracking_uri("")
    with HistoryStore(load_site().database_url) as store:
        rows = evaluation_samples(store, run.run_id, "after", "greedy")
    assert len(table) == len(rows) > 0
    assert list(table["completion"]) == [row["completion"] for row in rows]
    assert list(table["score"]) == [row["score"] for row in rows]


@pytest.mark.usefixtures("mlflow_database")
def test_mlflow_without_artifacts(run: RunFiles, tmp_path: Path) -> None:
    assert execute(["export", "last", "--to", "mlflow", "--out", str(tmp_path), "--no-artifacts"]) == 0
    (found,) = _mlflow_runs(tmp_path)
    assert _artifacts(_mlflow(tmp_path), found.info.run_id) == []
    assert found.data.metrics["evaluation/after/greedy"] == 0.93


@pytest.mark.usefixtures("mlflow_database")
def test_artifacts_that_cannot_be_stored_are_reported_and_the_metrics_exported(
    run: RunFiles, tmp_path: Path, rlhf: Rlhf
) -> None:
    (tmp_path / "artifacts").write_text("not a folder")
    output = rlhf("export", "last", "--to", "mlflow", "--out", str(tmp_path), code=2).stderr
    assert "the numbers of" in output
    assert "--no-artifacts" in output
    (found,) = _mlflow_runs(tmp_path)
    assert found.data.metrics["evaluation/after/greedy"] == 0.93


@pytest.mark.usefixtures("mlflow_database")
def test_a_deleted_experiment_is_reported(run: RunFiles, tmp_path: Path, rlhf: Rlhf) -> None:
    client = _mlflow(tmp_path)
    client.delete_experiment(client.create_experiment("sort"))
    answer = rlhf("export", "last", "--to", "mlflow", "--out", str(tmp_path), "--no-artifacts", code=2)
    assert "a deleted experiment can be restored" in answer.stderr


def _run_of(num_steps: int) -> RunFiles:
    """A run that has made some steps and has not ended."""
    run = RunFiles(load_site().runs_dir).created()
    run.moved(RunState.PREFLIGHT, 1)
    for step in range(1, num_steps + 1):
        run.metrics(1, 0, step, 10 * step)
    return ingested(run)


@pytest.mark.usefixtures("mlflow_database")
def test_exporting_again_to_mlflow_adds_new_steps(tmp_path: Path) -> None:
    run = _run_of(2)
    export("mlflow", tmp_path, run.run_id)
    (first,) = _mlflow_runs(tmp_path)
    assert first.info.status == "RUNNING"
    run.metrics(1, 0, 3, 30, **{"reward/mean": math.nan, "train/grad_norm": math.inf})
    run.moved(RunState.FAILED, 40)
    export("mlflow", tmp_path, run.run_id)
    export("mlflow", tmp_path, run.run_id)
    (found,) = _mlflow_runs(tmp_path)
    assert (found.info.run_id, found.info.status) == (first.info.run_id, "FAILED")
    client = _mlflow(tmp_path)
    assert [point.step for point in client.get_metric_history(found.info.run_id, "train/loss")] == [1, 2, 3]
    (reward,) = client.get_metric_history(found.info.run_id, "reward/mean")
    assert math.isnan(reward.value)


@pytest.mark.usefixtures("mlflow_database")
def test_a_resumed_run_has_no_end_in_mlflow(tmp_path: Path) -> None:
    run = _run_of(2)
    run.moved(RunState.FAILED, 40)
    export("mlflow", tmp_path, run.run_id, "--no-artifacts")
    (ended,) = _mlflow_runs(tmp_path)
    assert ended.info.end_time == at(40).timestamp() * 1000
    run.moved(RunState.PREFLIGHT, 50)
    for _ in range(2):
        export("mlflow", tmp_path, run.run_id, "--no-artifacts")
    (resumed,) = _mlflow_runs(tmp_path)
    assert (resumed.info.status, resumed.info.end_time) == ("RUNNING", None)
    assert resumed.data.metrics == ended.data.metrics
    run.moved(RunState.FAILED, 60)
    export("mlflow", tmp_path, run.run_id, "--no-artifacts")
    (found,) = _mlflow_runs(tmp_path)
    assert (found.info.run_id, found.info.end_time) == (resumed.info.run_id, at(60).timestamp() * 1000)


@pytest.mark.usefixtures("mlflow_database")
def test_repeated_steps_replace_those_in_mlflow(tmp_path: Path) -> None:
    run = _run_of(3)
    export("mlflow", tmp_path, run.run_id)
    for step in (2, 3):  # back to step 1
        run.metrics(1, 1, step, 100 + 10 * step)
    export("mlflow", tmp_path, run.run_id)
    (found,) = _mlflow_runs(tmp_path)
    history = _mlflow(tmp_path).get_metric_history(found.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (2, 1.6), (3, pytest.approx(1 / 3 + 1.1))]


@pytest.mark.usefixtures("mlflow_database")
def test_metrics_with_unusual_names_reach_mlflow_without_mixing(tmp_path: Path) -> None:
    """External trainers name their metrics themselves, also in ways that MLflow refuses."""
    run = _run_of(0)
    names = ["/loss", "loss/", "trainer//loss", "trainer/./x", "../x", "gap [0]", "gap (0)", "gap _0_", "é" * 400]
    run.metrics(1, 0, 1, 10, **{name: float(index) for index, name in enumerate(names)})
    for _ in range(2):
        export("mlflow", tmp_path, run.run_id, "--no-artifacts")
    (found,) = _mlflow_runs(tmp_path)
    values = [value for name, value in found.data.metrics.items() if name not in ("train/loss", "time/step_s")]
    assert sorted(values) == [float(index) for index in range(len(names))]
    assert (found.data.metrics["gap _0_"], found.data.metrics["loss/_"]) == (7.0, 1.0)


@pytest.mark.usefixtures("mlflow_database")
def test_a_tracking_uri(run: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    export("mlflow", f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = _mlflow_runs(tmp_path)
    assert found.info.artifact_uri.startswith((tmp_path / "artifacts").as_uri())
    assert list(Path().iterdir()) == [], "nothing in the current folder"


# ---------------------------------------------------------------------------------------------------------------------
# Weights & Biases


def test_wandb(run: RunFiles, tmp_path: Path) -> None:
    export("wandb", tmp_path)
    export("wandb", tmp_path)
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    records = list(wandb_records(folder / f"run-{run.run_id}.wandb"))
    (about,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (about.run_id, about.project) == (run.run_id, "sort")
    assert list(about.tags) == ["nightly", "sort", "grpo", "completed"]
    assert "loops" in {item.key for item in about.config.update}
    history = wandb_history(folder / f"run-{run.run_id}.wandb")
    assert {row["_step"]: row["train/loss"] for row in history} == pytest.approx(LOSS)
    assert {row["_step"]: row["_timestamp"] for row in history} == {
        step: at(ends).timestamp() for step, ends in ENDS.items()
    }
    assert [row["evaluation/after/greedy"] for row in history if "evaluation/after/greedy" in row] == [0.93]


def test_tags_longer_than_those_of_wandb_are_truncated(run: RunFiles, tmp_path: Path) -> None:
    stored = StoredSpec.model_validate_json(run.dir.spec.read_bytes())
    write_model(run.dir.spec, stored.model_copy(update={"tags": ("long " * 20, "nightly")}))
    export("wandb", tmp_path)
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    records = wandb_records(folder / f"run-{run.run_id}.wandb")
    (about,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert list(about.tags) == [f"{'long ' * 12}lon…", "nightly", "grpo", "completed"]


# ---------------------------------------------------------------------------------------------------------------------
# The control plane


WITHOUT = """
import sys
from rlhf_core.garbage import collect_rarely
collect_rarely()
blocked = sys.argv[1].split(",")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from rlhf_core.cli.main import execute
sys.exit(max(execute(["export", "last", "--to", to, "--out", sys.argv[2] + "/" + to]) for to in sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("to", "package"),
    [("parquet", "pyarrow"), ("mlflow", "mlflow"), ("tensorboard", "tensorboard"), ("wandb", "wandb")],
)
def test_a_missing_library_is_named_with_advice(
    run: RunFiles,
    tmp_path: Path,
    to: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    rlhf: Rlhf,
) -> None:
    for name in [package, *(one for one in sys.modules if one.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    output = rlhf("export", "last", "--to", to, "--out", str(tmp_path / "out"), code=2).stderr
    assert f"exporting to {to} needs the package {package}" in output
    assert f": {pip_install('export')}" in output
    assert not (tmp_path / "out").exists()


def test_no_export_needs_torch(run: RunFiles, tmp_path: Path) -> None:
    """All exporters in one process, which imports their libraries."""
    command = [sys.executable, "-c", WITHOUT, "torch,tensorflow,transformers", str(tmp_path)]
    done = subprocess.run(
        [*command, "csv", "tensorboard", "mlflow", "wandb"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(any((tmp_path / to).iterdir()) for to in ("csv", "tensorboard", "mlflow", "wandb"))


def test_bad_input(rlhf: Rlhf, run: RunFiles, tmp_path: Path) -> None:
    rlhf("export", "nobody", "--to", "csv", "--out", str(tmp_path), code=2)
    rlhf("export", "last", "--to", "excel", "--out", str(tmp_path), code=2)
    assert "choose another with --out" in rlhf("export", "last", "--to", "csv", "--out", "/dev/null/out", code=2).stderr


class Full:
    """Stand-in for a writer whose disk becomes full."""

    def __init__(self, *_given: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("to", "writer"),
    [
        ("csv", "csv.writer"),
        ("parquet", "pyarrow.parquet.ParquetWriter"),
        ("tensorboard", "tensorboard.summary.writer.record_writer.RecordWriter"),
        ("wandb", "wandb.init"),
    ],
)
def test_a_full_disk_is_reported_and_leaves_no_partial_file(
    run: RunFiles,
    tmp_path: Path,
    to: str,
    writer: str,
    rlhf: Rlhf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(writer, Full)
    answer = rlhf("export", "last", "--to", to, "--out", str(out), code=2)
    assert f"error: cannot write to {out}: No space left on device. Make room there" in answer.stderr
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_an_error_of_mlflow_on_a_full_disk_is_explained(
    run: RunFiles, tmp_path: Path, free: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow raises an error of its database library, which has another meaning if there is free space."""

    def fail(*_given: object, **_named: object) -> None:
        (tmp_path / "mlflow.db").touch()
        raise ValueError("database or disk is full")

    monkeypatch.setattr("mlflow.MlflowClient", fail)
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    assert execute(["export", "last", "--to", "mlflow", "--out", str(tmp_path)]) == (1 if free else 2)
    output = "unexpected error" if free else f"error: cannot write to {tmp_path}: its disk is full"
    assert output in capsys.readouterr().err
    assert not (tmp_path / "mlflow.db").exists()


def test_points_are_read_from_a_step_on(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.history.queries.exports.BATCH_ROWS", 3)
    with HistoryStore(load_site().database_url) as store:
        all_of_them = list(curve_points(store, run.run_id))
        later = list(curve_points(store, run.run_id, first_step=4))
    assert all_of_them == sorted(all_of_them, key=lambda point: (point.step, point.key))
    assert later == [point for point in all_of_them if point.step >= 4]


def test_lines_not_yet_in_the_history_are_exported(run: RunFiles, tmp_path: Path) -> None:
    run.metrics(2, 0, 11, 60)
    export("csv", tmp_path)
    steps = {int(row["step"]) for row in csv.DictReader((tmp_path / "run_curve.csv").open(newline=""))}
    assert max(steps) == 11
