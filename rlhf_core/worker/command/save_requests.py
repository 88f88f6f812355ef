"""Relays the request to save and stop to an external trainer.

The first of three methods that is available is used: ``rlhf_core.callback`` saves at a step that rank 0 announces;
``trainer.save_signal`` is sent to every rank, or to the program if its ranks are not found, it handles the signal and
is no launcher; for a program that supports neither, the worker waits for the next checkpoint that it saves by itself.
"""

import os
import signal
from typing import Literal

from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.shell.launch_line import read_launch_line
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker.command.program import TrainerProgram
from rlhf_core.worker.command.rank_process import RankProcess, has_handler
from rlhf_core.worker.in_rank import rlhf_rank_file as words

POLL_INTERVAL_S = 1.0
END_TIMEOUT_S = 20.0
"""Time a program has to exit after SIGTERM once its state is saved, in seconds."""


class SaveRequests:
    """Carries out the requests of the agent for one rank."""

    def __init__(
        self, context: WorkerContext, trainer: CommandTrainer, status: words.RankFile, program: TrainerProgram
    ) -> None:
        self._context = context
        self._signal = signal.Signals[trainer.save_signal] if trainer.save_signal else None
        # The ranks of a launcher may be found later. Most handle a signal by ending them.
        self._has_launcher = read_launch_line(trainer.argv).launcher not in ("", "python")
        self._status = status
        self._program = program
        self._newest_before = 0
        self._wanted_step = 0
        self._next_poll_s = 0.0
        self._is_ended = False
        self.is_stop_requested = False
        """True once the program was asked to stop, whether or not it has saved its state."""

    @property
    def is_stopping(self) -> bool:
        """True once the program was asked to stop and has saved its state.

        Checks again: a checkpoint is published some time after it was saved, and the program may have exited since.
        """
        newest = self.newest_step
        return self.is_stop_requested and newest > self._newest_before and newest >= self._wanted_step

    def answer(self, request: Literal["", "stop"], step: int, now_s: float) -> None:
        """Record a request and advance it.

        Args:
            request: Value of :meth:`rlhf_core.worker.liveness.heartbeat.Beat.request`.
            step: Newest known step of the program.
            now_s: Monotonic time in seconds.
        """
        if not request or self._is_ended or now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + POLL_INTERVAL_S
        if not self.is_stop_requested:
            self._begin(step)
        elif self.is_stopping:
            self._is_ended = True
            self._end()

    def _begin(self, step: int) -> None:
        try:
            self._newest_before = self._read_newest()
        except OSError:
            return  # begun at the next poll: an older checkpoint must not pass for the answer
        self.is_stop_requested = True
        self._status.set(words.STOP, 1)
        has_callback = self._status.get(words.BEATS) > 0
        if has_callback:
            # A checkpoint saved before may be published only now; ending the program then would cut the new one off.
            self._wanted_step = step
        elif self._signal is not None and self._send(self._signal):
            self._wanted_step = step - 1  # some programs print a step as it begins

    def _send(self, number: signal.Signals) -> bool:
        """Send the signal to the rank or, if none is found (Ray, ``mp.spawn``), to the program; True if it was sent."""
        rank, launcher = self._program.rank, self._program.launcher
        if rank is not None:
            rank.send(number)
            return True
        if launcher is None:
            return False  # another worker has started the program
        if self._has_launcher or not has_handler(launcher, number):
            what = "a launcher in it" if self._has_launcher else f"no handler of {number.name} in it"
            print(
                f"found no rank of the program with pid {launcher}, but {what}, so that the signal might end it: "
                "awaiting the next checkpoint that it saves by itself",
                flush=True,
            )
            return False
        os.kill(launcher, number)
        return True

    @property
    def newest_step(self) -> int:
        """Step of the newest published checkpoint, 0 if there is none or none can be read at the moment."""
        try:
            return self._read_newest()
        except OSError:
            return 0

    def _read_newest(self) -> int:
        newest = self._context.run_dir.newest_checkpoint()
        return newest.step if newest is not None else 0

    def _end(self) -> None:
        if self._program.launcher is None:
            return
        process = RankProcess(self._program.launcher)
        process.send(signal.SIGTERM)
        if not process.poll(END_TIMEOUT_S):
            process.send(signal.SIGKILL)
        process.close()
