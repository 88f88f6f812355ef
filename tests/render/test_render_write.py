"""Reports of real histories: through the store, the run directory and the command line."""

import errno
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from history_tools import RunFiles, whole_run
from process_tools import Rlhf

from rlhf_core.cli.main import execute
from rlhf_core.config import site as site_config
from rlhf_core.errors import UnknownRun
from rlhf_core.files.appended import LineWriter
from rlhf_core.files.whole import remove_tree
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.gather import _evidence, gather
from rlhf_core.render.markdown import incidents_markdown
from rlhf_core.render.run_page import write_report
from rlhf_core.run_dir.checkpoint import ADAPTER_WEIGHTS
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import PromotionState, StageName, StageState
from rlhf_core.schemas.journal import PromotionMoved, StageEnded, StageStarted
from rlhf_core.schemas.reports import SampleLine
from rlhf_core.watchdog.ingest import sync

pytestmark = pytest.mark.usefixtures("plots_drawn_once")


@pytest.fixture
def site() -> site_config.Site:
    """Site that the command line of this test uses."""
    return site_config.load_site()


@pytest.fixture
def run_dir(site: site_config.Site) -> RunDir:
    """A run directory with all files."""
    return whole_run(site.runs_dir).dir


def _ingest(site: site_config.Site, run_dir: RunDir) -> None:
    site.home.mkdir(parents=True, exist_ok=True)
    with HistoryStore(site.database_url) as store:
        sync(run_dir, store)


def test_the_report_of_a_real_history(site: site_config.Site, run_dir: RunDir, tmp_path: Path) -> None:
    _ingest(site, run_dir)
    with HistoryStore(site.database_url) as store:
        path = write_report(store, run_dir, tmp_path / "out" / "report.html")
    page = path.read_text()
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


def _page(site: site_config.Site, run_dir: RunDir, tmp_path: Path) -> str:
    _ingest(site, run_dir)
    with HistoryStore(site.database_url) as store:
        return write_report(store, run_dir, tmp_path / "report.html").read_text()


def test_the_promotion_is_reported(site: site_config.Site, tmp_path: Path) -> None:
    run = whole_run(site.runs_dir)
    assert "Promotion" not in _page(site, run.dir, tmp_path), "no promotion was asked for"
    _promoted(run, (PromotionState.WAITING, "", "the best greedy", ""))
    page = _page(site, run.dir, tmp_path)
    assert "The checkpoint of step 10 waits for an answer." in page
    assert f"rlhf approve {run.run_id}" in page
    _promoted(
        run,
        (PromotionState.APPROVED, "bea", "better than <ours>", ""),
        (PromotionState.PROMOTED, "bea", "better than <ours>", "/models/sort-1"),
    )
    page = _page(site, run.dir, tmp_path)
    assert '<span class="badge good">promoted</span> The checkpoint of step 10 was promoted.' in page
    assert "<dt>decided by</dt><dd>bea</dd>" in page
    assert "<dt>reason</dt><dd>better than &lt;ours&gt;</dd>" in page
    assert "<code>/models/sort-1</code>" in page
    assert "<dt>promoted at</dt>" in page
    assert "How it came there" not in page, "requested, approved, written: the facts say so"
    assert "rlhf approve" not in page


def test_a_changed_answer_is_reported_in_full(site: site_config.Site, tmp_path: Path) -> None:
    run = whole_run(site.runs_dir)
    _promoted(
        run,
        (PromotionState.WAITING, "", "the best greedy", ""),
        (PromotionState.REFUSED, "carl", "repeats itself", ""),
        (PromotionState.APPROVED, "bea", "looked at it again", ""),
        (PromotionState.FAILED, "", "no room on /models", ""),
    )
    page = _page(site, run.dir, tmp_path)
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
    with HistoryStore(site.database_url) as store:
        page = write_report(store, run.dir, tmp_path / "report.html").read_text()
    assert "no room on /models" in page, "the row is enough if the journal is gone"


def test_the_reason_for_no_promotion_is_reported(site: site_config.Site, tmp_path: Path) -> None:
    run = whole_run(site.runs_dir)
    run.journal(StageStarted(stage_index=9, name=StageName.PROMOTE, attempt=0), 60)
    expected = "not promoted: greedy is not above 0.95"
    run.journal(StageEnded(stage_index=9, state=StageState.COMPLETED, message=expected), 61)
    assert expected in _page(site, run.dir, tmp_path)


def test_an_unknown_run_has_no_report(site: site_config.Site, run_dir: RunDir, tmp_path: Path) -> None:
    _ingest(site, run_dir)
    with HistoryStore(site.database_url) as store, pytest.raises(UnknownRun):
        write_report(store, RunDir(tmp_path / "nothing-20260101-000000-abcdef"), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_without_its_directory_a_run_still_has_a_report(
    site: site_config.Site, run_dir: RunDir, tmp_path: Path
) -> None:
    _ingest(site, run_dir)
    remove_tree(run_dir.root)
    with HistoryStore(site.database_url) as store:
        page = write_report(store, run_dir, tmp_path / "report.html").read_text()
    assert "is gone: samples of training" in page
    assert "rose from 0.750 to 0.930" in page


def test_samples_of_the_last_time_count(site: site_config.Site, run_dir: RunDir) -> None:
    _ingest(site, run_dir)
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
    with HistoryStore(site.database_url) as store:
        samples = gather(store, run_dir).samples
    assert [(line.step, line.completion) for line in samples] == [(3, "again"), (4, "first"), (5, "again")]


def test_the_report_shows_the_stacks_of_an_incident(site: site_config.Site, run_dir: RunDir, tmp_path: Path) -> None:
    _ingest(site, run_dir)
    with HistoryStore(site.database_url) as store:
        before = write_report(store, run_dir, tmp_path / "before.html").read_text()
        folder = run_dir.root / gather(store, run_dir).timeline.incidents[0].incident.evidence_dir
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stack-n2-0.txt").write_text("Thread 1 <MainThread>\n    wait (threading.py:1)\n")
        (folder / "log-n2-0.txt").write_text("the last words\n")
        page = write_report(store, run_dir, tmp_path / "report.html").read_text()
    assert "MainThread" not in before
    assert "<pre>Thread 1 &lt;MainThread&gt;\n    wait (threading.py:1)</pre>" in page
    assert "the last words" in page


def test_evidence_outside_of_the_run_is_not_opened(site: site_config.Site, run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "stack-n2-0.txt").write_text("another user's secret\n")
    _ingest(site, run_dir)
    with HistoryStore(site.database_url) as store:
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


def test_parameters_are_counted_from_the_headers_of_the_weights(site: site_config.Site, run_dir: RunDir) -> None:
    _ingest(site, run_dir)
    weights = run_dir.initial_model / "model.safetensors"
    _weights(weights, a=[3, 4], b=[5])
    with HistoryStore(site.database_url) as store:
        assert gather(store, run_dir).num_parameters == 17
        for content in DAMAGED:
            weights.write_bytes(content)
            assert gather(store, run_dir).num_parameters is None, content


def test_the_size_of_an_adapter_is_not_called_that_of_the_model(site: site_config.Site, run_dir: RunDir) -> None:
    _ingest(site, run_dir)
    newest = run_dir.checkpoints()[-1]
    _weights(newest.model / ADAPTER_WEIGHTS, a=[3, 4])
    with HistoryStore(site.database_url) as store:
        assert gather(store, run_dir).num_parameters is None
        _weights(newest.model / "model-00001-of-00001.safetensors", a=[30, 40])
        assert gather(store, run_dir).num_parameters == 1200, "control"


def test_a_damaged_journal_costs_the_report_only_what_is_read_from_it(
    site: site_config.Site, run_dir: RunDir, tmp_path: Path
) -> None:
    _ingest(site, run_dir)
    with run_dir.control.open("a") as journal:
        journal.write("damaged\n")
    with HistoryStore(site.database_url) as store:
        page = write_report(store, run_dir, tmp_path / "report.html").read_text()
    assert "Held-out greedy exact match rose from 0.750 to 0.930." in page
    assert "Changes of the promotion are left out: " in page
    assert f"{run_dir.control}, line " in page


def test_files_of_another_user_are_left_out_with_a_note(
    site: site_config.Site, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the command answered that the report itself cannot be written."""

    def refused(path: Path, schema: object) -> list[object]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    _ingest(site, run_dir)
    (run_dir.initial_model / "model.safetensors").mkdir(parents=True)  # opening it is refused, too
    monkeypatch.setattr("rlhf_core.render.gather.read_models", refused)
    assert execute(["report", "last", "--output", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Samples of training are left out: [Errno 13] Permission denied" in page
    assert "The model&#x27;s size is left out: [Errno 21] Is a directory" in page


# ---------------------------------------------------------------------------------------------------------------------
# rlhf report


def test_the_command_reads_what_is_new_first_and_writes_into_the_run_directory(
    site: site_config.Site, run_dir: RunDir, rlhf: Rlhf
) -> None:
    later = run_dir.evaluation("after", "greedy")
    content = later.read_text()
    later.unlink()
    _ingest(site, run_dir)
    later.write_text(content)
    assert "report.html" in rlhf("report", "last").stdout
    assert "rose from 0.750 to 0.930" in run_dir.report.read_text()


def test_the_command_writes_where_it_is_told(
    site: site_config.Site, run_dir: RunDir, tmp_path: Path, rlhf: Rlhf
) -> None:
    _ingest(site, run_dir)
    printed = rlhf("report", "sort", "--output", str(tmp_path / "mine.html"), "--json").json()
    assert printed == {"run_id": run_dir.run_id, "report": str(tmp_path / "mine.html")}
    assert (tmp_path / "mine.html").is_file()
    assert not run_dir.report.exists()


def test_a_run_that_only_the_disk_knows_has_a_report(site: site_config.Site, run_dir: RunDir) -> None:
    site.home.mkdir(parents=True, exist_ok=True)
    assert execute(["report", run_dir.run_id]) == 0
    assert "rose from 0.750 to 0.930" in run_dir.report.read_text()


@pytest.mark.parametrize("opened", [True, False])
def test_the_report_is_opened_where_there_is_a_browser(
    site: site_config.Site,
    run_dir: RunDir,
    opened: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _ingest(site, run_dir)
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
    site: site_config.Site, run_dir: RunDir, arguments: list[str], expected: str, rlhf: Rlhf
) -> None:
    _ingest(site, run_dir)
    assert expected in rlhf("report", *arguments, code=2).stderr


def test_a_run_without_directory_needs_an_output(site: site_config.Site, run_dir: RunDir, rlhf: Rlhf) -> None:
    _ingest(site, run_dir)
    remove_tree(run_dir.root)
    assert "choose a file with --output" in rlhf("report", "last", code=2).stderr
