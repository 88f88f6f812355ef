"""Names from users and files: ids of runs, configs, files of a checkpoint, jobs; and a history on a full disk."""

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_fakes import FakeScheduler, make_run, make_spec
from history_tools import whole_run
from pydantic import ValidationError
from small_disk import small_disk

from flows.flow_runs.ended import _run_of
from flows.flow_runs.task_runs import _stage
from flows.form import read_form
from flows.run import run_of_the_form
from rlhf_core.cli import main
from rlhf_core.config import loading as config
from rlhf_core.config.site import load_site
from rlhf_core.config.toml_files import MAX_CONFIG_BYTES, read_toml
from rlhf_core.control.driving_flow_run import DrivingFlowRun
from rlhf_core.control.views.timeline import trials_of
from rlhf_core.errors import BadConfig, BadInput, DatabaseUnavailable, RunDirError, SchedulerError
from rlhf_core.history import migrate
from rlhf_core.history.database import parse_url
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.config_paths import absolute_paths
from rlhf_core.launch.journal import Journal
from rlhf_core.launch.prepare import prepare
from rlhf_core.run_dir.run import RunDir, is_run_id, run_dirs
from rlhf_core.scheduler.base import JobState
from rlhf_core.scheduler.local import LocalScheduler
from rlhf_core.scheduler.slurm import commands, queue
from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler
from rlhf_core.schemas.checkpoint_files import CheckpointManifest, FileChecksum
from rlhf_core.schemas.journal import TrialPlanned
from rlhf_core.schemas.resources import Submission

pytestmark = pytest.mark.usefixtures("real_migrations")

ID = "sort-20260301-120000-a1b2c3"
NO_IDS = (
    *(
        "",
        ".",
        "..",
        "/",
        f"../{ID}",
        f"../../tmp/{ID}",
        f"/tmp/{ID}",
        f"{ID}\n",
        f"{ID}\x00",
        f"{ID}/",
        f"{ID}/../{ID}",
    ),
    *(
        f" {ID}",
        f".{ID}.new",
        f"x/{ID}",
        f"-{ID}",
        "sort-２０２６0301-120000-a1b2c3",
        f"{'a' * 200}-20260301-120000-a1b2c3",
    ),
    *(f"sörт{ID}", f"a\udcff{ID}", "last", ID.upper()),
)


# ---------------------------------------------------------------------------------------------------------------------
# Ids


@pytest.mark.parametrize("text", NO_IDS)
def test_what_is_no_id_opens_nothing(tmp_path: Path, text: str) -> None:
    runs = tmp_path / "runs"
    make_run(runs)
    assert not is_run_id(text)
    with pytest.raises(RunDirError, match="expected a run id"):
        RunDir.of(runs, text)
    assert RunDir.find(runs, text) is None
    assert _stage(runs, text, "train") is None


def planted(folder: Path) -> RunDir:
    """Run directory made by another user, outside the runs of this site."""
    folder.mkdir()
    run_dir = make_run(folder / "theirs")
    target = folder / ID
    run_dir.root.rename(target)
    content = (target / "spec.json").read_text()
    (target / "spec.json").write_text(content.replace(run_dir.run_id, ID))
    return RunDir(target)


def test_the_form_goes_on_with_no_run_outside_of_the_runs(tmp_path: Path) -> None:
    """A flow run of Prefect may be given any text as run_id."""
    evil = planted(tmp_path / "evil")
    site = replace(load_site(), runs_dir=tmp_path / "site" / "runs")
    make_run(site.runs_dir)
    for text in (str(evil.root), f"../../evil/{ID}", f"{ID}\n"):
        with pytest.raises(BadInput, match=r"run_id: found .* expected the id of a run"):
            read_form({"run_id": text})
        form = read_form({}).model_copy(update={"run_id": text})
        with pytest.raises(RunDirError):
            run_of_the_form(form, site, DrivingFlowRun())
        flow_run: Any = SimpleNamespace(id="11111111-1111-1111-1111-111111111111", parameters={"run_id": text})
        store: Any = None
        assert _run_of(flow_run, site, store) is None
    (site.runs_dir / ID).symlink_to(evil.root)
    form = read_form({"run_id": ID})
    with pytest.raises(RunDirError, match="is a link to a folder outside"):
        run_of_the_form(form, site, DrivingFlowRun())
    assert [one.run_id for one in run_dirs(site.runs_dir)] != []
    assert ID not in [one.run_id for one in run_dirs(site.runs_dir)]


def test_the_form_takes_so_many_tags_and_overrides() -> None:
    for given in ({"tags": ",".join(map(str, range(101)))}, {"overrides": "\n".join(["seed=1"] * 1_001)}):
        with pytest.raises(BadInput, match="at most"):
            read_form(given)


def test_a_link_that_stays_among_the_runs_is_followed(tmp_path: Path) -> None:
    runs = tmp_path / "real"
    run_dir = make_run(runs)
    (tmp_path / "runs").symlink_to(runs)
    found = RunDir.find(tmp_path / "runs", run_dir.run_id)
    assert found is not None
    assert found.read_spec().run_id == run_dir.run_id


def test_ids_of_trials_in_a_journal_are_not_followed(tmp_path: Path) -> None:
    evil = planted(tmp_path / "evil")
    run_dir = make_run(tmp_path / "site" / "runs")
    journal = Journal(run_dir, token=0)
    journal.append(TrialPlanned(check_id="trial.one_node", run_id=f"../../evil/{evil.run_id}"))
    journal.close()
    assert trials_of(run_dir) == []


@pytest.mark.parametrize("text", ["x" * 8_192, "a\x00b", "a\nb", "\x1b]0;x\x07", "\udcff"])
def test_names_that_users_give_are_refused_at_the_door(tmp_path: Path, text: str) -> None:
    for field in ("owner", "tags"):
        with pytest.raises(BadInput, match=rf"{field}\S*: found"):
            read_form({field: [text] if field == "tags" else text})
    for given in ({"owner": text}, {"tags": (text,)}):
        with pytest.raises(BadConfig, match="expected"):
            prepare(make_spec(), tmp_path / "runs", config_source="x", folder=tmp_path, **given)  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match="tags"):
        prepare(make_spec(), tmp_path / "runs", config_source="x", folder=tmp_path, tags=["a"] * 101)
    made = prepare(make_spec(), tmp_path / "runs", config_source=f"bad\udcff{text}.toml", folder=tmp_path)
    assert made.read_spec().config_source


# ---------------------------------------------------------------------------------------------------------------------
# Configs


BASE = 'name = "x"\n[model]\ntokenizer = "char"\nconfig = {model_type = "qwen3"}\n[data]\ntrain = "a"\n[train]\n'
BOMBS = {
    "deep arrays": "a = " + "[" * 100_000,
    "deep whole arrays": "a = " + "[" * 40_000 + "]" * 40_000,
    "deep tables": "a = " + "{b = " * 20_000,
    "deep dotted key": ".".join("a" * 60_000) + " = 1",
    "deep quoted key": ".".join('" "' for _ in range(30_000)) + " = 1",
    "deep key in a table": "a = {" + " . ".join("a" * 30_000) + " = 1}",
    "deep headers": "".join(f"[{'.'.join('a' * n)}]\n" for n in range(1, 300)),
    "deep settings": BASE + "num_steps = 1\n[data.generator_args]\nx = " + "[" * 60 + "]" * 60,
    "5,000 digits": "seed = " + "9" * 5_000,
    "a hundred digits": BASE + "num_steps = " + "9" * 120,
    "200,000 keys": "\n".join(f"k{number} = 1" for number in range(200_000)),
    "11,000 keys": "\n".join(f"k{number} = 1" for number in range(9_000, 20_000)),
    "10,000 unknown keys": "\n".join(f"k{number} = 1" for number in range(10_000)),
    "4,000 nearly known keys": "[train]\n" + "\n".join(f"num_step{number} = 1" for number in range(4_000)),
    "a long key": "[train]\n" + "k" * 100_000 + " = 1",
    "a long value": "name = '" + "x" * 100_000 + "'",
    "a long list": "a = [" + "1," * 60_000 + "]",
    "100 MB": "#" * (100 << 20),
    "NUL": BASE + 'num_steps = 1\n[code]\npaths = ["a\\u0000b"]',
    "NUL in a key": BASE + 'num_steps = 1\n[slurm.environment]\n"a\\u0000" = "b"',
    "many steps": BASE + "num_steps = 99999999999999999999",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_config_bomb_is_refused_within_a_second(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / "bomb.toml"
    path.write_text(BOMBS[bomb])
    began = time.process_time()
    with pytest.raises(BadConfig) as refused:
        config.load(path)
    assert time.process_time() - began < 1.0
    assert len(str(refused.value)) < 10_000
    site = load_site()
    site.home.mkdir(parents=True)
    shutil.copy(path, site.home / "rlhf.toml")
    began = time.process_time()
    with pytest.raises(BadConfig):
        load_site()
    assert time.process_time() - began < 1.0


def test_bytes_that_are_no_config(tmp_path: Path) -> None:
    for number, content in enumerate((b"\xff\xfe", b"name = '\xff'", b"\x00", b"a = \x80")):
        path = tmp_path / f"{number}.toml"
        path.write_bytes(content)
        with pytest.raises(BadConfig):
            read_toml(path)
    assert 100 * len(BASE) < MAX_CONFIG_BYTES
    with pytest.raises(BadConfig, match="is not accessible: File name too long"):
        config.find("x" * 5_000)


@pytest.mark.parametrize(
    "override",
    [
        "train.num_steps=99999999999999999999",
        "train.num_steps=" + "9" * 5_000,
        "sft.num_steps=2147483648",
        "seed=" + "9" * 5_000,
        "resources.num_nodes=2147483648",
        ".".join("a" * 50_000) + "=1",
        "train.num_steps=" + "[" * 50_000,
        "code.paths=['a\\u0000']" + "\udcff",
        'model.config={model_type = "a\\u0000"}',
        "model.config={" + ".".join("a" * 50_000) + "=1}",
        "x" * 100_000,
        "=1",
    ],
)
def test_an_override_that_cannot_be_is_a_clear_error(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main.execute(["check", "quickstart", "--set", override]) == 2
    assert time.process_time() - began < 5.0
    shown = capsys.readouterr().err
    assert "bug" not in shown
    assert len(shown) < 10_000


def test_too_many_steps_name_the_setting_and_what_it_takes() -> None:
    with pytest.raises(BadConfig, match=r"main\.num_steps: found 99999999999999999999, expected at most"):
        config.load("quickstart", ["loops.main.num_steps=99999999999999999999"])


def test_folders_whose_names_are_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    with pytest.raises(BadConfig, match="expected a UTF-8 path"):
        absolute_paths(make_spec(model={"path": "m", "config": {}, "tokenizer": ""}), folder)
    assert absolute_paths(make_spec(), folder).name == "small", "it names no path"
    for variable in ("RLHF_HOME", "RLHF_RUNS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(folder))
            with pytest.raises(BadConfig, match=f"{variable}: found .* expected a UTF-8 path"):
                load_site()


# ---------------------------------------------------------------------------------------------------------------------
# File names in manifests, job ids in submissions


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "model/../../x", "", "a\x00b", "x" * 5_000, ".."])
def test_a_manifest_names_no_file_outside_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    run = whole_run(tmp_path / "runs")
    checkpoint = run.dir.checkpoint(8)
    found = checkpoint.manifest()
    assert found is not None
    with pytest.raises(ValidationError):
        CheckpointManifest.model_validate({**found.model_dump(), "files": {name: {"bytes": 1, "sha256": ""}}})
    text = checkpoint.complete.read_text().replace("model/config.json", name.replace("\x00", "\\u0000"))
    checkpoint.complete.write_text(text)
    assert checkpoint.manifest() is None, "it does not count"
    assert [one.step for one in run.dir.checkpoints()] == [2, 4, 10]
    assert "not a valid manifest" in checkpoint.damage()[0]


def test_a_link_in_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "runs")
    checkpoint = run.dir.checkpoint(8)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (checkpoint.model).mkdir(parents=True)
    (checkpoint.model / "config.json").symlink_to(secret)
    assert any("found a symbolic link" in problem for problem in checkpoint.damage())
    assert FileChecksum(bytes=2**63 - 1, sha256="").bytes > 0


JOBS = ("-A", "--full", "101 102", "101,102", "1_[0-9]", "", "a;b", "x" * 65, "101\n102", "٤٢", "*")


@pytest.mark.parametrize("job_id", JOBS)
def test_no_job_id_of_a_file_reaches_a_command_line_unchecked(
    job_id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match="job_id"):
        Submission(attempt=1, scheduler="slurm", job_id=job_id, command=("x",))
    run_dir = make_run(tmp_path / "runs")
    good = Submission(attempt=1, scheduler="slurm", job_id="101", command=("x",))
    asked: list[tuple[str, ...]] = []

    def run(*words: str, **options: Any) -> str:
        asked.append(words)
        return ""

    monkeypatch.setattr(commands, "run", run)
    monkeypatch.setattr(queue, "listing", lambda max_age_s=0.0: queue.Listing(0.0, {}))
    slipped = good.model_copy(update={"job_id": job_id})
    with pytest.raises(SchedulerError, match="expected a Slurm job number"):
        SlurmScheduler().cancel(slipped)
    assert SlurmScheduler().status([slipped])[job_id].state is JobState.UNKNOWN
    assert asked == []
    assert LocalScheduler().status([slipped])[job_id].state is JobState.ENDED
    assert run_dir.spec.is_file()


def test_jobs_of_slurm_are_taken() -> None:
    for job_id in ("1", "4711", "4711_3", "4711+1"):
        assert commands.require_job_id(Submission(attempt=1, scheduler="", job_id=job_id, command=()).job_id)
    assert FakeScheduler().name == "local"


# ---------------------------------------------------------------------------------------------------------------------
# A disk that is nearly full


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_disk(tmp_path / "disk", "2m") as mount:
        yield mount


def test_a_history_is_whole_or_not_there_on_a_nearly_full_disk(disk: Path) -> None:
    file, filler = disk / "history.db", disk / "filler"
    url = f"sqlite:///{file}"
    whole = refused = 0
    messages: list[str] = []
    published: list[int] = []
    # Without the check of what SQLite left (`database.require_whole`), four of these would publish a broken file.
    for left_kib in range(60, 1_100, 75):
        filler.write_bytes(b"")
        room = os.statvfs(disk)
        filler.write_bytes(b"x" * max(0, room.f_bavail * room.f_bsize - (left_kib << 10)))
        try:
            with HistoryStore(url) as store:
                assert store.run_ids() == []
        except DatabaseUnavailable as error:
            refused += 1
            messages.append(str(error))
            published += [left_kib] * file.exists()
        else:
            whole += 1
            _require_whole(file)
        filler.unlink()
        for path in disk.iterdir():
            path.unlink()
    assert published == []
    assert min(whole, refused) >= 3, (whole, refused)
    assert all("disk is full" in text or "cannot be created" in text for text in messages), messages


def _require_whole(file: Path) -> None:
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("SELECT count(*) FROM runs").fetchone() == (0,)
    connection.close()


def test_an_unwhole_history_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without an error about the full disk: SQLite copies its log when the last connection closes."""
    file = tmp_path / "history.db"
    real = migrate._migrate

    def without_its_log(url: Any) -> Any:
        done = real(url)
        unfinished = Path(str(url.database))
        content = unfinished.read_bytes()
        unfinished.write_bytes(content[: len(content) // 2])
        return done

    monkeypatch.setattr(migrate, "_migrate", without_its_log)
    with pytest.raises(DatabaseUnavailable):
        migrate.upgrade(parse_url(f"sqlite:///{file}"))
    assert list(tmp_path.glob("*history*")) == []
