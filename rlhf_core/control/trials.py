"""The trials of a run: small runs of their own that precede it, one after the other.

1. After preflight, trials are :func:`due` if the check ``trial.needed`` asks for them.
2. The run's journal records the id of a trial before its directory exists, so that it is created only once.
3. The trial has its own controller, and takes the steps of any run (:func:`rlhf_core.control.steps.drive`, which is
   passed in because the stages call this module). The observer of the run also observes the trial, and ends both
   together.
4. Its verdict is the result of a check of the run, which a failed trial blocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from rlhf_core.control.controller import CancelRequested, Controller, Observer, opened
from rlhf_core.control.views.summary import summarise
from rlhf_core.control.views.timeline import trials_of
from rlhf_core.errors import BadInput, LeaseLost, RunCancelled, RunFailed, SchedulerError
from rlhf_core.files.appended import read_models
from rlhf_core.launch.journal import read_record
from rlhf_core.launch.prepare import prepare_trial
from rlhf_core.preflight.trial import Rung, is_due, rungs, trial_spec
from rlhf_core.run_dir.run import RunDir, new_run_id
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.journal import TrialPlanned
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import count
from rlhf_core.watchdog.watcher import AttemptSnapshot

TRIAL = "trial"
"""Name of a trial, used in place of the name of a stage."""


def due(controller: Controller) -> tuple[Rung, ...]:
    """The trials to make before a run takes its nodes; for those already made, the verdict is known at once."""
    record = controller.journal.record
    if controller.stored.trial_of or record.attempts:
        return ()  # a run that has been on its nodes needs no trial any more
    return rungs(controller.spec) if record.trials or is_due(controller.spec, record.checks) else ()


def carry_out(controller: Controller, rung: Rung, drive: Callable[[Controller], None]) -> CheckResult:
    """Make a trial, or continue it, and return its verdict. A completed trial is not repeated.

    Raises:
        CancelRequested: a user asked to end the run. Its trial has been ended.
        LeaseLost: another controller has taken the run over.
        SchedulerError: the scheduler cannot be used, or a job could not be ended.
    """
    began = controller.clock()
    trial = _create(controller, rung)
    failure = "" if read_record(trial).state is RunState.COMPLETED else _run_to_end(controller, rung, trial, drive)
    verdict = _verdict(controller, rung, trial, failure)
    return verdict.model_copy(update={"seconds": controller.clock() - began})


def cancel_trials(controller: Controller, reason: str, cancel: Callable[[Controller, str], None]) -> None:
    """End the trial that the previous controller left running.

    Raises:
        SchedulerError: part of it is still running, or another controller drives it.
    """
    for trial in trials_of(controller.run_dir):
        if read_record(trial).ended:
            continue
        try:
            with _opened(controller, trial, controller.observer) as inner:
                cancel(inner, reason)
        except LeaseLost as error:
            raise SchedulerError(f"the trial {trial.run_id} could not be ended: {error}") from None


def _create(controller: Controller, rung: Rung) -> RunDir:
    trials = controller.journal.record.trials
    if rung.check_id not in trials:
        # Recorded first: if the controller is killed before the directory exists, the next one creates the same trial.
        planned = TrialPlanned(check_id=rung.check_id, run_id=new_run_id(controller.spec.name))
        controller.journal.append(planned)
    return prepare_trial(controller.run_dir, trials[rung.check_id], trial_spec(controller.spec, rung))


def _run_to_end(controller: Controller, rung: Rung, trial: RunDir, drive: Callable[[Controller], None]) -> str:
    """Bring a trial to its end. Returns the reason why it failed, or an empty text."""
    controller.observer.log(f"{rung.title}: run {trial.run_id}")
    observer = _TrialObserver(controller, rung.title)
    # A trial that had ended is resumed because the user resumed its run.
    resumed = read_record(trial).ended
    try:
        with _opened(controller, trial, observer, resumed=resumed) as inner:
            observer.follow(inner.spec)
            drive(inner)
    except (RunFailed, BadInput) as error:
        return _diagnosis(error)
    except RunCancelled as error:
        controller.check()  # raises if the run itself is being cancelled
        return _diagnosis(error)
    except LeaseLost as error:
        if controller.lease.lost:
            raise
        return _diagnosis(error)
    finally:
        observer.follow(controller.spec)
    return ""


@contextmanager
def _opened(
    controller: Controller, trial: RunDir, observer: Observer, *, resumed: bool = False
) -> Iterator[Controller]:
    """Act as the controller of a trial, with the clock of its run."""
    with opened(trial, controller.site, controller.store, observer, resumed=resumed) as inner:
        inner.clock, inner.sleep, inner.poll_s = controller.clock, controller.sleep, controller.poll_s
        yield inner


def _verdict(controller: Controller, rung: Rung, trial: RunDir, failure: str) -> CheckResult:
    if not failure:
        return CheckResult(id=rung.check_id, status=CheckStatus.PASSED, found=_success(rung, trial))
    has_fewer_nodes = rung.num_nodes < controller.spec.resources.num_nodes
    if has_fewer_nodes and (shortage := _shortage_of_memory(trial)):
        found = f"not possible on {rung.nodes}: {shortage}"
        return CheckResult(id=rung.check_id, status=CheckStatus.SKIPPED, found=found)
    return CheckResult(
        id=rung.check_id,
        status=CheckStatus.BLOCKED,
        found=f"{rung.title} failed: {failure}",
        expected="a trial that is completed",
        advice=f"`rlhf show {trial.run_id}` tells more; fix it, then start a new run, or "
        f"`rlhf resume {controller.run_dir.run_id}` where the config may stay as it is",
    )


def _shortage_of_memory(trial: RunDir) -> str:
    """Finding that blocked a trial if nothing but memory did: a model that is split over all nodes need not fit fewer.
    Otherwise empty."""
    blocked = [one for one in read_record(trial).checks if one.status is CheckStatus.BLOCKED]
    return "; ".join(one.found for one in blocked) if all(one.id.startswith("memory.") for one in blocked) else ""


def _diagnosis(error: Exception) -> str:
    """The diagnosis in one line, without the advice to resume the trial: it is the run that has to be resumed."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if not line.startswith("logs: "))


def _success(rung: Rung, trial: RunDir) -> str:
    summary = summarise(trial)
    seconds = [
        line.metrics["time/step_s"]
        for restart in trial.restarts()
        for line in read_models(restart.metrics, MetricsLine)
        if "time/step_s" in line.metrics
    ]
    pace = f", {median(seconds):.3g} s per step" if seconds else ""
    incidents = f", {len(summary.incidents)} incidents on the way" if summary.incidents else ""
    return f"{trial.run_id}: {summary.steps} steps on {count(rung.num_nodes, 'node')}{pace}{incidents}"


class _TrialObserver(Observer):
    """Passes the messages of a trial to the observer of its run, and checks the run whenever the trial is checked."""

    def __init__(self, controller: Controller, title: str) -> None:
        self._controller = controller
        self._title = title

    def follow(self, spec: RunSpec) -> None:
        """Switch to a run with this spec."""
        self._controller.observer.follow(spec)

    def stage_started(self, title: str) -> None:
        """A stage of the trial begins."""
        self._controller.observer.stage_started(f"{self._title}: {title}")

    def polled(self, snapshot: AttemptSnapshot) -> None:
        """The trial was polled."""
        self._controller.observer.polled(snapshot)

    def log(self, text: str) -> None:
        """Show a message to the user."""
        self._controller.observer.log(f"{self._title}: {text}")

    def stop_requested(self) -> bool:
        """Keep the lease of the run as well, and end the trial together with its run.

        Raises:
            CancelRequested: a user asked to end the run. Nothing of a trial is worth saving.
            LeaseLost: another controller has the run.
        """
        try:
            self._controller.check()
        except CancelRequested as request:
            raise CancelRequested(str(request)) from None
        return False
