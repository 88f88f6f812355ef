"""The worker of one rank of an external trainer: starts the program or finds its rank, and sends its heartbeats.

The worker exits with the rank's exit code or signal, so that everything that follows (verdict, incident, decision,
restart) is the same as for a native worker. The program's output goes to the worker's log.
"""

import os
import signal
import time
from pathlib import Path

from rlhf_core.errors import BadInput, TrainerIncomplete
from rlhf_core.files.lookups import paths_in
from rlhf_core.schemas.command_trainer import SIGHTS, CommandTrainer, ProgressSource
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.types import RoleResult, WorkerContext
from rlhf_core.worker import processes
from rlhf_core.worker.command.job_record import JobRecord
from rlhf_core.worker.command.launch import LaunchPlace
from rlhf_core.worker.command.launch_order import agree
from rlhf_core.worker.command.observation import Source, Watched
from rlhf_core.worker.command.peer_output import PeerOutput, prints_steps
from rlhf_core.worker.command.program import TrainerProgram
from rlhf_core.worker.command.progress import Readings, TrainerProgress
from rlhf_core.worker.command.rank_output import RankOutput
from rlhf_core.worker.command.save_requests import SaveRequests
from rlhf_core.worker.command.sources import make_sources
from rlhf_core.worker.in_rank import rlhf_rank_file as words
from rlhf_core.worker.liveness import collectives
from rlhf_core.worker.liveness.heartbeat import Beat
from rlhf_core.worker.worker_process import SLOTS_VARIABLE

POLL_INTERVAL_S = 0.1
SOURCES_INTERVAL_S = 0.5
CASCADE_TIMEOUT_S = 5.0
"""Time that the worker of a rank killed by its launcher waits, in seconds: to be killed by the agent if another rank
failed first, and to see the checkpoint after which the program was stopped."""
MAX_LAST_POLLS = 100
LAST_POLL_STEP_S = 60.0
LAST_STEP_TIMEOUT_S = 10.0
"""Time that the last step may take from the log of another rank to this worker, in seconds."""
STEPS_ALONE = 3
"""Steps after which a rank without a process group is judged to train alone."""


def run_command_trainer(context: WorkerContext) -> RoleResult:
    """Run the ``trainer`` role with an external program.

    Raises:
        TrainerIncomplete: it exited cleanly but too early, without completing its last checkpoint, or began at a step
            other than the one it was given.
        CheckpointCorrupt: the checkpoint to resume from is damaged.
        BadInput: the program cannot be started.
    """
    context.reporter.beat(Phase.SETUP, 0)
    return Follower(context).run()


class Follower:
    """One worker during one start of the program."""

    def __init__(self, context: WorkerContext) -> None:
        trainer, reporter = context.spec.trainer, context.reporter
        if not isinstance(trainer, CommandTrainer) or not isinstance(reporter, Beat):
            raise BadInput("the trainer of this run is native, or its worker was not started by an agent")
        self._context = context
        self._trainer = trainer
        self._beat = reporter
        prefix = f"{os.environ[SLOTS_VARIABLE]}.rank-{context.restart}"
        self._status = words.RankFile(words.rank_path(prefix, context.local_rank), create=True)
        self._place = LaunchPlace(context, trainer, agree(context, trainer))
        checkpoint, first_step = self._place.order.checkpoint, int(self._place.values["checkpoint_step"])
        self._program = TrainerProgram(self._place, self._status, prefix, reporter)
        self._progress = TrainerProgress(trainer, first_step, checkpoint, reporter.step_of_group)
        self._sources: list[Source] = []
        self._peers: PeerOutput | None = None
        self._next_poll_s = 0.0
        self._output = RankOutput(self._place.rank_output, context.local_rank, follows=trainer.launch == "per_node")
        self._record = JobRecord(context, trainer, self._place.output_dir, first_step)
        if context.rank == 0 and checkpoint:
            self._record.recover(context.run_dir.checkpoints_dir / checkpoint)
        self._saves = SaveRequests(context, trainer, self._status, self._program)
        collectives.answer_from(self._recorder)

    def run(self) -> RoleResult:
        """Follow the program until it exits."""
        with self._program.launched():
            watched = self._watched()
            self._sources = make_sources(watched, self._status)
            if self._context.rank == 0 and ProgressSource.STDOUT in self._trainer.sources:
                self._peers = PeerOutput(watched, self._logs_of_peers)
            while not self._program.has_ended():
                self._poll(time.monotonic())
            self._drain(time.monotonic())
            return self._conclude()

    def _watched(self) -> Watched:
        place = self._place
        return Watched(
            trainer=self._trainer,
            output_dir=place.output_dir,
            started_at_s=time.time(),
            # Rank 0 writes it after the earlier program has ended and before this one is started.
            files_since_s=self._context.restart_dir.launch_order.stat().st_mtime,
            first_step=self._progress.first_step,
            logs=self._logs_of_rank,
            pids=self._program.pids,
        )

    def _logs_of_rank(self) -> list[Path]:
        """The worker's own log. Without a rank of its own, as with Ray, its job is that of the first worker."""
        context = self._context
        own = context.restart_dir.log(context.role, context.node, context.local_rank)
        first = context.restart_dir.log(context.role, self._place.order.node or context.node, 0)
        return [own] if self._program.rank is not None or first == own else [own, first]

    def _logs_of_peers(self) -> list[Path]:
        context = self._context
        own = context.restart_dir.log(context.role, context.node, context.local_rank)
        return [path for path in paths_in(own.parent, f"{context.role}-*.log") if path != own]

    # -----------------------------------------------------------------------------------------------------------------
    # Following

    def _poll(self, now_s: float) -> None:
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + SOURCES_INTERVAL_S
        self._output.copy()
        progress, beat = self._progress, self._beat
        if progress.phase is Phase.TRAIN:  # mere signs of life, which take processor time to find, no longer count
            self._sources = [source for source in self._sources if SIGHTS[source.kind].is_strong]
        readings = [(source.kind, source.poll(now_s)) for source in self._sources]
        if ProgressSource.COLLECTIVES in self._trainer.sources:
            beat.stand_at(self._status.get(words.ENTERED), self._status.get(words.LEFT))
        self._note_steps(readings)
        if progress.advance(readings, is_between_collectives=beat.entered == beat.left):
            beat.beat(progress.phase, progress.step)
        if self._context.rank == 0:
            self._record_readings(readings, now_s, ended=False)
        self._saves.answer(beat.request(), progress.step, now_s)

    def _drain(self, now_s: float) -> None:
        """Read the program's last output. Sources poll at intervals, so the clock is moved forward."""
        self._output.copy()
        written = [source for source in self._sources if SIGHTS[source.kind].is_strong]
        readings = []
        for number in range(1, MAX_LAST_POLLS):
            new = [(source.kind, source.poll(now_s + number * LAST_POLL_STEP_S)) for source in written]
            readings += new
            self._note_steps(new)
            if not any(one.moved or one.metrics for _, one in new):
                break
        if self._context.rank == 0:
            self._record_readings(readings, now_s, ended=True)
            if self._saves.is_stop_requested:  # it may exit with another code than 0 once it has saved
                self._record.publish_last()

    def _note_steps(self, readings: Readings) -> None:
        """Record the program's current step; raise if it has started from scratch or if ranks train alone."""
        self._progress.note_steps(readings)
        self._require_together()

    def _record_readings(self, own: Readings, now_s: float, *, ended: bool) -> None:
        """Record readings of rank 0, with the steps and metrics that another rank prints if this one prints none."""
        first_step = self._progress.first_step
        if any(kind is ProgressSource.STDOUT and prints_steps(one, first_step) for kind, one in own):
            self._peers = None
        has_begun = max(self._progress.step, self._beat.step_of_group()) > first_step
        of_peers = self._peers.poll(now_s) if self._peers is not None and (has_begun or ended) else ()
        self._record.take([*own, *of_peers], now_s, ended=ended)

    def _require_together(self) -> None:
        """Raise if ranks train alone: none fails, each produces the same model, and all but one waste their work.

        Accelerate does that if it finds no GPU and is not configured to use CPUs (``ACCELERATE_USE_CPU``).
        """
        num_steps, num_ranks = self._progress.step - self._progress.first_step, self._context.num_ranks
        alone = self._status.get(words.GROUP) == words.NO_GROUP and self._trainer.framework != "script"
        if alone and num_ranks > 1 and num_steps >= STEPS_ALONE:
            raise BadInput(
                f"found {num_steps} steps of {num_ranks} ranks without a process group, expected ranks that train "
                "together: each rank trains the whole model alone. Check the rendezvous options of the launch line; on "
                "CPU pass --use_cpu true or set ACCELERATE_USE_CPU=true"
            )

    def _recorder(self) -> str:
        """The content of the rank's flight recorder, which it writes on request."""
        number = self._beat.questions()
        self._status.set(words.QUESTION, number)
        deadline = time.monotonic() + collectives.ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._status.get(words.ANSWERED) == number:
                return Path(self._status.answer_path).read_text(encoding="utf-8")
            time.sleep(POLL_INTERVAL_S)
        return "{}"

    # -----------------------------------------------------------------------------------------------------------------
    # End

    def _conclude(self) -> RoleResult:
        code = self._program.exit_code()
        if code != 0:
            if self._has_stopped(code):
                is_last = self._saves.newest_step >= self._trainer.num_steps
                return RoleResult.DONE if is_last else RoleResult.STOPPED_EARLY
            processes.exit_as(code)
        if self._context.rank != 0:
            return RoleResult.DONE  # rank 0 judges a program that exited cleanly: it has the steps and checkpoints
        self._await_last_step()
        self._record.close(self._beat_again)
        if not self._is_complete():
            if self._saves.is_stopping:
                return RoleResult.STOPPED_EARLY
            raise self._incomplete()
        self._record.require_last_checkpoint()
        return RoleResult.DONE

    def _await_last_step(self) -> None:
        """Wait for the last steps if another rank prints them: its worker reads them at the same time as this one."""
        deadline = time.monotonic() + LAST_STEP_TIMEOUT_S
        is_expected = self._peers is not None and self._trainer.reports_steps and not self._saves.is_stop_requested
        while is_expected and self._last_step() < self._trainer.num_steps and time.monotonic() < deadline:
            self._beat_again()
            time.sleep(SOURCES_INTERVAL_S)
            self._record_readings((), time.monotonic(), ended=True)

    def _beat_again(self) -> None:
        self._beat.beat(self._progress.phase, self._progress.step)

    def _has_stopped(self, code: int) -> bool:
        """True if the program was asked to stop and has saved its state, whatever it exited with then.

        The first of its workers that sees the checkpoint ends the launcher, which takes less time than the others need
        to see it. The same wait is for the agent, if the launcher killed the rank because another one failed.
        """
        is_killed_by_launcher = self._program.launcher is None and code == -signal.SIGTERM
        deadline = time.monotonic() + CASCADE_TIMEOUT_S
        while is_killed_by_launcher or self._saves.is_stop_requested:
            if self._saves.is_stopping:
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL_S)
        return False

    def _is_complete(self) -> bool:
        """True if the program made its last step, or reports none that could tell otherwise."""
        step = self._last_step()
        if step >= self._trainer.num_steps:
            return True
        if step == self._progress.first_step and self._trainer.framework == "script" and not self._record.newest_step:
            print("the program reported no steps; it ended with exit code 0", flush=True)
            return True
        return False

    def _incomplete(self) -> TrainerIncomplete:
        step, wanted = self._last_step(), self._trainer.num_steps
        trained = f"{step} of {wanted} steps" if step > self._progress.first_step else "no step"
        return TrainerIncomplete(
            f"the trainer ended with exit code 0 after {trained}. Expected trainer.num_steps = {wanted}: pass the "
            "same number to it (for instance --max_steps {num_steps}), or find the reason in its log"
        )

    def _last_step(self) -> int:
        of_peers = self._peers.step if self._peers is not None else 0
        return max(self._progress.step, of_peers, self._record.newest_step)
