"""The worker of one rank of an external trainer: starts the program or finds its rank, and sends its heartbeats.

The worker exits with the rank's exit code or signal, so that everything that follows (verdict, incident, decision,
restart) is the same as for a native worker. The program's output goes to the worker's log.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_core.errors import BadInput, TrainerIncomplete
from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.schemas.command_trainer import SIGHTS, CommandTrainer, ProgressSource
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.types import RoleResult, WorkerContext
from rlhf_core.worker import processes
from rlhf_core.worker.command.in_rank import rlhf_rank_file as words
from rlhf_core.worker.command.job_record import JobRecord
from rlhf_core.worker.command.launch import LaunchPlace
from rlhf_core.worker.command.launch_order import agree
from rlhf_core.worker.command.launcher_report import await_exit_code
from rlhf_core.worker.command.observation import Reading, Source, Watched
from rlhf_core.worker.command.rank_output import RankOutput
from rlhf_core.worker.command.rank_process import RankProcess, RankSearch
from rlhf_core.worker.command.save_requests import SaveRequests
from rlhf_core.worker.command.sources import make_sources
from rlhf_core.worker.liveness import collectives
from rlhf_core.worker.liveness.heartbeat import Beat
from rlhf_core.worker.liveness.inspection import descendants_of
from rlhf_core.worker.worker_process import SLOTS_VARIABLE

POLL_INTERVAL_S = 0.1
SOURCES_INTERVAL_S = 0.5
CASCADE_TIMEOUT_S = 5.0
"""Time that the worker of a rank killed by its launcher waits, in seconds: to be killed by the agent if another rank
failed first, and to see the checkpoint after which the program was stopped."""
LAUNCHER_TIMEOUT_S = 0.5
"""Time that the launcher of a failed rank has to exit and print what it saw, in seconds."""
BLAME_TIMEOUT_S = 1.0
"""Time that the worker of a launcher waits, in seconds, for the worker of the rank that the launcher blames to end."""
MAX_LAST_POLLS = 100
LAST_POLL_STEP_S = 60.0
STEPS_ALONE = 3
"""Steps after which a rank without a process group is judged to train alone."""
STEADY_POLLS = 16
"""Polls with progress after which a program that reports no steps counts as training."""


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
        self._prefix = f"{os.environ[SLOTS_VARIABLE]}.rank-{context.restart}"
        self._status = words.RankFile(words.rank_path(self._prefix, context.local_rank), create=True)
        self._place = LaunchPlace(context, trainer, agree(context, trainer))
        self._first_step = int(self._place.values["checkpoint_step"])
        self._step = self._first_step
        self._has_resumed = self._first_step == 0
        self._phase = Phase.SETUP
        self._has_strong = False
        self._num_strong = 0
        self._next_poll_s = 0.0
        self._failed_at_s: float | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._rank: RankProcess | None = None
        self._search = RankSearch(self._status, self._prefix, context.local_rank)
        self._output = RankOutput(self._logs, context.local_rank, follows=trainer.launch == "per_node")
        self._sources: list[Source] = []
        self._record = JobRecord(context, trainer, self._place.output_dir, self._first_step)
        if context.rank == 0 and self._place.order.checkpoint:
            self._record.recover(context.run_dir.checkpoints_dir / self._place.order.checkpoint)
        self._saves = SaveRequests(context, trainer, self._status)
        collectives.answer_from(self._recorder)

    @property
    def _logs(self) -> Path:
        return self._context.restart_dir.rank_output / self._context.node

    def run(self) -> RoleResult:
        """Follow the program until it exits."""
        with self._launched():
            self._sources = make_sources(self._watched(), self._status)
            while not self._has_ended():
                self._poll(time.monotonic())
            self._drain(time.monotonic())
            return self._conclude()

    # -----------------------------------------------------------------------------------------------------------------
    # Start

    @contextlib.contextmanager
    def _launched(self) -> Iterator[None]:
        """Start the program if this worker is the one that does, and leave no process of it behind."""
        if self._trainer.launch == "per_rank" or self._context.local_rank == 0:
            self._start()
        try:
            yield
        finally:
            if self._child is not None and self._child.poll() is None:
                self._child.kill()

    def _start(self) -> None:
        per_node = self._trainer.launch == "per_node"
        expected = range(self._place.ranks_per_node) if per_node else [self._context.local_rank]
        while not all(Path(words.rank_path(self._prefix, index)).exists() for index in expected):
            time.sleep(POLL_INTERVAL_S)
        place, arguments = self._place, self._place.arguments()
        folder = Path(self._trainer.environment) if self._trainer.environment else None
        environment = place.environment(self._prefix, os.environ, folder, self._logs)
        program = place.program(environment.get("PATH"))
        if program is None:
            where = place.working_dir if "/" in arguments[0] else environment.get("PATH")
            raise BadInput(f"found no program {arguments[0]} in {where}; set trainer.environment or its path")
        self._logs.mkdir(parents=True, exist_ok=True)
        print(f"starting: {shlex.join(arguments)}", flush=True)
        self._child = subprocess.Popen(
            [program, *arguments[1:]],
            env=environment,
            cwd=place.working_dir,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        self._saves.launcher = self._child.pid
        self._show_launcher(self._child.pid)

    def _show_launcher(self, pid: int) -> None:
        """Show the launcher to the workers of this node's ranks."""
        if self._trainer.launch == "per_node":
            for index in range(self._place.ranks_per_node):
                words.RankFile(words.rank_path(self._prefix, index)).set(words.LAUNCHER, pid)

    def _watched(self) -> Watched:
        place = self._place
        return Watched(
            trainer=self._trainer,
            output_dir=place.output_dir,
            started_at_s=time.time(),
            # Rank 0 writes it after the earlier program has ended and before this one is started.
            files_since_s=self._context.restart_dir.launch_order.stat().st_mtime,
            first_step=self._first_step,
            logs=self._logs_of_rank,
            pids=self._pids,
        )

    def _logs_of_rank(self) -> list[Path]:
        """The worker's own log. Without a rank of its own, as with Ray, its job is that of the first worker."""
        context = self._context
        own = context.restart_dir.log(context.role, context.node, context.local_rank)
        first = context.restart_dir.log(context.role, self._place.order.node or context.node, 0)
        return [own] if self._rank is not None or first == own else [own, first]

    def _pids(self) -> list[int]:
        """The rank and its descendants; without a rank, the launcher of this node with all that it has started."""
        pid = self._rank.pid if self._rank is not None else self._status.get(words.LAUNCHER)
        if pid <= 0:
            return []
        with contextlib.suppress(OSError):
            return [pid, *descendants_of(pid)]
        return [pid]

    # -----------------------------------------------------------------------------------------------------------------
    # Following

    def _has_ended(self) -> bool:
        """Wait briefly; True once the program, or this worker's rank of it, has exited."""
        if self._rank is None:
            self._find_rank()
        if self._child is not None:
            if self._rank is not None and not self._rank.has_ended:
                self._rank.poll(POLL_INTERVAL_S)
            else:
                time.sleep(POLL_INTERVAL_S)
            if self._child.poll() is not None:
                self._show_launcher(words.LAUNCHER_ENDED)
                return True
            return self._has_failed()
        if self._rank is None:
            time.sleep(POLL_INTERVAL_S)
            return self._status.get(words.LAUNCHER) == words.LAUNCHER_ENDED
        return self._rank.poll(POLL_INTERVAL_S)

    def _has_failed(self) -> bool:
        """True once the rank has failed and its launcher had a moment to report it: some take seconds to exit."""
        if self._rank is None or not self._rank.has_failed:
            return False
        self._failed_at_s = self._failed_at_s or time.monotonic()
        return time.monotonic() - self._failed_at_s > LAUNCHER_TIMEOUT_S

    def _find_rank(self) -> None:
        pid = self._search.find(time.monotonic())
        if pid is None and self._child is not None and self._trainer.launch == "per_rank":
            pid = self._child.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._rank = RankProcess(pid)
            self._rank.watch()
            self._saves.rank = self._rank
            self._beat.represent([pid])

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
            self._record.take(readings, now_s, ended=True)
            if self._saves.is_stop_requested:  # it may exit with another code than 0 once it has saved
                self._record.publish_last()

    def _poll(self, now_s: float) -> None:
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + SOURCES_INTERVAL_S
        self._output.copy()
        if self._phase is Phase.TRAIN:  # mere signs of life, which take processor time to find, no longer count
            self._sources = [source for source in self._sources if SIGHTS[source.kind].is_strong]
        readings = [(source.kind, source.poll(now_s)) for source in self._sources]
        if ProgressSource.COLLECTIVES in self._trainer.sources:
            self._beat.stand_at(self._status.get(words.ENTERED), self._status.get(words.LEFT))
        self._note_steps(readings)
        strong = any(one.moved and SIGHTS[kind].is_strong for kind, one in readings)
        self._has_strong = self._has_strong or strong
        self._num_strong += strong
        # A set-up has collectives as well, and between them a rank may prepare data for long while the others wait.
        is_setting_up = self._phase is Phase.SETUP and self._beat.entered == self._beat.left
        if strong or ((is_setting_up or not self._has_strong) and any(one.moved for _, one in readings)):
            self._phase = self._present_phase(readings)
            self._beat.beat(self._phase, self._step)
        if self._context.rank == 0:
            self._record.take(readings, now_s, ended=False)
        self._saves.answer(self._beat.request(), self._step, now_s)

    def _note_steps(self, readings: Sequence[tuple[ProgressSource, Reading]]) -> None:
        """Record the program's current step; raise if it has started from scratch."""
        steps = [(kind, one.step) for kind, one in readings if one.step is not None]
        # Once it has resumed, lower numbers count something else, such as epochs or the batches of an evaluation.
        self._has_resumed = self._has_resumed or any(step >= self._first_step for _, step in steps)
        for kind, step in steps:
            # A program that resumes may still log at step 0: an evaluation before training, or a scalar without a step.
            if not self._has_resumed and step > 0:
                raise TrainerIncomplete(
                    f"found step {step} ({kind}), expected {self._first_step} or later: the trainer was to resume "
                    f"from {self._place.order.checkpoint} but started over. Check trainer.resume and "
                    "trainer.resume_argv; the checkpoint is unchanged"
                )
            self._step = max(self._step, step)
        self._require_together()

    def _require_together(self) -> None:
        """Raise if ranks train alone: none fails, each produces the same model, and all but one waste their work.

        Accelerate does that if it finds no GPU and is not configured to use CPUs (``ACCELERATE_USE_CPU``).
        """
        alone = self._status.get(words.GROUP) == words.NO_GROUP and self._trainer.framework != "script"
        if alone and self._context.num_ranks > 1 and self._step >= self._first_step + STEPS_ALONE:
            raise BadInput(
                f"found {self._step - self._first_step} steps of {self._context.num_ranks} ranks without a process "
                "group, expected ranks that train together: each rank trains the whole model alone. Check the "
                "rendezvous options of the launch line; on CPU pass --use_cpu true or set ACCELERATE_USE_CPU=true"
            )

    def _present_phase(self, readings: Sequence[tuple[ProgressSource, Reading]]) -> Phase:
        reported = next((one.phase for _, one in readings if one.phase is not None), None)
        if self._step >= self._trainer.num_steps and reported in (None, Phase.TRAIN):
            # The program may now write, merge or upload its model for minutes, without a further step.
            return Phase.CHECKPOINT
        if reported is not None:
            return reported
        if self._step > self._first_step or self._phase is Phase.TRAIN:
            return Phase.TRAIN
        # Arbitrary programs may report no steps at all; continued progress is then the only evidence.
        silent = self._trainer.framework == "script" and self._num_strong > STEADY_POLLS
        return Phase.TRAIN if silent else Phase.SETUP

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
        code = self._exit_code()
        if code != 0:
            if self._has_stopped(code):
                is_last = self._saves.newest_step >= self._trainer.num_steps
                return RoleResult.DONE if is_last else RoleResult.STOPPED_EARLY
            processes.exit_as(code)
        if self._context.rank != 0:
            return RoleResult.DONE  # rank 0 judges a program that exited cleanly: it has the steps and checkpoints
        self._record.close(lambda: self._beat.beat(self._phase, self._step))
        if not self._is_complete():
            if self._saves.is_stopping:
                return RoleResult.STOPPED_EARLY
            raise self._incomplete()
        self._record.require_last_checkpoint()
        return RoleResult.DONE

    def _exit_code(self) -> int:
        self._read_reported_code()
        launcher = self._child.poll() if self._child is not None else None
        of_rank = self._rank.code if self._rank is not None else None
        # The launcher's own exit code, if it has exited, says less than the signal that killed its rank.
        if launcher == 0 or (self._child is not None and (self._rank is None or not self._rank.has_failed)):
            if launcher and of_rank == -signal.SIGTERM:
                time.sleep(BLAME_TIMEOUT_S)  # the agent ends this worker as soon as that of the failed rank has ended
            return launcher or 0
        return of_rank or 0

    def _read_reported_code(self) -> None:
        """Read the rank's exit code from the launcher's log if the launcher reaped the rank first."""
        rank = self._rank
        if rank is not None and rank.has_ended and rank.code is None and self._trainer.launch == "per_node":
            log = self._context.restart_dir.log(self._context.role, self._context.node, 0)
            rank.code = await_exit_code(log, rank.pid, CASCADE_TIMEOUT_S, self._has_launcher_exited)

    def _has_launcher_exited(self) -> bool:
        has_child_exited = self._child is not None and self._child.poll() is not None
        return has_child_exited or (self._rank is not None and self._rank.has_launcher_exited)

    def _has_stopped(self, code: int) -> bool:
        """True if the program was asked to stop and has saved its state, whatever it exited with then.

        The first of its workers that sees the checkpoint ends the launcher, which takes less time than the others need
        to see it. The same wait is for the agent, if the launcher killed the rank because another one failed.
        """
        is_killed_by_launcher = self._child is None and code == -signal.SIGTERM
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
        if step == self._first_step and self._trainer.framework == "script" and not self._record.newest_step:
            print("the program reported no steps; it ended with exit code 0", flush=True)
            return True
        return False

    def _incomplete(self) -> TrainerIncomplete:
        step, wanted = self._last_step(), self._trainer.num_steps
        trained = f"{step} of {wanted} steps" if step > self._first_step else "no step"
        return TrainerIncomplete(
            f"the trainer ended with exit code 0 after {trained}. Expected trainer.num_steps = {wanted}: pass the "
            "same number to it (for instance --max_steps {num_steps}), or find the reason in its log"
        )

    def _last_step(self) -> int:
        return max(self._step, self._record.newest_step)
