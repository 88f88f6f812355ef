"""``rlhf-run``: the Prefect flow of one run.

    preflight -> [allocate -> train -> evaluate] for each attempt -> promote

The controller (:mod:`rlhf_core.control.steps`) yields the steps one at a time, starting from the run's current state.
Each is a task run: a failed attempt shows as a failed task, the wait before the next one as a task, and the stages of
the next one as tasks again, with the excluded nodes in their names. The flow itself has no retries: the recovery policy
(:mod:`rlhf_core.control.attempts.recovery`) decides from the evidence of a failure whether and where to retry a job.
"""

import logging
import textwrap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from typing import Any

from prefect import State, flow, get_run_logger
from prefect.exceptions import CancelledRun, FailedRun
from prefect.states import Cancelled, Completed, Failed

from flows import schedules
from flows.flow_runs import driving
from flows.flow_runs.ended import end_run, leave_run
from flows.form import Form, meanings, overrides_of, read_form
from flows.gate import shown_in_prefect
from flows.limits import outlive_slots, run_slot
from flows.publishing.publisher import published
from flows.queries import RUN_FLOW
from flows.tasks import TaskRunner, without_prefect
from rlhf_core.config.site import Site, load_site
from rlhf_core.control.controller import Controller, opened
from rlhf_core.control.driving_flow_run import NO_FLOW_RUN, DrivingFlowRun
from rlhf_core.control.new_run import new_run
from rlhf_core.control.promotion import Question, describe
from rlhf_core.control.snapshots import kept_with
from rlhf_core.control.steps import Step, steps
from rlhf_core.errors import RlhfError, RunCancelled
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.regression import regression_text
from rlhf_core.survival import Survived
from rlhf_core.watchdog.evidence import regressed

DESCRIPTION = "One RLHF run: preflight, allocate, train, evaluate. Failures are diagnosed and retried."
"""Description in Prefect's list of flows."""

outlive_slots()


def carry_out(controller: Controller) -> None:
    """Run the steps as task runs: preflight, allocate, train, evaluate; again after a failure that is retried. Raises
    what :func:`rlhf_core.control.steps.steps` raises."""
    tasks = TaskRunner(controller.observer.log)
    with run_slot(controller) as release:

        def show_question(question: Question) -> AbstractContextManager[None]:
            release()  # a run that waits for an approval must not block other runs
            return shown_in_prefect(controller, question)

        controller.show_question = show_question
        for step in steps(controller):
            tasks.run(step)


def _described(function: Callable[..., State[None]]) -> Callable[..., State[None]]:
    """Give the flow function the docstring and the bounds from which Prefect builds its form."""
    arguments = "\n".join(f"{name}: {meaning}".replace("\n", "\n    ") for name, meaning in meanings().items())
    bounded = {name: field for name, field in Form.model_fields.items() if field.annotation in (str, int, float)}
    function.__annotations__ |= {name: field.rebuild_annotation() for name, field in bounded.items()}
    function.__doc__ = f"{DESCRIPTION}\n\nArgs:\n{textwrap.indent(arguments, '    ')}\n"
    return function


@flow(
    name=RUN_FLOW,
    description=DESCRIPTION,
    retries=0,
    persist_result=False,
    validate_parameters=False,  # flows.form validates, with advice in its messages
    on_cancellation=[end_run],
    on_crashed=[leave_run],
)
@_described
def rlhf_run(
    config: str = "",
    name: str = "",
    nodes: int = 0,
    gpus_per_node: int = -1,
    steps: int = 0,
    learning_rate: float = 0.0,
    seed: int = -1,
    owner: str = "",
    tags: str = "",
    overrides: str = "",
    run_id: str = "",
) -> State[None]:
    form = {name: value for name, value in locals().items() if name in Form.model_fields}
    for logger in ("prefect.flow_runs", "prefect.engine"):  # of the flow run, and of its process
        logging.getLogger(logger).addFilter(_is_news)
    try:
        handed = _handed.get()
        return _of_the_terminal(*handed) if handed is not None else _of_the_form(form)
    except RlhfError as error:
        # Raised on purpose, with a complete message: Prefect would also log a traceback.
        get_run_logger().error("%s", error)
        return Failed(message=str(error))


def _is_news(record: logging.LogRecord) -> bool:
    """Log filter, False for an error that the state of the flow run already describes: Prefect's engine raises a failed
    or cancelled state that a flow returned when it reads the result, and logs 2,800 characters of its internals."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, FailedRun | CancelledRun)


def ended_well(run_dir: RunDir, promoted: str = "") -> State[None]:
    """Final state of the flow run of a completed run; Prefect's lists show only its message."""
    parts = ["completed", regression_text(regressed(run_dir)), promoted]
    return Completed(message=f"run {run_dir.run_id} " + "; ".join(part for part in parts if part))


# ---------------------------------------------------------------------------------------------------------------------
# A run from the form: a flow run of a deployment, in a process that a worker started


def _of_the_form(given: Mapping[str, Any]) -> State[None]:
    """Create the run requested in Prefect, or continue it, and drive it to its end.

    Raises:
        BadInput: the form, the config or an override cannot be used, or preflight blocked.
    """
    form = read_form(given)
    site = load_site()
    busy = _busy_with(site)
    if busy:
        return Cancelled(message=f"skipped: {busy}")
    flow_run = driving.of_this_process(site)
    with HistoryStore(site.database_url) as store:
        run_dir, resumed = run_of_the_form(form, site, flow_run)
        driving.label(flow_run, run_dir, print)
        with opened(run_dir, site, store, resumed=resumed, flow_run=flow_run) as controller:
            return _finished(controller, _whole_run(controller))


def _busy_with(site: Site) -> str:
    """Reason not to start this flow run: its deployment skips scheduled times while its last run is still running."""
    flow_run = driving.present()
    if flow_run is None or not schedules.is_to_be_skipped(flow_run):
        return ""
    why = schedules.skipped_for(flow_run, site.runs_dir)
    if why:
        get_run_logger().warning("skipped: %s", why)
    return why


def run_of_the_form(form: Form, site: Site, flow_run: DrivingFlowRun) -> tuple[RunDir, bool]:
    """The run of this flow run, and True if it already existed: a retried flow run never creates a second run."""
    if form.run_id:
        return RunDir.of(site.runs_dir, form.run_id), not flow_run.adopts
    made = flow_run.run_dir(site.runs_dir)
    if made is not None:
        return made, True
    overrides = overrides_of(form)
    kept = kept_with(form.config)
    folder = kept.folder if kept is not None else site.home  # this process's folder is deleted when it ends
    new = new_run(form.config, overrides, site, folder=folder, owner=form.owner, tags=form.tags, flow_run=flow_run)
    return new, False


# ---------------------------------------------------------------------------------------------------------------------
# A run from a terminal: `rlhf run` already has a controller, and shows as a flow run while Prefect is reachable


_handed: ContextVar[tuple[Controller, Step] | None] = ContextVar("handed", default=None)
"""Controller and work that `rlhf run` hands to the flow in its own process."""


def run_in_prefect(controller: Controller) -> None:
    """Drive a run with an open controller as a flow run. Raises what :func:`rlhf_core.control.steps.steps` raises.

    Losing the Prefect server on the way affects only the display.
    """
    whole = _whole_run(controller)
    context = copy_context()
    context.run(_handed.set, (controller, whole))
    with Survived() as failed:  # Prefect's own errors do not stop a run; ours are kept in the step
        context.run(rlhf_run, run_id=controller.run_dir.run_id)
    if isinstance(failed.error, CancelledRun):
        if whole.error is None:
            raise failed.error
    elif failed.error is not None:
        without_prefect(whole, failed, controller.observer.log)
    whole.result()


def _of_the_terminal(controller: Controller, whole: Step) -> State[None]:
    flow_run = driving.of_this_process(controller.site)
    driving.label(flow_run, controller.run_dir, controller.observer.log)
    controller.record_controller(flow_run)
    return _finished(controller, whole)


# ---------------------------------------------------------------------------------------------------------------------


def _whole_run(controller: Controller) -> Step:
    """The whole run as one unit of work, done once even if Prefect fails before or after it starts."""

    def work() -> None:
        controller.record_controller(NO_FLOW_RUN)  # unless the flow run did: Prefect may have failed before that
        carry_out(controller)

    return Step("run", controller.run_dir.run_id, work)


def _finished(controller: Controller, whole: Step) -> State[None]:
    """Do the work and return its outcome as a Prefect state."""
    with published(controller):
        whole.run()
        try:
            whole.result()
        except RunCancelled as cancelled:
            return Cancelled(message=str(cancelled))
    return ended_well(controller.run_dir, describe(controller.journal.record.promotion))
