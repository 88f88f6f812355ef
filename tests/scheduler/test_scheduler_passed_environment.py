"""Secrets passed to a job: the sources of their values, refused files, and their absence from all text."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from process_tools import until
from test_scheduler_local import make_request
from test_scheduler_slurm_text import stand_ins, submittable

from rlhf_core.errors import SubmissionFailed
from rlhf_core.scheduler.base import JobRequest, JobState
from rlhf_core.scheduler.local import LocalScheduler
from rlhf_core.scheduler.passed_environment import PassedEnvironment, read_private, without_private
from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler
from rlhf_core.schemas.cluster import SlurmSpec

CANARY = "c4nary-that-is-handed-over"
TELL = """
import os, sys
print("passed", os.environ.get("WANDB_API_KEY"), os.environ.get("RLHF_PASSED_ENVIRONMENT"), sys.argv, flush=True)
"""


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def slurm_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Slurm's programs; sbatch writes its arguments and its environment to files."""
    sbatch = f"""
echo "$@" > {folder}/words
cat /proc/$$/cmdline >> {folder}/words
env > {folder}/environment
for last; do :; done
cp "$last" {folder}/script
echo Submitted batch job 7
"""
    stand_ins(folder, monkeypatch, sbatch=sbatch)


def private_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "job-secrets.env"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_values_come_from_the_environment_and_then_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = private_file(tmp_path, "# of the team\nA=1\nexport B='2 3'\nC=\"4=5\"\n\nUNUSED=6\n")
    passed = PassedEnvironment(("A", "B", "C"), file)
    monkeypatch.setenv("A", "own")
    assert passed.values() == {"A": "own", "B": "2 3", "C": "4=5"}


def test_a_missing_value_is_named_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    file = private_file(tmp_path, f"A={CANARY}\nEMPTY=\n")
    with pytest.raises(SubmissionFailed) as error:
        PassedEnvironment(("A", "EMPTY", "WANDB_API_KEY"), file).values()
    assert str(error.value).startswith("EMPTY, WANDB_API_KEY: named in slurm.pass_environment")
    assert f"into {file} (mode 600)" in str(error.value)
    assert CANARY not in str(error.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o700 | 0o010], ids=oct)
def test_a_file_with_access_for_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = private_file(tmp_path, f"A={CANARY}", mode)
    with pytest.raises(SubmissionFailed, match=r"chmod 600") as error:
        read_private(file)
    assert CANARY not in str(error.value)
    file.chmod(0o400)
    assert read_private(file) == {"A": CANARY}, "the control: read by its owner alone"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = private_file(tmp_path, f"A={CANARY}")
    os.chown(file, 12345, -1)
    with pytest.raises(SubmissionFailed, match="belongs to user 12345, expected 0"):
        read_private(file)


def test_a_wrong_line_is_named_by_its_number_alone(tmp_path: Path) -> None:
    with pytest.raises(SubmissionFailed, match="line 2: expected NAME=value") as error:
        read_private(private_file(tmp_path, f"A=1\n{CANARY}\n"))
    assert CANARY not in str(error.value)


def test_secrets_of_the_control_plane_cannot_be_passed() -> None:
    for name in ("RLHF_DATABASE_URL", "PREFECT_SERVER_DATABASE_PASSWORD"):
        with pytest.raises(ValueError, match="which is private to the site"):
            SlurmSpec(pass_environment=(name,))
    with pytest.raises(ValueError, match=r"slurm\.environment and slurm\.pass_environment"):
        SlurmSpec(pass_environment=("A",), environment={"A": "1"})
    with pytest.raises(ValueError, match="expected the name of a variable"):
        SlurmSpec(pass_environment=("A=1",))


def test_the_names_of_site_and_run_are_combined_as_the_run_decides() -> None:
    site = SlurmSpec(pass_environment=("A", "B"), environment={"C": "open"})
    both = SlurmSpec(pass_environment=("C", "B"), environment={"A": "open"}).over(site)
    assert both.pass_environment == ("B", "C")
    assert both.environment == {"A": "open"}


def test_prefect_settings_are_never_passed() -> None:
    names = (
        *("PREFECT_API_KEY", "PREFECT_API_DATABASE_PASSWORD", "PREFECT_SERVER_DATABASE_PASSWORD"),
        *("PREFECT_API_ENCRYPTION_KEY", "PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_CLIENT_CUSTOM_HEADERS"),
        *("PREFECT_REDIS_MESSAGING_PASSWORD", "PGPASSWORD", "RLHF_DATABASE_URL", "RLHF_PREFECT_AUTH"),
    )
    assert without_private({**dict.fromkeys(names, CANARY), "PLAIN": "1"}) == {"PLAIN": "1"}


# ---------------------------------------------------------------------------------------------------------------------
# Both schedulers


def passing(job_request: JobRequest, file: Path | None = None) -> JobRequest:
    return replace(job_request, passed=PassedEnvironment(("WANDB_API_KEY",), file))


def test_a_local_job_gets_the_value_and_no_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    file = private_file(tmp_path, f"WANDB_API_KEY={CANARY}")
    done = tmp_path / "done"
    code = TELL + f"import pathlib, time\nwhile not pathlib.Path({str(done)!r}).exists(): time.sleep(0.05)\n"
    command = (sys.executable, "-c", code)
    job_request = passing(replace(make_request(tmp_path / "job"), command=command), file)
    scheduler = LocalScheduler()
    assert CANARY not in scheduler.script(job_request)
    assert 'WANDB_API_KEY="$WANDB_API_KEY"' in scheduler.script(job_request)
    assert CANARY not in repr(job_request)
    job = scheduler.submit(job_request)

    def at_work() -> list[list[str]]:
        lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return lines if any(code in line for line in lines) else []

    seen = until(at_work)
    done.touch()
    until(lambda: scheduler.status([job])[job.job_id].state is JobState.ENDED)
    (log,) = job_request.scheduler_dir.glob("*_log.out")
    assert log.read_text().startswith(f"passed {CANARY} WANDB_API_KEY ")
    log.unlink()
    assert not any(CANARY in word for line in seen for word in line)
    assert files_with(CANARY, tmp_path / "job") == []


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_no_job_is_submitted_without_the_value(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    slurm_stand_in(tmp_path, monkeypatch)
    job_request = passing(make_request(tmp_path / "job"), file=tmp_path / "job-secrets.env")
    scheduler = LocalScheduler() if kind == "local" else SlurmScheduler()
    with pytest.raises(SubmissionFailed, match="WANDB_API_KEY: named in"):
        scheduler.submit(job_request)
    assert not (tmp_path / "words").exists()
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    assert scheduler.submit(job_request).job_id, "the control"
    assert (tmp_path / "words").exists() == (kind == "slurm"), "the control"


@pytest.mark.parametrize(
    ("extra", "variable", "export"),
    [
        ((), None, ""),
        ((), "ALL", ""),
        ((), "NONE", "--export=WANDB_API_KEY"),
        (("--export=NONE",), None, "--export=WANDB_API_KEY"),
        (("--export=HOME,A=1",), None, "--export=HOME,A=1,WANDB_API_KEY"),
        (("--export=ALL,A=1",), "NONE", ""),
    ],
)
def test_sbatch_gets_the_value_in_its_environment_and_only_the_name_as_argument(
    extra: tuple[str, ...], variable: str | None, export: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_stand_in(tmp_path, monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_PASSWORD", CANARY)
    if variable is not None:
        monkeypatch.setenv("SBATCH_EXPORT", variable)
    SlurmScheduler().submit(passing(submittable(tmp_path, extra=extra)))
    words, environment = (tmp_path / "words").read_text(), (tmp_path / "environment").read_text().splitlines()
    assert f"WANDB_API_KEY={CANARY}" in environment
    assert [line for line in environment if CANARY in line] == [f"WANDB_API_KEY={CANARY}"], "and no secret of the site"
    assert CANARY not in words
    assert words.split()[0] == (export or words.split()[0])
    assert ("--export" in words.split()[0]) == bool(export)
    script = (tmp_path / "script").read_text()
    assert CANARY not in script
    assert "export RLHF_PASSED_ENVIRONMENT=WANDB_API_KEY" in script
    assert ': "${WANDB_API_KEY:?' in script
    assert files_with("RLHF_PASSED_ENVIRONMENT", tmp_path / "attempts"), "the control"
    assert files_with(CANARY, tmp_path / "attempts") == []
