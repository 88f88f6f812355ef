"""Files of a site and of runs against another user of the machine: they are neither read, planted nor held.

The other user is real if the tests run as root; otherwise these tests are skipped.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_fakes import make_run

from flows import serving
from flows.server import temporary as temporary_server
from rlhf_core.cli import doctor, output
from rlhf_core.config.site import load_site
from rlhf_core.files import private as private_files
from rlhf_core.history.store import HistoryStore
from rlhf_core.scheduler.slurm import queue
from rlhf_core.worker.liveness.heartbeat import SlotFile, slots_folder

OTHER = 65534
"""User and group that own nothing else."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")


def as_other(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script as another user of the machine."""
    return subprocess.run(
        ["sh", "-c", script, "sh", *map(str, words)],
        user=OTHER,
        group=OTHER,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def all_below(folder: Path) -> list[Path]:
    return [folder, *folder.rglob("*")]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach, like home folders and /tmp, and a umask that removes no permissions."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-test-"))
    folder.chmod(0o755)
    before = os.umask(0)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


def old_home(place: Path) -> Path:
    """A home folder as created by version 0.1."""
    home = place / "home"
    for name in (
        "prefect/prefect.db",
        "prefect/prefect.db-wal",
        "logs/server.log",
        "services/server.json",
        "history.db",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("secret")
    return home


# ---------------------------------------------------------------------------------------------------------------------
# The home folder


def test_a_home_folder_is_of_its_owner_alone_whatever_the_umask(place: Path) -> None:
    site = load_site({"RLHF_HOME": str(place / "deep" / "home")})
    assert not site.home.exists(), "inspection changes nothing"
    with HistoryStore(site.database_url):
        assert mode(site.home) == 0o700
        databases = [path for path in all_below(site.home) if path.is_file()]
        assert {path.name for path in databases} >= {"history.db", "history.db-wal", "history.db-shm"}
        assert {mode(path) for path in databases} == {0o600}


def test_a_home_folder_of_an_older_version_is_closed(place: Path) -> None:
    home = old_home(place)
    assert mode(home / "prefect" / "prefect.db") & 0o077, "control"
    load_site({"RLHF_HOME": str(home)})
    for name in (".", "prefect", "logs", "services"):
        assert mode(home / name) == 0o700
    for name in ("history.db", "prefect/prefect.db", "prefect/prefect.db-wal"):
        assert mode(home / name) == 0o600


@needs_root
def test_another_user_reads_nothing_of_a_home_folder(place: Path) -> None:
    home = old_home(place)
    assert "secret" in as_other('cat "$1"/prefect/prefect.db', home).stdout, "control: it was readable before"
    load_site({"RLHF_HOME": str(home)})
    done = as_other('cat "$1"/prefect/prefect.db "$1"/history.db; ls -R "$1"; touch "$1"/x; echo tried', home)
    assert done.stdout == "tried\n"
    assert not (home / "x").exists()


@needs_root
def test_a_home_folder_of_another_user_is_left_unchanged(place: Path) -> None:
    home = old_home(place)
    os.chown(home, OTHER, OTHER)
    load_site({"RLHF_HOME": str(home)})
    assert mode(home) & 0o055


def test_the_servers_database_is_made_private(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = place / "made"
    write = f"open({str(made)!r}, 'w').write('key')"
    monkeypatch.setattr(temporary_server, "_command", lambda port: [sys.executable, "-c", write])
    monkeypatch.setattr(temporary_server, "_starts_in_time", lambda url, process, seconds: process.wait() == 0)
    with (place / "log").open("wb") as log:
        temporary_server._start(place, log.fileno(), "rlhf:secret")
    assert mode(made) == 0o600
    monkeypatch.setattr("uvicorn.run", lambda *arguments, **options: (place / "served").write_text("key"))
    monkeypatch.setattr("flows.server.app.create_app", lambda names: None)
    monkeypatch.setattr(serving, "require_port_and_disk", lambda site: None)
    monkeypatch.setattr(serving, "_beat_while", lambda is_well, beat: None)
    serving._serve_server(load_site({"RLHF_HOME": str(place / "home")}), lambda: None)
    assert mode(place / "served") == 0o600


def test_doctor_names_what_others_may_read(place: Path) -> None:
    site = load_site({"RLHF_HOME": str(place / "home")})
    private_files.make_folder(site.home)
    assert doctor._private(site).ok
    secrets = site.home / "job-secrets.env"
    secrets.write_text("A=1")
    item = doctor._private(site)
    assert not item.ok
    assert str(secrets) in item.found
    assert item.advice == f"chmod go= {secrets}"


# ---------------------------------------------------------------------------------------------------------------------
# Run directories


@needs_root
def test_runs_are_private_and_a_group_reads_them_where_the_folder_says_so(place: Path) -> None:
    runs = place / "runs"
    runs.mkdir()
    private = make_run(runs).root
    assert as_other('cat "$1"/spec.json; ls "$1"; echo tried', private).stdout == "tried\n"
    os.chown(runs, -1, OTHER)
    runs.chmod(0o2750)
    shared = make_run(runs).root
    assert mode(shared) == 0o2750
    done = as_other('cat "$1"/spec.json; touch "$1"/x; rm -r "$1"; cat "$2"/spec.json', shared, private)
    assert "run_id" in done.stdout
    assert private.name not in done.stdout
    assert (shared / "spec.json").is_file()
    assert not (shared / "x").exists()


def test_a_folder_of_runs_that_is_made_here_is_private(place: Path) -> None:
    run_dir = make_run(place / "runs")
    assert mode(place / "runs") == 0o700
    assert mode(run_dir.root) == 0o700


# ---------------------------------------------------------------------------------------------------------------------
# Predictable names


@needs_root
@pytest.mark.parametrize(
    "squat",
    [
        'mkdir -m 777 "$1/rlhf-$2"',
        'ln -s "$1/victim" "$1/rlhf-$2"',
        'echo x > "$1/rlhf-$2"',
        'mkfifo "$1/rlhf-$2"; mkdir -m 777 "$1/rlhf-$2-1"',
    ],
)
def test_a_folder_that_another_user_put_in_our_place_is_not_used(place: Path, squat: str) -> None:
    place.chmod(0o1777)
    (place / "victim").mkdir()
    done = as_other(squat, place, os.geteuid())
    assert done.returncode == 0, done.stderr
    found = private_files.own_folder(place)
    assert found.lstat().st_uid == os.geteuid()
    assert mode(found) == 0o700
    assert found == private_files.own_folder(place), "the next agent finds the same"
    assert as_other('ls "$1"; touch "$1"/x; echo tried', found).stdout == "tried\n"
    assert list((place / "victim").iterdir()) == []


@needs_root
def test_slots_of_a_run_cannot_be_foreseen_held_or_read() -> None:
    run_id = f"toy-20260301-120000-{os.getpid():06x}"
    there = Path("/dev/shm") if slots_folder().is_relative_to("/dev/shm") else Path(tempfile.gettempdir())
    planted = there / f"rlhf-{run_id}-1-n1.slots"
    try:
        assert as_other('echo x > "$1"', planted).returncode == 0
        slots = SlotFile(run_id, 1, "n1", 2)
        assert mode(slots.path) == 0o600
        assert mode(slots.path.parent) == 0o700
        assert as_other('cat "$1"; ls "$2"; echo tried', slots.path, slots.path.parent).stdout == "tried\n"
        assert planted.read_text() == "x\n"
        slots.remove()
    finally:
        planted.unlink(missing_ok=True)


def test_a_report_of_an_error_follows_no_link_and_holds_no_secret(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.setattr("sys.argv", ["rlhf", "run", "--set", "a=postgresql://anna:hunter2@db/x"])
    (place / "file").write_text("no folder")
    output.report_unexpected(RuntimeError("password=hunter2 \udcff"), place / "file" / "logs")
    (report,) = place.glob("rlhf-error-*/*.log")
    assert (mode(report.parent), mode(report)) == (0o700, 0o600)
    assert "hunter2" not in report.read_text()
    assert "RuntimeError: password=***" in report.read_text()
    (place / "link").symlink_to(place / "target")
    with pytest.raises(FileExistsError):
        private_files.write_new(place / "link", "x")
    assert not (place / "target").exists()


@needs_root
def test_the_lock_of_the_queue_cannot_be_held_by_another_user(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    (place / "rlhf").mkdir()
    path = queue._cache_file()
    with queue._locked(path) as held:
        assert held
    done = as_other('exec 9< "$1" && flock --nonblock 9 && echo held', path.with_suffix(".lock"))
    assert done.stdout == ""
