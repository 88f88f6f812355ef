"""Output of ranks that torchrun writes to files of their own, copied into the worker's log."""

from pathlib import Path

import pytest

from rlhf_core.worker.command.rank_output import RankOutput


def test_output_is_copied_once_the_file_system_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run" / "attempt_0" / "1" / "stdout.log"
    file.parent.mkdir(parents=True)
    file.write_text("step 1\n")
    output = RankOutput(tmp_path, 1, follows=True)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "glob", fail)
        output.copy()
    assert capfd.readouterr().out == ""
    output.copy()
    output.copy()
    assert capfd.readouterr().out == "step 1\n"


def fail(self: Path, pattern: str) -> list[Path]:
    raise OSError(116, "Stale file handle")
