"""Values of ``[slurm]``, names of nodes and paths of runs in a batch script that bash really runs."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile
import pytest
from job_requests import job_request
from pydantic import ValidationError

from rlhf_core.config import loading as config
from rlhf_core.errors import BadConfig, SubmissionFailed
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.scheduler.passed_environment import PassedEnvironment
from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler
from rlhf_core.schemas.cluster import SlurmSpec

OPTIONS = ("partition", "account", "qos", "constraint", "gpu_type", "gres", "reservation")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
LINES = tuple(text for text in hostile.SHELL if not CONTROL.search(text))
BREAKS = tuple(text for text in hostile.SHELL if CONTROL.search(text))

SBATCH = """#!/bin/bash
for last; do :; done
cp "$last" script
bash "$last" > output 2>&1 || echo $? > failed
echo Submitted batch job 7
"""
SRUN = f"""#!{sys.executable}
import json, os, sys
json.dump([sys.argv, dict(os.environ)], open("srun.json", "w"))
"""
SCONTROL = """#!/bin/bash
case "$*" in ping) echo "Slurmctld(primary) at here is UP";; *hostnames*) echo n1;; esac
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which sbatch runs its script as a node would."""
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        program = tmp_path / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def request(folder: Path, slurm: SlurmSpec, **changes: Any) -> JobRequest:
    return job_request(
        folder / "runs" / "toy" / "attempts" / "1" / "scheduler",
        *(sys.executable, "-c", "pass"),
        run_id="toy-20260301-120000-aaaaaa",
        placed={"gpus_per_node": 2},
        slurm=slurm,
        **{"memory_gb": 1, **changes},
    )


def planted(folder: Path) -> list[Path]:
    return [*folder.rglob("PLANTED")]


def directives(script: str) -> dict[str, str]:
    """Directives as sbatch reads them: up to the first line that is a command (sbatch(1))."""
    head = itertools.takewhile(lambda line: not line or line.startswith("#"), script.split("\n"))
    found = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in head if line.startswith("#SBATCH")]
    return dict(one.removeprefix("--").partition("=")[::2] for one in found)


def test_every_value_stays_a_value_when_bash_runs_the_script(cluster: Path) -> None:
    """Quotes, substitutions and separators, in one line each: every value comes out unchanged."""
    for text in LINES:
        slurm = SlurmSpec(
            **dict.fromkeys(OPTIONS, text),
            container_kind="pyxis",
            container_image=text,
            container_mounts=(text,),
            environment={"PLAIN": text, "LINES": f"{text}\n{text}"},
            extra=(f"--mail-user={text}",),
        )
        SlurmScheduler().submit(request(cluster, slurm, command=(sys.executable, text, f"a\n{text}")))
        assert planted(cluster) == [], text
        assert not (cluster / "failed").exists(), (cluster / "output").read_text()
        script = (cluster / "script").read_text()
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        options = directives(script)
        assert [options[name] for name in ("partition", "account", "constraint", "mail-user")] == [text] * 4
        words, environment = json.loads((cluster / "srun.json").read_text())
        assert words[-3:] == [sys.executable, text, f"a\n{text}"]
        assert f"--container-image={text}" in words
        assert (environment["PLAIN"], environment["LINES"]) == (text, f"{text}\n{text}")


@pytest.mark.parametrize("name", [*OPTIONS, "container_image", "container_mounts", "exclude", "extra", "setup"])
def test_control_characters_are_refused_by_name(name: str) -> None:
    for text in BREAKS:
        if name == "setup" and not re.search(r"[\x00\r\x1b]", text):
            continue  # shell code of the user, which may have several lines
        values = {"container_kind": "pyxis", "container_image": "x"} if name.startswith("container") else {}
        value = [f"--option={text}" if name == "extra" else text] if name in LISTS else text
        with pytest.raises(ValidationError) as refused:
            SlurmSpec.model_validate({**values, name: value})
        assert {error["loc"][0] for error in refused.value.errors()} == {name}


LISTS = frozenset({"container_mounts", "exclude", "extra", "setup"})


@pytest.mark.parametrize(
    "name", ["A B", "A;touch PLANTED", "A=1", "1A", "", "A\n", "É", "A-B", "$(id)", "BASH_FUNC_x%%"]
)
def test_names_of_variables_are_names(name: str) -> None:
    with pytest.raises(ValidationError):
        SlurmSpec(environment={name: "x"})
    with pytest.raises(ValidationError):
        SlurmSpec(pass_environment=(name,))


@pytest.mark.parametrize("option", ["--a b=c", "touch PLANTED", "--$(id)", "--a\n=b", "---", "--a=b\nc", "x;y=z"])
def test_names_of_options_are_names(option: str) -> None:
    with pytest.raises(ValidationError):
        SlurmSpec(extra=(option,))


def test_the_message_says_what_to_change() -> None:
    with pytest.raises(BadConfig, match=r"slurm.partition: found 'gpu\\ntouch x', expected one line without control"):
        config.load("quickstart", ['slurm.partition="gpu\\ntouch x"'])


def test_what_no_schema_has_seen_is_refused_where_the_script_is_made(cluster: Path) -> None:
    """The last check covers values that no schema has validated: files of another writer, a path with a line break."""
    text = "x\ntouch PLANTED\n"
    for name in OPTIONS:
        slurm = SlurmSpec.model_construct(**{**SlurmSpec().__dict__, name: text})
        with pytest.raises(SubmissionFailed, match="without control characters"):
            SlurmScheduler().submit(request(cluster, slurm))
    with pytest.raises(SubmissionFailed, match="control characters"):
        SlurmScheduler().submit(request(cluster / text, SlurmSpec()))
    assert planted(cluster) == []


def test_a_node_that_cannot_be_called_so_is_not_excluded(cluster: Path) -> None:
    """Names of suspects come from files that a job's processes write."""
    excluded = ("n1", "n2\ntouch PLANTED", "$(touch PLANTED)", "n[3-4]")
    asked = request(cluster, SlurmSpec())
    asked = replace(asked, placement=asked.placement.model_copy(update={"excluded_nodes": excluded}))
    SlurmScheduler().submit(asked)
    assert directives((cluster / "script").read_text())["exclude"] == "n1,n[3-4]"
    assert planted(cluster) == []


def test_a_secret_with_shell_in_it_reaches_the_job_as_it_is(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in LINES:
        monkeypatch.setenv("MY_SECRET", text)
        passed = PassedEnvironment(("MY_SECRET",))
        SlurmScheduler().submit(request(cluster, SlurmSpec(pass_environment=("MY_SECRET",)), passed=passed))
        assert text not in (cluster / "script").read_text() or text in SRUN
        assert json.loads((cluster / "srun.json").read_text())[1]["MY_SECRET"] == text
    assert planted(cluster) == []


def test_without_the_refusal_a_line_break_runs_a_command(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: quotes alone are not enough, and this cluster runs the commands of a script."""
    monkeypatch.setattr("rlhf_core.scheduler.slurm.script._one_line", lambda name, value: value)
    slurm = SlurmSpec.model_construct(**{**SlurmSpec().__dict__, "partition": "x\ntouch PLANTED\n"})
    SlurmScheduler().submit(request(cluster, slurm))
    assert planted(cluster)
