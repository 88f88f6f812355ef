"""Export of a run to experiment trackers while it goes on: each round adds what is new, and nothing twice."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from control_fakes import Clock
from history_tools import RunFiles, at, ingested, whole_run
from http_stand_in import QuietHandler, serving
from tracker_readers import shown_scalars, tensorboard, wandb_history
from wandb_server import KEY, wandb_server

from rlhf_core.cli.commands import export as export_command
from rlhf_core.cli.main import execute
from rlhf_core.config.site import load_site
from rlhf_core.errors import BadInput
from rlhf_core.history.queries import RunDetails, show_run
from rlhf_core.history.queries.exports import CurvePoint
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.exports import following
from rlhf_core.render.exports.following import RETRY_INTERVAL_S, LiveExport, RunFollower
from rlhf_core.render.exports.mlflow import MlflowRun
from rlhf_core.render.exports.tensorboard import TensorBoardRun
from rlhf_core.render.exports.wandb import WandbRun, WandbServerRun
from rlhf_core.schemas.attempts import RunState

pytestmark = pytest.mark.usefixtures("plots_drawn_once")


@pytest.fixture
def store() -> Iterator[HistoryStore]:
    with HistoryStore(load_site().database_url) as store:
        yield store


@pytest.fixture
def run() -> RunFiles:
    """A run that has made three steps and goes on."""
    made = RunFiles(load_site().runs_dir).created()
    made.moved(RunState.PREFLIGHT, 1)
    for step in (1, 2, 3):
        made.metrics(1, 0, step, 10 * step)
    return ingested(made)


class Tracker:
    """A tracker of one run, which can be away, and may break after taking a part."""

    def __init__(self) -> None:
        self.points: list[CurvePoint] = []
        self.calls: list[str] = []
        self.away = ""
        self.place = "here"

    def write(self, details: RunDetails, points: Iterable[CurvePoint]) -> None:
        self.calls.append("write")
        self.points = []
        self._take(points)

    def add(self, details: RunDetails, points: Sequence[CurvePoint]) -> bool:
        self.calls.append(f"add {len(points)}")
        self._take(points)
        return True

    def end(self, store: HistoryStore, details: RunDetails) -> None:
        self.calls.append("end")

    def _take(self, points: Iterable[CurvePoint]) -> None:
        for point in points:
            self.points.append(point)
            if self.away:
                raise ConnectionError(self.away)

    def curve(self, key: str = "train/loss") -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.points if point.key == key]


LOSS = [(1, 2.0), (2, 1.5), (3, 1 / 3 + 1)]


# ---------------------------------------------------------------------------------------------------------------------
# What is added


def test_only_new_steps_are_added(run: RunFiles, store: HistoryStore) -> None:
    tracker = Tracker()
    follower = RunFollower(store, run.run_id, tracker)
    assert not follower.update()
    run.metrics(1, 0, 4, 40)
    ingested(run)
    assert not follower.update()
    assert not follower.update()
    assert tracker.calls == ["write", "add 2", "add 0"]
    assert tracker.curve() == [*LOSS, (4, 1.25)]


def test_late_metrics_of_the_newest_step_and_evaluations_are_added(run: RunFiles, store: HistoryStore) -> None:
    """transformers evaluates for minutes, and logs the results at the step whose loss it has logged before."""
    tracker = Tracker()
    follower = RunFollower(store, run.run_id, tracker)
    follower.update()
    run.metrics(1, 0, 3, 30, **{"eval/loss": 0.5})
    run.checkpoint(2, 31)
    run.evaluation("before", "greedy", 0.75, 35)
    ingested(run)
    follower.update()
    follower.update()
    assert tracker.calls == ["write", "add 4", "add 0"], "the metric, the evaluation and its interval"
    assert tracker.curve("eval/loss") == [(3, 0.5)]
    assert tracker.curve("evaluation/before/greedy")[0][1] == 0.75


def _repeated(run: RunFiles) -> None:
    """The run goes back to step 1, and has made step 2 again."""
    run.metrics(1, 1, 2, 50)
    ingested(run)


AFTER_REPEATED = [(1, 2.0), (2, 1.6)]


def test_steps_that_do_not_count_any_more_disappear(run: RunFiles, store: HistoryStore) -> None:
    tracker = Tracker()
    follower = RunFollower(store, run.run_id, tracker)
    follower.update()
    _repeated(run)
    follower.update()
    assert tracker.curve() == AFTER_REPEATED
    run.metrics(1, 1, 3, 60)
    ingested(run)
    follower.update()
    assert tracker.calls == ["write", "write", "add 2"]
    assert tracker.curve() == [*AFTER_REPEATED, (3, 1 / 3 + 1.1)]


def test_without_the_comparison_they_would_stay(
    run: RunFiles, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(self: RunFollower, evaluations: object) -> tuple[list[CurvePoint], list[CurvePoint]]:
        found = following.curve_points(store, run.run_id, first_step=self._step)
        return [point for point in found if point.step > self._step], []

    monkeypatch.setattr(RunFollower, "_new_points", later)
    tracker = Tracker()
    follower = RunFollower(store, run.run_id, tracker)
    follower.update()
    _repeated(run)
    follower.update()
    assert tracker.curve() == LOSS != AFTER_REPEATED


def test_after_an_error_the_run_is_written_as_a_whole(run: RunFiles, store: HistoryStore) -> None:
    """The tracker may have taken a part of what it was given."""
    tracker = Tracker()
    follower = RunFollower(store, run.run_id, tracker)
    follower.update()
    run.metrics(1, 0, 4, 40)
    ingested(run)
    tracker.away = "it is away"
    with pytest.raises(ConnectionError):
        follower.update()
    tracker.away = ""
    follower.update()
    assert tracker.calls == ["write", "add 2", "write"]
    assert tracker.curve() == [*LOSS, (4, 1.25)]


# ---------------------------------------------------------------------------------------------------------------------
# Real trackers


def _life(run: RunFiles) -> Iterator[dict[int, float]]:
    """Yield the losses that count, whenever something has happened to the run: new steps, steps made again, its end."""
    yield {1: 2.0, 2: 1.5, 3: 1 / 3 + 1}
    for step in (4, 5):
        run.metrics(1, 0, step, 10 * step)
    ingested(run)
    yield {1: 2.0, 2: 1.5, 3: 1 / 3 + 1, 4: 1.25, 5: 1.2}
    _repeated(run)
    yield {1: 2.0, 2: 1.6}
    run.metrics(1, 1, 3, 60, **{"reward/mean": math.nan})
    run.checkpoint(2, 61)
    run.evaluation("before", "greedy", 0.9, 65)
    run.moved(RunState.FAILED, 70)
    ingested(run)
    yield {1: 2.0, 2: 1.6, 3: 1 / 3 + 1.1}


def test_a_running_tensorboard_shows_what_counts(run: RunFiles, store: HistoryStore, tmp_path: Path) -> None:
    follower = RunFollower(store, run.run_id, TensorBoardRun(str(tmp_path), run.run_id))
    reader = None
    for losses in _life(run):
        follower.update()
        reader = reader or tensorboard(tmp_path / run.run_id)
        shown = shown_scalars(reader)
        assert {step: value for step, value, _ in shown["train/loss"]} == pytest.approx(losses)
        assert len(shown["train/loss"]) == len(losses), "none of them twice"
    assert shown["evaluation/before/greedy"] == [(2, pytest.approx(0.9), at(65).timestamp())]
    assert [path.name for path in tmp_path.glob("*sort*")] == [run.run_id], "no temporary file"


def test_event_files_that_another_export_replaced_are_written_again(
    run: RunFiles, store: HistoryStore, tmp_path: Path
) -> None:
    follower = RunFollower(store, run.run_id, TensorBoardRun(str(tmp_path), run.run_id))
    follower.update()
    assert execute(["export", run.run_id, "--to", "tensorboard", "--out", str(tmp_path)]) == 0
    run.metrics(1, 0, 4, 40)
    ingested(run)
    follower.update()
    shown = shown_scalars(tensorboard(tmp_path / run.run_id))
    assert [step for step, _, _ in shown["train/loss"]] == [1, 2, 3, 4]


def test_mlflow_has_what_counts(
    run: RunFiles, store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    follower, status = RunFollower(store, run.run_id, MlflowRun(str(tmp_path), run.run_id)), []
    for losses in _life(run):
        follower.update()
        (found,) = client.search_runs([client.get_experiment_by_name("sort").experiment_id])
        history = client.get_metric_history(found.info.run_id, "train/loss")
        assert {point.step: point.value for point in history} == pytest.approx(losses)
        assert len(history) == len(losses), "none of them twice"
        status.append(found.info.status)
    assert status == ["RUNNING", "RUNNING", "RUNNING", "FAILED"]
    assert found.data.metrics["evaluation/before/greedy"] == 0.9
    assert "report.html" in [one.path for one in client.list_artifacts(found.info.run_id)]


def test_what_mlflow_has_is_read_only_once(
    run: RunFiles, store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    follower = RunFollower(store, run.run_id, MlflowRun(str(tmp_path), run.run_id))
    follower.update()

    def read(*arguments: object) -> None:
        pytest.fail("the whole history of a metric was read")

    monkeypatch.setattr(MlflowClient, "get_metric_history", read)
    run.metrics(1, 0, 4, 40)
    ingested(run)
    follower.update()


def test_names_that_mlflow_would_mix_later_stay_apart(run: RunFiles, store: HistoryStore, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    follower = RunFollower(store, run.run_id, MlflowRun(str(tmp_path), run.run_id))
    for step, name in ((4, "gap [0]"), (5, "gap (0)")):
        run.metrics(1, 0, step, 10 * step, **{name: float(step)})
        ingested(run)
        follower.update()
    (found,) = client.search_runs([client.get_experiment_by_name("sort").experiment_id])
    assert sorted(value for name, value in found.data.metrics.items() if name.startswith("gap")) == [4.0, 5.0]


def test_an_offline_run_of_wandb_has_what_counts(run: RunFiles, store: HistoryStore, tmp_path: Path) -> None:
    follower = RunFollower(store, run.run_id, WandbRun(str(tmp_path), run.run_id))
    losses: dict[int, float] = {}
    for counting in _life(run):
        follower.update()
        losses = counting
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    deadline = time.monotonic() + 60  # wandb's own process writes the end of the file a little later
    while len(rows := wandb_history(folder / f"run-{run.run_id}.wandb")) < len(losses):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {row["_step"]: row["train/loss"] for row in rows} == pytest.approx(losses)
    assert [row["_step"] for row in rows if "evaluation/before/greedy" in row] == [2]


def test_a_wandb_server_gets_what_it_lacks(run: RunFiles, store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a stand-in: it shows what the client sends, not what a real one does with it."""
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)

        def follower() -> RunFollower:
            return RunFollower(store, run.run_id, WandbServerRun(server.address, run.run_id))

        first = follower()
        first.update()
        first.tracked.end(store, show_run(store, run.run_id))  # all of it is sent
        assert server.curve(run.run_id, "train/loss") == LOSS
        run.metrics(1, 0, 4, 40)
        run.checkpoint(2, 41)
        run.evaluation("before", "greedy", 0.75, 45)
        ingested(run)
        second = follower()  # another process: the run is resumed
        second.update()
        _repeated(run)
        second.update()
        assert server.curve(run.run_id, "train/loss") == [*LOSS, (4, 1.25)]
        assert server.curve(run.run_id, "evaluation/before/greedy") == [(4, 0.75)], "at the newest step"
        run.moved(RunState.FAILED, 70)
        ingested(run)
        assert second.update()
        assert server.curve(f"{run.run_id}-2", "train/loss") == [(1, 2.0), (2, 1.6)]


def test_a_wandb_server_gets_the_run_once_it_is_back(
    run: RunFiles, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while another run is open, whose service of wandb would keep the id of a run that it could not begin."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with wandb_server() as server:
        other = RunFollower(store, run.run_id, WandbServerRun(server.address, run.run_id))
        other.update()
        with serving(QuietHandler) as port:
            pass
        follower = RunFollower(store, run.run_id, WandbServerRun(f"http://127.0.0.1:{port}", run.run_id))
        for _ in range(2):
            with pytest.raises(BadInput, match=rf"W&B at http://127\.0\.0\.1:{port} does not take .*refused"):
                follower.update()
        other.tracked.end(store, show_run(store, run.run_id))
    with wandb_server(port) as server:
        follower.update()
        follower.tracked.end(store, show_run(store, run.run_id))
        assert server.curve(run.run_id, "train/loss") == LOSS


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        *((f"HTTP/1.0 {status} away\r\n\r\n", f"HTTP Error {status}") for status in (502, 503, 504)),
        ("another protocol\r\n", "another protocol"),
    ],
)
def test_an_address_at_which_no_wandb_answers_is_named(
    run: RunFiles, store: HistoryStore, monkeypatch: pytest.MonkeyPatch, answer: str, problem: str
) -> None:
    """The answers of a proxy whose server is away, and of something else."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.wfile.write(answer.encode())

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with serving(Handler) as port:
        follower = RunFollower(store, run.run_id, WandbServerRun(f"http://127.0.0.1:{port}", run.run_id))
        with pytest.raises(BadInput, match=f"W&B at .* does not take the export: {problem}"):
            follower.update()


def test_a_run_that_wandb_refused_is_taken_later(
    run: RunFiles, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with wandb_server() as server:
        server.num_refusals = 2
        follower = RunFollower(store, run.run_id, WandbServerRun(server.address, run.run_id))
        for _ in range(2):
            with pytest.raises(BadInput, match=r"does not take the export.*permission"):
                follower.update()
        follower.update()
        follower.tracked.end(store, show_run(store, run.run_id))
        assert server.curve(run.run_id, "train/loss") == LOSS


# ---------------------------------------------------------------------------------------------------------------------
# Several runs


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tracker]:
    """The tracker of each run, in the place of TensorBoard's files."""
    made: dict[str, Tracker] = {}

    def opened(tracker: str, out: str, run_id: str, *, artifacts: bool) -> Tracker:
        return made.setdefault(run_id, Tracker())

    monkeypatch.setattr(following, "tracked_run", opened)
    return made


def _other_run() -> RunFiles:
    return ingested(whole_run(load_site().runs_dir, "other", "bbbbbb", 10))


def test_a_tracker_that_is_away_is_reported_once_and_catches_up(
    run: RunFiles, store: HistoryStore, trackers: dict[str, Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    clock = Clock()
    monkeypatch.setattr(following, "time", SimpleNamespace(monotonic=clock))
    live = LiveExport(store, "tensorboard", "/out", warnings.append)
    stamps = {run.run_id: 1, _other_run().run_id: 1}
    for run_id in stamps:
        trackers[run_id] = Tracker()
        trackers[run_id].away = f"no answer about {run_id}"
    assert live.update(stamps) == {}
    assert live.update(stamps) == {}
    assert trackers[run.run_id].calls == ["write"], "it is left alone for a while"
    clock.now += RETRY_INTERVAL_S
    assert live.update(stamps) == {}
    assert len(warnings) == 1
    for tracker in trackers.values():
        tracker.away = ""
    clock.now += RETRY_INTERVAL_S
    assert list(live.update(stamps).items()) == [(run_id, "here") for run_id in stamps if run_id != run.run_id]
    assert trackers[run.run_id].curve() == LOSS
    trackers[run.run_id].away = "away again"
    run.metrics(1, 0, 4, 40)
    ingested(run)
    live.update({run.run_id: 2})
    assert len(warnings) == 2


def test_a_run_that_is_refused_does_not_keep_others_from_the_tracker(
    run: RunFiles, store: HistoryStore, trackers: dict[str, Tracker]
) -> None:
    warnings: list[str] = []
    live = LiveExport(store, "tensorboard", "/out", warnings.append)
    other = _other_run().run_id
    trackers[run.run_id] = Tracker()
    trackers[run.run_id].away = "refused"
    assert live.update({run.run_id: 1, other: 1}) == {other: "here"}
    assert [run.run_id in text and "refused" in text for text in warnings] == [True]


def test_nothing_is_done_for_a_run_without_news(
    run: RunFiles, store: HistoryStore, trackers: dict[str, Tracker]
) -> None:
    live = LiveExport(store, "tensorboard", "/out", pytest.fail)
    for stamp in (1, 1, 2):
        live.update({run.run_id: stamp})
    assert trackers[run.run_id].calls == ["write", "add 0"]


# ---------------------------------------------------------------------------------------------------------------------
# rlhf export --follow


def _while_waiting(monkeypatch: pytest.MonkeyPatch, happenings: Iterable[Callable[[], object]]) -> None:
    """Have something happen in each pause of the command."""
    pending = iter(happenings)
    monkeypatch.setattr(export_command, "time", SimpleNamespace(sleep=lambda seconds: next(pending)()))


def test_following_ends_with_the_run(
    run: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _while_waiting(
        monkeypatch, [lambda: run.metrics(1, 0, 4, 40), lambda: _repeated(run), lambda: run.moved(RunState.FAILED, 70)]
    )
    assert execute(["export", "last", "--to", "tensorboard", "--out", str(tmp_path), "--follow"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / run.run_id)]
    shown = shown_scalars(tensorboard(tmp_path / run.run_id))
    assert [(step, value) for step, value, _ in shown["train/loss"]] == [(1, 2.0), (2, pytest.approx(1.6))]


def test_following_can_be_interrupted_and_continued(
    run: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["export", "last", "--to", "mlflow", "--out", str(tmp_path), "--follow", "--no-artifacts"]
    _while_waiting(monkeypatch, [lambda: run.metrics(1, 0, 4, 40), Mock(side_effect=KeyboardInterrupt)])
    assert execute(command) == 130
    _while_waiting(monkeypatch, [lambda: run.moved(RunState.FAILED, 70)])
    assert execute(command) == 0
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("sort").experiment_id])
    history: list[Any] = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [*LOSS, (4, 1.25)]


def test_tables_cannot_be_followed(run: RunFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["export", "last", "--to", "csv", "--out", str(tmp_path), "--follow"]) == 2
    assert "expected --to mlflow" in capsys.readouterr().err
