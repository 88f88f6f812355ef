"""The request to save and stop, as it reaches another program and is answered by a checkpoint."""

import errno
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from process_tools import until
from program_contexts import context_of, trainer_of
from watched_programs import started

from rlhf_core.run_dir.run import RunDir
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker.command.found_checkpoints import FoundCheckpoint
from rlhf_core.worker.command.published import publish
from rlhf_core.worker.command.save_requests import POLL_INTERVAL_S, SaveRequests
from rlhf_core.worker.in_rank import rlhf_rank_file as words


def save(context: WorkerContext, step: int) -> None:
    output_dir = context.run_dir.root / "output"
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.bin").write_text("weights")
    publish(context, trainer_of(context), output_dir, FoundCheckpoint(step, folder, complete=True))


def requests_of(context: WorkerContext, folder: Path, program: Mock, *, beats: int = 0) -> SaveRequests:
    status = words.RankFile(words.rank_path(str(folder / "ranks"), 0), create=True)
    status.set(words.BEATS, beats)
    return SaveRequests(context, trainer_of(context), status, program)


@pytest.mark.parametrize(
    ("beats", "save_signal", "steps", "answers"),
    [
        (1, "", (100, 117, 118), [False, False, True]),
        (0, "SIGUSR1", (100, 117), [False, True]),
        (0, "", (100,), [True]),
    ],
    ids=["callback", "signal", "own interval"],
)
def test_a_checkpoint_saved_before_the_request_is_no_answer_to_it(
    tmp_path: Path, beats: int, save_signal: str, steps: tuple[int, ...], answers: list[bool]
) -> None:
    """Step 100 was complete, but reading it took longer than the time until the request; the program is at step 118.

    Ended then, the program would be cut off in the midst of the save that it was asked for. One that cannot be asked is
    ended after any checkpoint.
    """
    context = context_of(tmp_path, save_signal=save_signal)
    save(context, 80)
    program = Mock(launcher=None)
    requests = requests_of(context, tmp_path, program, beats=beats)
    requests.answer("", 118, 0.0)
    assert not requests.is_stop_requested
    requests.answer("stop", 118, 1.0)
    assert (requests.is_stop_requested, requests.is_stopping) == (True, False)
    assert program.rank.send.call_args_list == ([((signal.SIGUSR1,),)] if save_signal else [])
    found = []
    for step in steps:
        save(context, step)
        found.append(requests.is_stopping)
    assert found == answers


def test_a_run_directory_that_cannot_be_read_delays_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run_dir: RunDir) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    context = context_of(tmp_path)
    save(context, 80)
    requests = requests_of(context, tmp_path, Mock(launcher=None))
    with monkeypatch.context() as broken:
        broken.setattr(RunDir, "newest_checkpoint", fail)
        requests.answer("stop", 90, 0.0)
        assert (requests.newest_step, requests.is_stop_requested) == (0, False)
    requests.answer("stop", 90, POLL_INTERVAL_S)
    assert (requests.newest_step, requests.is_stop_requested, requests.is_stopping) == (80, True, False)


PROGRAM = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
if sys.argv[2] == "True":
    signal.signal(signal.SIGUSR1, lambda *_: (folder / "asked").touch())
(folder / "ready").touch()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("argv", "has_handler", "refusal"),
    [
        (["python", "train.py"], True, ""),
        (["./train"], True, ""),
        (["python", "train.py"], False, "no handler of SIGUSR1"),
        (["torchrun", "train.py"], True, "a launcher in it"),
    ],
)
def test_a_program_whose_ranks_are_not_found_gets_the_signal_if_it_handles_it(
    tmp_path: Path, argv: list[str], has_handler: bool, refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with Ray and `mp.spawn`. The signal would end any other program, and a launcher would end its ranks."""
    context = context_of(tmp_path, argv=argv, save_signal="SIGUSR1")
    with started(PROGRAM, tmp_path, has_handler) as program:
        until((tmp_path / "ready").exists)
        requests = requests_of(context, tmp_path, Mock(rank=None, launcher=program.pid))
        requests.answer("stop", 9, 1.0)
        assert requests.is_stop_requested
        output = capsys.readouterr().out
        if refusal:
            assert refusal in output
            assert program.process.poll() is None
            assert not (tmp_path / "asked").exists()
        else:
            assert output == ""
            until((tmp_path / "asked").exists)
