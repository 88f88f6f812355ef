"""Bad input and a full disk: a clear message, the right exit code, and no loss of existing data."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import Site
from small_disk import small_disk

from rlhf_core.cli import main

pytestmark = pytest.mark.end_to_end


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("loops.main.num_stepps=3", 'did you mean "loops.main.num_steps"'),
        ("loops.main.num_steps=many", "loops.main.num_steps: found 'many'"),
        ("loops.main.algorithm.prompts_per_step=7", "prompts_per_step"),
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


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "6m") as mount:
        yield mount


@pytest.mark.training
def test_a_full_disk_at_checkpoint_time_loses_nothing(site: Site, disk: Path) -> None:
    site.variables["RLHF_RUNS"] = str(disk)
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

    kept = RunDir(disk / run["run_id"]).checkpoints()
    assert [checkpoint.step for checkpoint in kept] == [row["step"] for row in shown["checkpoints"]]
    for checkpoint in kept:
        assert checkpoint.damage() == []
