"""Bad input and a full disk: a clear message, the right exit code, and no loss of existing data."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_files import TINY
from sites import Site

from rlhf_core.cli import main

pytestmark = pytest.mark.end_to_end


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("loops.main.num_stepps=3", 'did you mean "loops.main.num_steps"'),
        ("loops.main.num_steps=many", "loops.main.num_steps: found 'many'"),
        ("loops.main.algorithm.prompts_per_step=7", "7"),
        ("reward.functions=['nowhere_to_be_found:reward']", "nowhere_to_be_found"),
        ("resources.num_nodes=2", "one node"),
    ],
)
def test_a_config_that_cannot_work_ends_with_2(
    site: Site, override: str, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(site.folder)
    for name, value in site.environment().items():
        monkeypatch.setenv(name, value)
    for command in (["check"], ["run", "--no-prefect"]):
        assert main.execute([*command, site.config(), "--set", override]) == 2
        output = capsys.readouterr()
        assert answer in output.out + output.err
        assert "Traceback" not in output.err


def test_a_malformed_line_is_named_by_file_and_number(site: Site) -> None:
    good = '{"prompt": "12>", "answer": "12"}\n'
    (site.home / "train.jsonl").write_text(good * 40 + '{"prompt": "3\n' + good)
    (site.home / "eval.jsonl").write_text(good.replace("12", "21"))
    without_generator = {name: None for name in TINY if name.startswith("data.generator")}
    ended = site.rlhf(
        "run",
        site.config(without_generator),
        "--no-prefect",
        "--set",
        "data.train=train.jsonl",
        "--set",
        "data.eval=eval.jsonl",
        code=2,
    )
    assert "train.jsonl:41" in (ended.stdout + ended.stderr).replace("\n", "")


def test_a_missing_file_is_named(site: Site) -> None:
    ended = site.rlhf("run", "nothing.toml", code=2)
    assert "nothing.toml" in ended.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.training
def test_a_full_disk_at_checkpoint_time_loses_nothing(site: Site, small_disk: Path) -> None:
    site.variables["RLHF_RUNS"] = str(small_disk)
    keep_all = ("--set", "checkpoint.keep_last=100", "--set", "checkpoint.every_num_steps=3")
    ended = site.rlhf("run", site.config(), "--no-prefect", *keep_all, code=None)
    assert ended.returncode in (1, 2), ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    (run,) = site.rlhf("runs", "--json").json()
    assert run["state"] == "failed"
    shown = site.rlhf("show", run["run_id"], "--json").json()
    assert [incident["failure_kind"] for incident in shown["incidents"]] == ["disk_full"]
    assert shown["decisions"][-1]["action"] == "stop"
    assert shown["checkpoints"], "this test is valid only if the disk filled after the first checkpoint"
    from rlhf_core.run_dir.run import RunDir

    kept = RunDir(small_disk / run["run_id"]).checkpoints()
    assert [checkpoint.step for checkpoint in kept] == [row["step"] for row in shown["checkpoints"]]
    for checkpoint in kept:
        assert checkpoint.damage() == []
