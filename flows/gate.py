"""The promotion gate as a pause of the flow run: a form in Prefect's UI that shows the evaluation.

A separate thread talks to Prefect, so that the controller keeps its lease whatever the server does. The form's answer
is recorded like any other (``promotion.json``); an answer given elsewhere resumes the flow run.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from uuid import UUID, uuid4

from prefect import State, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.exceptions import PrefectHTTPStatusError
from prefect.input import RunInput
from prefect.input.run_input import Keyset, keyset_from_base_key
from prefect.states import Crashed, Paused
from pydantic import Field

from flows.publishing.artifacts import artifact_key
from flows.server.clients import api_client
from flows.server.settings import server_answers
from rlhf_core.condition_log import ConditionLog
from rlhf_core.control.controller import Controller
from rlhf_core.control.promotion import Question
from rlhf_core.launch.promote import give_answer, read_answer
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.promotion import PromotionAnswer
from rlhf_core.survival import Survived
from rlhf_core.text.formatting import THROUGH_PREFECT, attributed

POLL_INTERVAL_S = 2.0
"""Time between two polls for an answer."""

RETRY_INTERVAL_S = 10.0
"""Pause after a failure to reach Prefect."""

SHUTDOWN_TIMEOUT_S = 15.0
"""Time that the controller waits for Prefect to accept an answer."""

SLACK = timedelta(hours=1)
"""Margin by which Prefect's deadline is later than ours. Prefect fails a flow run that is not resumed in time; with a
live controller that does not happen."""

_KEY_PREFIX = "rlhf-promotion"
"""Prefix of the keys under which Prefect stores the form and the answer."""


class Approval(RunInput):
    """The form. It is flat and has a switch, because a drop-down does not open with the mouse in Prefect's older UI."""

    approve: bool = Field(
        default=False, description="On: it is promoted. Off: it is refused, whatever the button below is called."
    )
    by: str = Field(
        min_length=1, description=f"Your name; stands in the history and in the model card, as {THROUGH_PREFECT}."
    )
    reason: str = Field(default="", description="Why, in a sentence.")

    def as_answer(self) -> PromotionAnswer:
        """The answer to record. Any user with the server's password can enter any name, so the name is stored as a
        claim."""
        return PromotionAnswer(
            verdict="approved" if self.approve else "refused",
            by=attributed(self.by, THROUGH_PREFECT),
            reason=self.reason,
            time=utc_now(),
        )


@contextmanager
def shown_in_prefect(controller: Controller, question: Question) -> Iterator[None]:
    """Pause the flow run and show the form for the duration of the block. Outside a flow run this does nothing."""
    flow_run_id = runtime.flow_run.id
    if not flow_run_id:
        yield
        return
    thread = _GateThread(controller, question, UUID(flow_run_id))
    thread.start()
    try:
        yield
    finally:
        thread.close()


class _GateThread:
    """Thread that handles the approval in Prefect."""

    def __init__(self, controller: Controller, question: Question, flow_run_id: UUID) -> None:
        self._log = controller.observer.log
        self._question = question
        self._run_dir = question.run_dir
        self._flow_run_id = flow_run_id
        self._shown_keys: Keyset | None = None
        """Keys of the form on display; None before it is shown."""
        self._shown = False
        self._outage = ConditionLog(self._log)
        self._stop = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="prefect-thread", daemon=True)

    def start(self) -> None:
        """Start requesting approval."""
        self._thread.start()

    def close(self) -> None:
        """Stop requesting approval: the question is answered, or no controller is waiting any more."""
        self._stop.set()
        self._thread.join(timeout=SHUTDOWN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(POLL_INTERVAL_S if self._tried(self._poll) else RETRY_INTERVAL_S)
        self._tried(self._resume)

    def _tried(self, action: Callable[[SyncPrefectClient], None]) -> bool:
        with Survived() as failed:  # whatever Prefect raises, the question can still be answered in the terminal
            if not server_answers():  # Prefect's own client would retry for a minute
                raise ConnectionError("its server does not answer")
            with api_client() as client:
                action(client)
            self._outage.end()
            return True
        self._outage.log_once(f"Prefect could not be asked for approval: {failed.problem}")
        return False

    # -----------------------------------------------------------------------------------------------------------------

    def _poll(self, client: SyncPrefectClient) -> None:
        """Show the form if it is not shown yet; otherwise check for an answer."""
        if not self._shown:
            _take_over(client, self._run_dir, self._flow_run_id)
            self._show()
        flow_run = client.read_flow_run(self._flow_run_id)
        state = flow_run.state
        if state is None or state.is_paused():
            return
        if self._shown_keys is not None:
            answer = _form(client, self._flow_run_id, self._shown_keys)
            if answer is not None:
                self._record_answer(answer)
                self._stop.set()
                return
        if state.is_running():
            self._pause(client)  # the first time, or after the flow run was resumed without the form

    def _show(self) -> None:
        key = artifact_key(self._run_dir.run_id, "approval")
        create_markdown_artifact(self._question.text, key=key, description=f"{self._run_dir.run_id}: to be approved")
        self._shown = True

    def _pause(self, client: SyncPrefectClient) -> None:
        key = f"{_KEY_PREFIX}-{uuid4().hex[:8]}"
        keys = keyset_from_base_key(key)
        form = Approval.with_initial_data(description=self._question.form_text)
        form.save(keys, self._flow_run_id)
        state: State[None] = Paused(
            pause_expiration_time=self._question.deadline + SLACK, pause_key=key, message="waits for approval"
        )
        state.state_details.run_input_keyset = {str(name): value for name, value in keys.items()}
        client.set_flow_run_state(self._flow_run_id, state)
        self._shown_keys = keys

    def _record_answer(self, form: Approval) -> None:
        if give_answer(self._run_dir, form.as_answer()):
            return
        first = read_answer(self._run_dir)
        if first is not None:
            self._log(
                f"{form.by} has {form.as_answer().verdict} it in Prefect, but {first.by or 'the clock'} was first: "
                f"{first.verdict}"
            )

    def _resume(self, client: SyncPrefectClient) -> None:
        """Resume the flow run with the recorded answer; without one it stays paused, like the question itself."""
        answer = read_answer(self._run_dir)
        if answer is None or self._shown_keys is None:
            return
        client.resume_flow_run(self._flow_run_id, run_input=_as_form(answer))  # refused if it has already resumed
        submitted = _form(client, self._flow_run_id, self._shown_keys)
        if submitted is not None and submitted != Approval.model_validate(_as_form(answer)):
            self._record_answer(submitted)  # submitted at the same moment: reports that it does not count


def _take_over(client: SyncPrefectClient, run_dir: RunDir, own: UUID) -> None:
    """Handle flow runs whose controller was killed while asking the same question: accept an answer given there, and
    remove a form that is still shown, because no process would read it."""
    wanted = FlowRunFilter(name=FlowRunFilterName(any_=[run_dir.run_id]))
    for other in client.read_flow_runs(flow_run_filter=wanted):
        if other.id == own:
            continue
        for entry in client.filter_flow_run_input(other.id, key_prefix=_KEY_PREFIX, limit=50, exclude_keys=set()):
            if entry.key.endswith("-response"):
                give_answer(run_dir, Approval.load_from_flow_run_input(entry).as_answer())
        if other.state is not None and other.state.is_paused():
            over: State[None] = Crashed(message="its controller is gone; another flow run asks, or has the answer")
            client.set_flow_run_state(other.id, over, force=True)


def _form(client: SyncPrefectClient, flow_run_id: UUID, keys: Keyset) -> Approval | None:
    """The submitted form; None if the flow run was resumed without one."""
    try:
        content = client.read_flow_run_input(flow_run_id, keys["response"])
    except PrefectHTTPStatusError as error:
        if error.response.status_code == 404:
            return None
        raise
    return Approval.model_validate_json(content)


def _as_form(answer: PromotionAnswer) -> dict[str, str | bool]:
    return {
        "approve": answer.verdict == "approved",
        "by": answer.by or "nobody",
        "reason": answer.reason or ("nobody answered in time" if answer.verdict == "expired" else ""),
    }
