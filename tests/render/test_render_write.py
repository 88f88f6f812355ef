"""Reports of real histories: through the store, the run directory and the command line."""

import errno
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from history_tools import RunFiles, synced, whole_run
from process_tools import Rlhf

from rlhf_core.cli.main import execute
from rlhf_core.config.site import load_site
from rlhf_core.errors import UnknownRun
from rlhf_core.files.appended import LineWriter
from rlhf_core.files.whole import remove_tree
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.gather import _evidence, gather
from rlhf_core.render.markdown import incidents_markdown
from rlhf_core.render.run_page import page, write_report
from rlhf_core.run_dir.checkpoint import ADAPTER_WEIGHTS
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import PromotionState, StageName, StageState
from rlhf_core.schemas.journal import PromotionMoved, StageEnded, StageStarted
from rlhf_core.schemas.reports import SampleLine

pytestmark = pytest.mark.usefixtures("plots_drawn_once")


@pytest.fixture
def store() -> Iterator[HistoryStore]:
    """The history of the site that the command line of this test uses."""
    with HistoryStore(load_site().database_url) as store:
        yield store


@pytest.fixture
def run(store: HistoryStore) -> RunFiles:
    """A whole run, known to the history."""
    return synced(whole_run(load_site().runs_dir), store)


@pytest.fixture
def run_dir(run: RunFiles) -> RunDir:
    """Its directory."""
    return run.dir


def _page(store: HistoryStore, run_dir: RunDir) -> str:
    return page(gather(store, run_dir))


def test_the_report_of_a_real_history(store: HistoryStore, run_dir: RunDir, tmp_path: Path) -> None:
    page = write_report(store, run_dir, tmp_path / "out" / "report.html").read_text()
    assert "Held-out greedy exact match rose from 0.750 to 0.930." in page
    assert "worker killed" in page
    assert "restart in place (by the agent): one restart is left." in page
    assert "; 6.0 s made again" in page.replace("\u00a0", " ")
    assert "Speed of the nodes before training, 2 probes" in page
    assert page.count('class="sign saved"') == 4
    assert page.count('class="sign incident"') == 2


def _promoted(run: RunFiles, *moves: tuple[PromotionState, str, str, str]) -> None:
    for number, (state, by, reason, path) in enumerate(moves):
        event = PromotionMoved(state=state, checkpoint_step=10, by=by, reason=reason, path=path)
        run.journal(event, 60 + 10 * number)


def test_the_promotion_is_reported(store: HistoryStore, run: RunFiles) -> None:
    assert "Promotion" not in _page(store, synced(run, store).dir), "no promotion was asked for"
    _promoted(run, (PromotionState.WAITING, "", "the best greedy", ""))
    page = _page(store, synced(run, store).dir)
    assert "The checkpoint of step 10 waits for an answer." in page
    assert f"rlhf approve {run.run_id}" in page
    _promoted(
        run,
        (PromotionState.APPROVED, "bea", "better than <ours>", ""),
        (PromotionState.PROMOTED, "bea", "better than <ours>", "/models/sort-1"),
    )
    page = _page(store, synced(run, store).dir)
    assert '<span class="badge good">promoted</span> The checkpoint of step 10 was promoted.' in page
    assert "<dt>decided by</dt><dd>bea</dd>" in page
    assert "<dt>reason</dt><dd>better than &lt;ours&gt;</dd>" in page
    assert "<code>/models/sort-1</code>" in page
    assert "<dt>promoted at</dt>" in page
    assert "How it came there" not in page, "requested, approved, written: the facts say so"
    assert "rlhf approve" not in page


def test_a_changed_answer_is_reported_in_full(store: HistoryStore, run: RunFiles) -> None:
    _promoted(
        run,
        (PromotionState.WAITING, "", "the best greedy", ""),
        (PromotionState.REFUSED, "carl", "repeats itself", ""),
        (PromotionState.APPROVED, "bea", "looked at it again", ""),
        (PromotionState.FAILED, "", "no room on /models", ""),
    )
    page = _page(store, synced(run, store).dir)
    assert "was approved, but the model could not be written" in page
    assert "no room on /models" in page
    assert f"<code>rlhf approve {run.run_id}</code>" in page
    changes = page.partition("How it came there")[2]
    assert (
        changes.index("carl")
        < changes.index("repeats itself")
        < changes.index("bea")
        < changes.index("looked at it again")
    )
    remove_tree(run.dir.root)
    page = _page(store, run.dir)
    assert "no room on /models" in page, "the row is enough if the journal is gone"


def test_the_reason_for_no_promotion_is_reported(store: HistoryStore, run: RunFiles) -> None:
    run.journal(StageStarted(stage_index=9, name=StageName.PROMOTE, attempt=0), 60)
    expected = "not promoted: greedy is not above 0.95"
    run.journal(StageEnded(stage_index=9, state=StageState.COMPLETED, message=expected), 61)
    assert expected in _page(store, synced(run, store).dir)


def test_an_unknown_run_has_no_report(store: HistoryStore, run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UnknownRun):
        write_report(store, RunDir(tmp_path / "nothing-20260101-000000-abcdef"), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_without_its_directory_a_run_still_has_a_report(store: HistoryStore, run_dir: RunDir) -> None:
    remove_tree(run_dir.root)
    page = _page(store, run_dir)
    assert "is gone: samples of training" in page
    assert "rose from 0.750 to 0.930" in page


def test_samples_of_the_last_time_count(store: HistoryStore, run_dir: RunDir) -> None:
    for restart, completion in ((0, "first"), (1, "again")):
        writer = LineWriter(run_dir.attempt(1).restart(restart).samples)
        for step in (3, 4 + restart):
            writer.write(
                SampleLine(
                    step=step,
                    prompt_uid="p",
                    sample_index=0,
                    seed=1,
                    weight_version=step,
                    prompt="?",
                    completion=completion,
                    answer="!",
                    reward=0.0,
                    advantage=0.0,
                )
            )
        writer.close()
    samples = gather(store, run_dir).samples
    assert [(line.step, line.completion) for line in samples] == [(3, "again"), (4, "first"), (5, "again")]


def test_the_report_shows_the_stacks_of_an_incident(store: HistoryStore, run_dir: RunDir) -> None:
    before = _page(store, run_dir)
    folder = run_dir.root / gather(store, run_dir).timeline.incidents[0].incident.evidence_dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stack-n2-0.txt").write_text("Thread 1 <MainThread>\n    wait (threading.py:1)\n")
    (folder / "log-n2-0.txt").write_text("the last words\n")
    page = _page(store, run_dir)
    assert "MainThread" not in before
    assert "<pre>Thread 1 &lt;MainThread&gt;\n    wait (threading.py:1)</pre>" in page
    assert "the last words" in page


def test_evidence_outside_of_the_run_is_not_opened(store: HistoryStore, run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "stack-n2-0.txt").write_text("another user's secret\n")
    timeline = gather(store, run_dir).timeline
    found = timeline.incidents[0]
    for outside in (str(tmp_path), os.path.relpath(tmp_path, run_dir.root)):
        incident = found.incident.model_copy(update={"evidence_dir": outside})
        elsewhere = replace(timeline, incidents=[replace(found, incident=incident)])
        assert _evidence(run_dir, elsewhere) == {}
        assert "another user's secret" not in incidents_markdown(elsewhere)
    inside = found.incident.evidence_dir
    (run_dir.root / inside).mkdir(parents=True, exist_ok=True)
    (run_dir.root / inside / "stack-n2-0.txt").write_text("a frame\n")
    assert inside in _evidence(run_dir, timeline), "control"


def _weights(path: Path, **shapes: list[int]) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, **{name: {"shape": of} for name, of in shapes.items()}})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(68))


DAMAGED = (b"", b"\xff" * 20, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a": {}}')


def test_parameters_are_counted_from_the_headers_of_the_weights(store: HistoryStore, run_dir: RunDir) -> None:
    weights = run_dir.initial_model / "model.safetensors"
    _weights(weights, a=[3, 4], b=[5])
    assert gather(store, run_dir).num_parameters == 17
    for content in DAMAGED:
        weights.write_bytes(content)
        assert gather(store, run_dir).num_parameters is None, content


def test_the_size_of_an_adapter_is_not_called_that_of_the_model(store: HistoryStore, run_dir: RunDir) -> None:
    newest = run_dir.checkpoints()[-1]
    _weights(newest.model / ADAPTER_WEIGHTS, a=[3, 4])
    assert gather(store, run_dir).num_parameters is None
    _weights(newest.model / "model-00001-of-00001.safetensors", a=[30, 40])
    assert gather(store, run_dir).num_parameters == 1200, "control"


def test_a_damaged_journal_costs_the_report_only_what_is_read_from_it(store: HistoryStore, run_dir: RunDir) -> None:
    with run_dir.control.open("a") as journal:
        journal.write("damaged\n")
    page = _page(store, run_dir)
    assert "Held-out greedy exact match rose from 0.750 to 0.930." in page
    assert "Changes of the promotion are left out: " in page
    assert f"{run_dir.control}, line " in page


def test_files_of_another_user_are_left_out_with_a_note(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the command answered that the report itself cannot be written."""

    def refused(path: Path, schema: object) -> list[object]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    (run_dir.initial_model / "model.safetensors").mkdir(parents=True)  # opening it is refused, too
    monkeypatch.setattr("rlhf_core.render.gather.read_models", refused)
    assert execute(["report", "last", "--output", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Samples of training are left out: [Errno 13] Permission denied" in page
    assert "The model&#x27;s size is left out: [Errno 21] Is a directory" in page


# ---------------------------------------------------------------------------------------------------------------------
# rlhf report


def test_the_command_reads_what_is_new_first_and_writes_into_the_run_directory(store: HistoryStore, rlhf: Rlhf) -> None:
    run = whole_run(load_site().runs_dir)
    later = run.dir.evaluation("after", "greedy")
    content = later.read_text()
    later.unlink()
    synced(run, store)
    later.write_text(content)
    assert "report.html" in rlhf("report", "last").stdout
    assert "rose from 0.750 to 0.930" in run.dir.report.read_text()


def test_the_command_writes_where_it_is_told(run_dir: RunDir, tmp_path: Path, rlhf: Rlhf) -> None:
    printed = rlhf("report", "sort", "--output", str(tmp_path / "mine.html"), "--json").json()
    assert printed == {"run_id": run_dir.run_id, "report": str(tmp_path / "mine.html")}
    assert (tmp_path / "mine.html").is_file()
    assert not run_dir.report.exists()


def test_a_run_that_only_the_disk_knows_has_a_report() -> None:
    run_dir = whole_run(load_site().runs_dir).dir
    assert execute(["report", run_dir.run_id]) == 0
    assert "rose from 0.750 to 0.930" in run_dir.report.read_text()


@pytest.mark.parametrize("opened", [True, False])
def test_the_report_is_opened_where_there_is_a_browser(
    run_dir: RunDir,
    opened: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: shown.append(address) or opened)
    assert execute(["report", "last", "--open"]) == 0
    assert shown == [run_dir.report.as_uri()]
    assert ("found no browser" in capsys.readouterr().err) == (not opened)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nobody"], "the history has no run 'nobody'"),
        (["last", "--output", "/dev/null/report.html"], "choose another file with --output"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(
    run_dir: RunDir, arguments: list[str], expected: str, rlhf: Rlhf
) -> None:
    assert expected in rlhf("report", *arguments, code=2).stderr


def test_a_run_without_directory_needs_an_output(run_dir: RunDir, rlhf: Rlhf) -> None:
    remove_tree(run_dir.root)
    assert "choose a file with --output" in rlhf("report", "last", code=2).stderr
