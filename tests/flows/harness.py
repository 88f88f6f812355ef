"""A test harness that starts the controllers of one site one after the other, without waiting."""

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from control_fakes import Clock, FakeAgent, FakeScheduler, make_run
from kill_points import Killed, Points

from rlhf_core.config.site import Site
from rlhf_core.control.controller import Controller, Observer, opened
from rlhf_core.control.promotion import Question
from rlhf_core.control.steps import drive
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch import prepare, start
from rlhf_core.launch.journal import read_record
from rlhf_core.launch.lease import IfHeld
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.watcher import AttemptSnapshot

ShowQuestion = Callable[[Question], AbstractContextManager[None]]
"""Shows the question about a promotion."""


@dataclass
class Notes(Observer):
    """An observer that records everything it is notified of."""

    titles: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    snapshots: list[AttemptSnapshot] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    stop: Callable[[], bool] = lambda: False

    def follow(self, spec: RunSpec) -> None:
        self.totals.append(spec.total_steps)

    def stage_started(self, title: str) -> None:
        self.titles.append(title)

    def polled(self, snapshot: AttemptSnapshot) -> None:
        self.snapshots.append(snapshot)

    def log(self, text: str) -> None:
        self.messages.append(text)

    def stop_requested(self) -> bool:
        return self.stop()


@dataclass
class ControllerHarness:
    """Starts the controllers of one site, one after the other."""

    site: Site
    scheduler: FakeScheduler
    store: HistoryStore
    clock: Clock
    notes: Notes
    _stack: ExitStack

    def run(self, spec: RunSpec | None = None) -> RunDir:
        """A new run."""
        return make_run(self.site.runs_dir, spec)

    def good_run(self, spec: RunSpec | None = None) -> RunDir:
        """A new run whose jobs all succeed."""
        run_dir = self.run(spec)
        self.runs_well(run_dir)
        return run_dir

    def runs_well(self, run_dir: RunDir, after: int = 0, fail: Callable[[FakeAgent], object] | None = None) -> None:
        """Make every job of a run that is submitted from now on succeed, except for the first attempts.

        The attempts up to ``after`` are passed to ``fail`` instead.
        """

        def works(request: JobRequest) -> None:
            agent = FakeAgent(run_dir, request.placement.attempt)
            if fail is not None and agent.attempt <= after:
                fail(agent)
            else:
                agent.whole_run(request.placement.resumed_from_step)

        self.scheduler.on_submit = works

    def attempts(self, run_dir: RunDir, act: Callable[[FakeAgent], object]) -> None:
        """Make the agent of each attempt of a run that is submitted from now on do this."""
        self.scheduler.on_submit = lambda request: act(FakeAgent(run_dir, request.placement.attempt))

    def trains_for_ever(self, run_dir: RunDir) -> None:
        """Make every job of a run that is submitted from now on start training and never finish."""
        self.attempts(run_dir, FakeAgent.start)

    def completed(self, carry_out: Callable[[Controller], object] = drive) -> RunDir:
        """A completed run."""
        run_dir = self.good_run()
        carry_out(self.controller(run_dir))
        return run_dir

    def killed_in_training(self, spec: RunSpec | None = None) -> RunDir:
        """A run in training whose controller was killed."""
        run_dir = self.run(spec)
        self.notes.snapshots.clear()

        def killed() -> None:
            FakeAgent(run_dir).start()
            if len(self.notes.snapshots) == 2:
                raise Killed

        self.scheduler.on_status = killed
        with pytest.raises(Killed):
            drive(self.controller(run_dir))
        self.scheduler.on_status = lambda: None
        self._stack.close()
        assert read_record(run_dir).state is RunState.TRAINING
        return run_dir

    def controller(self, run_dir: RunDir, *, show: ShowQuestion | None = None, **options: Any) -> Controller:
        """A controller of a run, opened with these options; closed at the end of the test or by the next controller."""
        self._stack.close()
        controller = self._stack.enter_context(
            opened(run_dir, self.site, self.store, self.notes, if_held=IfHeld.FAIL, **options)
        )
        controller.clock, controller.sleep = self.clock, self.clock.sleep
        controller.poll_s = 1.0
        if show is not None:
            controller.show_question = show
        return controller


def live(site: ControllerHarness, run_dir: RunDir, kill_at: int | None) -> int:
    """Run one life of a controller; returns the number of kill points it passed."""
    return _lived(site, run_dir, Points(kill_at)).passed


def undisturbed(site: ControllerHarness, run_dir: RunDir) -> Points:
    """Run a life without a kill; its distinct points are those at which to kill the others."""
    return _lived(site, run_dir, Points(None, lambda: left_behind(site)))


def _lived(site: ControllerHarness, run_dir: RunDir, points: Points) -> Points:
    controller = site.controller(run_dir)
    with points.at_every_effect(site.scheduler, start, prepare):
        try:
            drive(controller)
        except Killed:
            assert points.is_deadly
    return points


def left_behind(site: ControllerHarness) -> bytes:
    """Digest of the state that the next controller finds after a kill right now: all files, and the jobs.

    The history is left out, because the next controller first updates it from those files.
    """
    digest = hashlib.blake2b(repr((site.scheduler.jobs, site.scheduler.cancelled)).encode())
    for path in sorted(site.site.home.rglob("*")):
        if not path.name.startswith("history.db"):
            digest.update(os.fsencode(path) + b"\0" + (path.read_bytes() if path.is_file() else b""))
    return digest.digest()
