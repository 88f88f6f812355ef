"""Promotion without Prefect: answers in every order and after every kill, and the files written."""

import dataclasses
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeAgent, make_spec
from harness import ControllerHarness, ShowQuestion, left_behind
from kill_points import Killed, Points
from made_reports import checkpoint_manifest

from rlhf_core.control import approval, promotion
from rlhf_core.control.approval import answer_promotion
from rlhf_core.control.steps import drive
from rlhf_core.errors import BadInput, IllegalMove, LeaseLost, PromotionFailed
from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import read_model, write_model, write_text
from rlhf_core.history import queries
from rlhf_core.launch import lease, promote
from rlhf_core.launch.journal import PromotionRecord, read_record
from rlhf_core.launch.promote import damage, give_answer, promoted_folder
from rlhf_core.run_dir.checkpoint import checksum
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState
from rlhf_core.schemas.attempts import PromotionState, RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.journal import JournalLine, PromotionMoved
from rlhf_core.schemas.promotion import ModelProvenance, PromotionAnswer
from rlhf_core.schemas.run import RunSpec


def needs_approval(**promote: Any) -> RunSpec:
    return make_spec(promote={"when": "approved", **promote})


def checkpoint_with_model(run_dir: RunDir, step: int = 10) -> None:
    """A complete checkpoint with the files of a model as text."""
    checkpoint = run_dir.checkpoint(step)
    files = {"model/config.json": "{}", "model/model.safetensors": f"weights of step {step}", "trainer_state/a": "x"}
    for name, text in files.items():
        write_text(checkpoint.root / name, text)
    checksums = {name: checksum(checkpoint.root / name) for name in files}
    write_model(checkpoint.complete, checkpoint_manifest(step, loop="grpo", loop_finished=True, files=checksums))


def completes(harness: ControllerHarness, run_dir: RunDir) -> None:
    """Make the next job of the run succeed."""

    def behave(request: object) -> None:
        FakeAgent(run_dir).whole_run()
        checkpoint_with_model(run_dir)

    harness.scheduler.on_submit = behave


def completed(harness: ControllerHarness, spec: RunSpec) -> RunDir:
    """A completed run whose controller is about to request approval."""
    run_dir = harness.run(spec)
    completes(harness, run_dir)
    controller = harness.controller(run_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(promotion, "is_due", lambda stored, record: False)
        drive(controller)
    return run_dir


def states(run_dir: RunDir) -> list[str]:
    moves = (line.event for line in read_models(run_dir.control, JournalLine))
    return [event.state.value for event in moves if isinstance(event, PromotionMoved)]


def standing(run_dir: RunDir) -> PromotionRecord:
    found = read_record(run_dir).promotion
    assert found is not None
    return found


def stage_of(harness: ControllerHarness, run_dir: RunDir) -> tuple[str, str]:
    (stage,) = [one for one in queries.show_run(harness.store, run_dir.run_id).stages if one["name"] == "promote"]
    return stage["state"], stage["message"]


def answers(run_dir: RunDir, verdict: str, by: str = "ada", reason: str = "") -> bool:
    return give_answer(
        run_dir, PromotionAnswer.model_validate({"verdict": verdict, "by": by, "reason": reason, "time": utc_now()})
    )


def when_shown(run_dir: RunDir, do: Callable[[], object]) -> ShowQuestion:
    """Do something when the request for approval is seen."""

    @contextmanager
    def show(question: promotion.Question) -> Iterator[None]:
        do()
        yield

    return show


def answer(
    harness: ControllerHarness,
    run_dir: RunDir,
    verdict: approval.Verdict,
    by: str,
    reason: str = "",
    timeout_s: float = 20,
) -> approval.Answered:
    return answer_promotion(
        run_dir, harness.site, harness.store, verdict, by, reason, log=harness.notes.log, timeout_s=timeout_s
    )


# ---------------------------------------------------------------------------------------------------------------------
# The order


def test_approval_is_requested_only_if_the_run_requires_it(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    completes(harness, run_dir)
    drive(harness.controller(run_dir))
    assert read_record(run_dir).promotion is None
    assert "promote" not in harness.notes.titles


def test_an_approved_model_is_written_whole_with_its_origin(harness: ControllerHarness) -> None:
    run_dir = harness.run(needs_approval())
    completes(harness, run_dir)
    drive(harness.controller(run_dir, show=when_shown(run_dir, lambda: answers(run_dir, "approved", reason="good"))))
    record = read_record(run_dir)
    assert record.state is RunState.COMPLETED
    assert states(run_dir) == ["waiting", "approved", "promoted"]
    target = promoted_folder(run_dir, run_dir.read_spec().spec.promote)
    assert target == harness.site.home / "promoted" / run_dir.run_id
    assert standing(run_dir).path == str(target)
    assert (target / "model.safetensors").read_text() == "weights of step 10"
    assert not (target / "a").exists(), "the trainer's state is not part of the model"
    assert damage(target) == []
    origin = read_model(target / promote.PROVENANCE, ModelProvenance)
    assert origin is not None
    assert (origin.run_id, origin.checkpoint_step, origin.approved_by) == (run_dir.run_id, 10, "ada")
    assert set(origin.files) == {"README.md", "config.json", "model.safetensors"}
    assert {path.name for path in target.iterdir()} == {*origin.files, "rlhf.json"}
    state, message = stage_of(harness, run_dir)
    assert state == "completed"
    assert message == f"step 10 was promoted to {target} by ada: good"
    shown = queries.show_run(harness.store, run_dir.run_id).promotion
    assert shown == {
        "state": "promoted",
        "checkpoint_step": 10,
        "decided_by": "ada",
        "reason": "good",
        "path": str(target),
        "requested_at": shown["requested_at"],
        "state_changed_at": shown["state_changed_at"],
    }


def test_the_allocation_is_released_before_the_request_for_approval(harness: ControllerHarness) -> None:
    run_dir = harness.run(needs_approval())
    completes(harness, run_dir)
    seen = []

    def refuse() -> None:
        seen.extend(job.state for job in harness.scheduler.jobs.values())
        answers(run_dir, "refused")

    drive(harness.controller(run_dir, show=when_shown(run_dir, refuse)))
    assert seen == [JobState.ENDED]


def test_always_promotes_without_approval(harness: ControllerHarness) -> None:
    run_dir = harness.run(make_spec(promote={"when": "always"}))
    completes(harness, run_dir)
    drive(harness.controller(run_dir, show=when_shown(run_dir, lambda: pytest.fail("shown"))))
    assert states(run_dir) == ["approved", "promoted"]
    assert standing(run_dir).by == promotion.POLICY


def test_a_refusal_writes_nothing_and_the_run_stays_completed(harness: ControllerHarness) -> None:
    run_dir = harness.run(needs_approval())
    completes(harness, run_dir)
    drive(
        harness.controller(run_dir, show=when_shown(run_dir, lambda: answers(run_dir, "refused", reason="too terse")))
    )
    assert read_record(run_dir).state is RunState.COMPLETED
    assert stage_of(harness, run_dir) == ("completed", "step 10 was refused by ada: too terse")
    assert not (harness.site.home / "promoted").exists()


def test_an_answer_is_read_once_the_file_system_responds(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question may be open for days, and is looked at every second."""
    run_dir = completed(harness, needs_approval())
    assert answers(run_dir, "refused", "grace", "too slow")
    errors = [OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle")]
    read = promote.read_answer

    def read_answer(concerned: RunDir) -> PromotionAnswer | None:
        if errors:
            raise errors.pop()
        return read(concerned)

    monkeypatch.setattr(promotion, "read_answer", read_answer)
    drive(harness.controller(run_dir))
    assert (standing(run_dir).state, errors) == (PromotionState.REFUSED, [])


def test_an_unanswered_request_expires_and_can_still_be_approved(harness: ControllerHarness) -> None:
    run_dir = harness.run(needs_approval(timeout_h=1e-9))
    completes(harness, run_dir)
    drive(harness.controller(run_dir))
    assert states(run_dir) == ["waiting", "expired"]
    harness.controller(harness.run())  # releases the run
    assert answer(harness, run_dir, "approved", "bea").state is PromotionState.PROMOTED
    assert states(run_dir) == ["waiting", "expired", "approved", "promoted"]


def test_a_gain_that_is_too_small_requests_no_approval(harness: ControllerHarness) -> None:
    run_dir = harness.run(needs_approval(min_gain=0.71))
    completes(harness, run_dir)
    drive(harness.controller(run_dir, show=when_shown(run_dir, lambda: pytest.fail("shown"))))
    assert states(run_dir) == []
    state, message = stage_of(harness, run_dir)
    assert (state, message.partition(";")[0]) == (
        "completed",
        "not promoted: exact_match (greedy) 0.200 -> 0.900, gain +0.700",
    )
    harness.controller(harness.run())
    with pytest.raises(BadInput, match=r"promote\.min_gain is 0\.71"):
        answer(harness, run_dir, "approved", "bea")


def test_a_sufficient_gain_requests_approval(harness: ControllerHarness) -> None:
    """Negative control of the previous test."""
    run_dir = harness.run(needs_approval(min_gain=0.69))
    completes(harness, run_dir)
    drive(harness.controller(run_dir, show=when_shown(run_dir, lambda: answers(run_dir, "refused"))))
    assert states(run_dir) == ["waiting", "refused"]


def report(run_dir: RunDir, file: str, **changes: Any) -> None:
    path = run_dir.evaluation("after", "greedy")
    known = read_model(path, EvaluationReport)
    assert known is not None
    write_model(run_dir.evaluations_dir / file, known.model_copy(update=changes))


def test_the_best_existing_evaluated_checkpoint_is_promoted(harness: ControllerHarness) -> None:
    run_dir = completed(harness, needs_approval())
    wanted = run_dir.read_spec().spec.promote
    for step, value in ((4, 0.95), (6, 0.93), (8, 0.93)):
        report(run_dir, f"after-greedy-{step}.json", checkpoint_step=step, value=value)
    report(run_dir, "after-sampled.json", name="sampled", value=0.99, checkpoint_step=2)
    checkpoint_with_model(run_dir, 6)
    checkpoint_with_model(run_dir, 8)
    chosen = promote.choose(run_dir, wanted)
    assert chosen.checkpoint is not None
    assert chosen.checkpoint.step == 8, "step 4 is gone, 6 and 8 are equal, 10 is worse"
    checkpoint_with_model(run_dir, 4)
    best = promote.choose(run_dir, wanted).checkpoint
    assert best is not None
    assert best.step == 4
    for when, step, value in (("before", 0, 0.7), ("after", 4, 0.5), ("after", 6, 0.4), ("after", 8, 0.9)):
        report(run_dir, f"{when}-loss-{step}.json", name="loss", when=when, checkpoint_step=step, value=value)
    least = promote.choose(run_dir, wanted.model_copy(update={"metric": "loss"}))
    assert least.checkpoint is not None
    assert (least.checkpoint.step, "0.700 -> 0.400, gain +0.300" in least.reason) == (6, True)


def test_without_an_evaluation_there_is_nothing_to_choose(harness: ControllerHarness) -> None:
    run_dir = completed(harness, needs_approval())
    wanted = run_dir.read_spec().spec.promote
    run_dir.evaluation("before", "greedy").unlink()
    assert "before training" in promote.choose(run_dir, wanted).reason
    run_dir.evaluation("after", "greedy").unlink()
    nothing = promote.choose(run_dir, wanted)
    assert (nothing.checkpoint, nothing.reason.split()[:2]) == (None, ["found", "no"])


# ---------------------------------------------------------------------------------------------------------------------
# Answers


@pytest.fixture
def threads_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat each thread of this process as a separate live controller, as far as the lease is concerned."""
    mine = lease.Owner.this_process()
    monkeypatch.setattr(
        lease.Owner, "this_process", lambda: dataclasses.replace(mine, user=f"thread{threading.get_ident()}")
    )


@pytest.mark.usefixtures("threads_are_processes")
def test_of_many_concurrent_answers_one_counts_and_the_others_are_refused(harness: ControllerHarness) -> None:
    run_dir = completed(harness, needs_approval())
    controller = harness.controller(run_dir)
    outcomes: dict[str, str] = {}

    def give_answer(verdict: approval.Verdict, by: str) -> None:
        try:
            outcomes[by] = answer(harness, run_dir, verdict, by).message
        except BadInput as error:
            outcomes[by] = f"refused: {error}"

    people = [
        threading.Thread(target=give_answer, args=("approved" if number % 2 else "refused", f"person{number}"))
        for number in range(8)
    ]

    def all_answer() -> None:
        for person in people:
            person.start()
        while len(outcomes) < len(people) - 1 and any(person.is_alive() for person in people):
            people[0].join(timeout=0.01)

    controller.show_question = when_shown(run_dir, all_answer)
    promotion.carry_out(controller)
    for person in people:
        person.join()
    assert len(states(run_dir)) == 2 + (standing(run_dir).state is PromotionState.PROMOTED)
    winner = standing(run_dir).by
    losers = {by: text for by, text in outcomes.items() if by != winner}
    assert len(losers) == 7
    assert {text.partition(" already ")[0] for text in losers.values()} == {f"refused: too late: {winner}"}
    assert f"by {winner}" in outcomes[winner]


@pytest.mark.usefixtures("threads_are_processes")
def test_an_answer_before_the_request_is_given_once_the_controller_waits_for_it(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is completed while its job still ends, up to a minute before approval is requested."""
    run_dir = completed(harness, needs_approval())
    controller = harness.controller(run_dir)
    opened, has_opened = approval.opened, threading.Event()

    def opens(*arguments: Any, **options: Any) -> Any:
        has_opened.set()
        return opened(*arguments, **options)

    monkeypatch.setattr(approval, "opened", opens)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer, harness, run_dir, "approved", "ada")
        has_opened.wait()

        def await_answer() -> None:
            while not run_dir.promotion_answer.exists() and not answered.done():
                time.sleep(0.01)
            answers(run_dir, "refused", by="grace")  # ends the wait if no answer was given

        controller.show_question = when_shown(run_dir, await_answer)
        promotion.carry_out(controller)
        assert answered.result().state is PromotionState.PROMOTED
    assert (standing(run_dir).state, standing(run_dir).by) == (PromotionState.PROMOTED, "ada")


@pytest.mark.usefixtures("threads_are_processes")
@pytest.mark.parametrize(
    ("state", "found"),
    [(None, "its promotion has not been requested yet"), (PromotionState.APPROVED, "step 10 was approved by bea")],
)
def test_an_answer_that_nobody_waits_for_is_not_called_recorded(
    harness: ControllerHarness, state: PromotionState | None, found: str
) -> None:
    run_dir = completed(harness, needs_approval())
    controller = harness.controller(run_dir)
    if state is not None:
        controller.journal.move_promotion(PromotionMoved(state=state, checkpoint_step=10, by="bea"))
    with ThreadPoolExecutor(1) as pool, pytest.raises(LeaseLost, match=f"the answer is not recorded, .*: {found}"):
        pool.submit(answer, harness, run_dir, "approved", "ada", timeout_s=0).result()
    assert not run_dir.promotion_answer.exists()


@pytest.mark.usefixtures("threads_are_processes")
def test_of_two_concurrent_changes_of_mind_one_promotes_and_the_other_is_refused(harness: ControllerHarness) -> None:
    run_dir = completed(harness, needs_approval())
    promotion.carry_out(harness.controller(run_dir, show=when_shown(run_dir, lambda: answers(run_dir, "refused"))))
    harness.controller(harness.run())
    outcomes: dict[str, str] = {}

    def give_answer(by: str) -> None:
        try:
            outcomes[by] = answer(harness, run_dir, "approved", by).state.value
        except BadInput as error:
            outcomes[by] = str(error)

    people = [threading.Thread(target=give_answer, args=(by,)) for by in ("bea", "cy")]
    for person in people:
        person.start()
    for person in people:
        person.join()
    winner = standing(run_dir).by
    (loser,) = {"bea", "cy"} - {winner}
    assert outcomes[winner] == "promoted"
    assert f"by {winner}" in outcomes[loser]
    assert states(run_dir) == ["waiting", "refused", "approved", "promoted"]


def test_if_answers_may_be_replaced_two_count(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the test above would detect it."""

    def replaced(path: Path, text: str) -> bool:
        write_text(path, text)
        return True

    run_dir = completed(harness, needs_approval())
    monkeypatch.setattr(promote, "create_once", replaced)
    assert answers(run_dir, "approved", by="ada")
    assert answers(run_dir, "refused", by="bea")


@pytest.mark.parametrize("first", ["approved", "refused"])
def test_without_a_controller_the_command_acts_on_the_answer(
    harness: ControllerHarness, first: approval.Verdict
) -> None:
    run_dir = completed(harness, needs_approval())
    controller = harness.controller(run_dir)
    controller.show_question = when_shown(run_dir, killed)
    with pytest.raises(Killed):
        promotion.carry_out(controller)
    assert states(run_dir) == ["waiting"]
    harness.controller(harness.run())
    done = answer(harness, run_dir, first, "ada", "because")
    assert done.state is (PromotionState.PROMOTED if first == "approved" else PromotionState.REFUSED)
    assert stage_of(harness, run_dir)[0] == "completed"


def killed() -> None:
    raise Killed


def test_an_answer_that_the_controller_acted_on_at_once_is_no_error(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller may have finished and exited before the command checks whether one exists."""
    run_dir = completed(harness, needs_approval())
    with pytest.raises(Killed):
        promotion.carry_out(harness.controller(run_dir, show=when_shown(run_dir, killed)))
    opened = approval.opened

    def quick(*arguments: Any, **options: Any) -> Any:
        drive(harness.controller(run_dir))
        harness.controller(harness.run())
        return opened(*arguments, **options)

    monkeypatch.setattr(approval, "opened", quick)
    assert answer(harness, run_dir, "approved", "ada").state is PromotionState.PROMOTED
    assert states(run_dir) == ["waiting", "approved", "promoted"]


def test_a_refusal_can_be_revised_and_a_promotion_cannot(harness: ControllerHarness) -> None:
    run_dir = completed(harness, needs_approval())
    promotion.carry_out(harness.controller(run_dir, show=when_shown(run_dir, lambda: answers(run_dir, "refused"))))
    harness.controller(harness.run())
    with pytest.raises(BadInput, match="too late: step 10 was refused by ada"):
        answer(harness, run_dir, "refused", "bea")
    assert answer(harness, run_dir, "approved", "bea").state is PromotionState.PROMOTED
    for verdict in ("approved", "refused"):
        with pytest.raises(BadInput, match="too late: step 10 was promoted to"):
            answer(harness, run_dir, verdict, "cy")


def test_without_a_request_a_run_can_be_approved_and_not_refused(harness: ControllerHarness) -> None:
    run_dir = completed(harness, make_spec())
    harness.controller(harness.run())
    with pytest.raises(BadInput, match=r"no promotion of .* has been requested"):
        answer(harness, run_dir, "refused", "ada")
    assert answer(harness, run_dir, "approved", "ada").state is PromotionState.PROMOTED


def test_a_run_that_is_not_completed_is_not_promoted(harness: ControllerHarness) -> None:
    with pytest.raises(BadInput, match="only a completed run"):
        answer(harness, harness.run(needs_approval()), "approved", "ada")


def test_the_journal_refuses_transitions_that_the_table_lacks(harness: ControllerHarness) -> None:
    run_dir = completed(harness, needs_approval())
    journal = harness.controller(run_dir).journal
    with pytest.raises(IllegalMove, match="not begun and cannot become promoted"):
        journal.move_promotion(PromotionMoved(state=PromotionState.PROMOTED, checkpoint_step=10))
    journal.move_promotion(PromotionMoved(state=PromotionState.WAITING, checkpoint_step=10))
    with pytest.raises(IllegalMove, match="waiting and cannot become promoted"):
        journal.move_promotion(PromotionMoved(state=PromotionState.PROMOTED, checkpoint_step=10))


# ---------------------------------------------------------------------------------------------------------------------
# Kills


def test_killed_while_waiting_the_next_controller_waits_until_the_first_deadline(harness: ControllerHarness) -> None:
    run_dir = completed(harness, needs_approval(timeout_h=5))
    deadlines = []

    @contextmanager
    def killed_here(question: promotion.Question) -> Iterator[None]:
        deadlines.append(question.deadline)
        raise Killed
        yield

    for _ in range(2):
        controller = harness.controller(run_dir)
        assert promotion.is_due(controller.stored, controller.journal.record)
        controller.show_question = killed_here
        with pytest.raises(Killed):
            promotion.carry_out(controller)
    assert deadlines[0] == deadlines[1] == standing(run_dir).requested_at + timedelta(hours=5)
    assert states(run_dir) == ["waiting"]
    answers(run_dir, "approved")  # no controller survives to see it
    drive(harness.controller(run_dir))
    assert states(run_dir) == ["waiting", "approved", "promoted"]
    assert len(harness.scheduler.submitted) == 1


def test_killed_around_every_line_and_file_the_model_is_promoted_once(harness: ControllerHarness) -> None:
    def live(run_dir: RunDir, kill_at: int | None) -> Points:
        points = Points(kill_at, lambda: b"" if kill_at is not None else left_behind(harness))
        controller = harness.controller(run_dir)
        with points.at_every_effect(harness.scheduler), pytest.MonkeyPatch.context() as patch:
            patch.setattr(promote, "_copy", points.around(promote._copy))
            patch.setattr(promote, "create_once", points.around(promote.create_once))
            with suppress(Killed):
                controller.show_question = when_shown(run_dir, lambda: answers(run_dir, "approved"))
                promotion.carry_out(controller)
        return points

    points = live(completed(harness, needs_approval()), None)
    assert points.passed >= 18, "six lines of the journal, two files, the answer, the rename"
    assert len(points.distinct) >= 12
    for point in points.distinct:
        run_dir = completed(harness, needs_approval())
        assert live(run_dir, point).passed == point
        drive(
            harness.controller(run_dir, show=when_shown(run_dir, lambda run_dir=run_dir: answers(run_dir, "approved")))
        )
        assert damage(promoted_folder(run_dir, run_dir.read_spec().spec.promote)) == [], point
        assert states(run_dir) == ["waiting", "approved", "promoted"], point


def write_and_die(run_dir: RunDir, target: Path, origin: ModelProvenance, die_at: int) -> bool:
    """Write the model in a process of its own that is killed at one of its effects, as by SIGKILL.

    True if it was killed.
    """
    child = os.fork()
    if child == 0:
        passed = 0

        def mortal(effect: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **keywords: Any) -> Any:
                nonlocal passed
                if passed == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                passed += 1
                return effect(*arguments, **keywords)

            return wrapped

        os.fsync = mortal(os.fsync)
        Path.rename = mortal(Path.rename)  # type: ignore[method-assign]
        Path.open = mortal(Path.open)  # type: ignore[method-assign]
        Path.mkdir = mortal(Path.mkdir)  # type: ignore[method-assign]
        promote.write_model_directory(run_dir.checkpoint(10), target, "card", origin, mortal(lambda: None))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_kill_during_the_write_leaves_nothing_or_a_whole_model(harness: ControllerHarness, in_place: bool) -> None:
    """And, as a control, a writer without the temporary name leaves partial models behind."""
    run_dir = approved(harness)
    origin = origin_of(harness, run_dir)
    halves, point = 0, 0
    with pytest.MonkeyPatch.context() as patch:
        if in_place:
            patch.setattr(Path, "with_name", lambda path, name: path)
            patch.setattr(promote.shutil, "rmtree", lambda path, ignore_errors: None)
        while True:
            target = harness.site.home / "models" / str(point) / run_dir.run_id
            if not write_and_die(run_dir, target, origin, point):
                break
            halves += target.exists() and damage(target) != []
            point += 1
    assert point > 15
    assert (halves > 0) == in_place


def test_a_controller_that_lost_its_run_removes_nothing_of_the_next_one(harness: ControllerHarness) -> None:
    """The first one is suspended while it copies, and goes on while the next one copies its second file."""
    run_dir = approved(harness)
    target, origin = harness.site.home / "models" / run_dir.run_id, origin_of(harness, run_dir)
    halfway, woken = threading.Event(), threading.Event()

    def suspended() -> None:
        if list(target.parent.glob(".*/config.json")):
            halfway.set()
            woken.wait(60)
            raise LeaseLost("another controller has the run")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(promote.write_model_directory, run_dir.checkpoint(10), target, "card", origin, suspended)
        halfway.wait(60)

        def copying() -> None:
            if not woken.is_set() and list(target.parent.glob(".*/model.safetensors")):
                woken.set()
                with pytest.raises(LeaseLost):
                    first.result()

        promote.write_model_directory(run_dir.checkpoint(10), target, "card", origin, copying)
    assert woken.is_set()
    assert damage(target) == []
    assert list(target.parent.iterdir()) == [target]


def test_a_model_whose_copied_files_disappear_is_not_promoted(harness: ControllerHarness) -> None:
    run_dir = approved(harness)
    target = harness.site.home / "models" / run_dir.run_id

    def removing() -> None:
        for weights in target.parent.glob(".*/model.safetensors"):
            (weights.parent / "config.json").unlink(missing_ok=True)

    origin = origin_of(harness, run_dir)
    with pytest.raises(PromotionFailed, match=r"config\.json disappeared from"):
        promote.write_model_directory(run_dir.checkpoint(10), target, "card", origin, removing)
    assert list(target.parent.iterdir()) == []


def origin_of(harness: ControllerHarness, run_dir: RunDir) -> ModelProvenance:
    return promotion._provenance(
        harness.controller(run_dir), PromotionRecord(PromotionState.APPROVED, 10, utc_now(), "ada")
    )


# ---------------------------------------------------------------------------------------------------------------------
# Errors of the target folder


def approved(harness: ControllerHarness, **promote: Any) -> RunDir:
    run_dir = completed(harness, make_spec(promote={"when": "always", **promote}))
    harness.controller(run_dir)
    return run_dir


def test_a_damaged_checkpoint_is_not_promoted(harness: ControllerHarness) -> None:
    run_dir = approved(harness)
    weights = run_dir.checkpoint(10).model / "model.safetensors"
    good = weights.read_text()
    weights.write_text("weights of step 11")
    drive(harness.controller(run_dir))
    assert states(run_dir) == ["approved", "failed"]
    assert "model/model.safetensors has 18 bytes" in standing(run_dir).reason
    assert list((harness.site.home / "promoted").iterdir()) == []
    assert read_record(run_dir).state is RunState.COMPLETED
    assert stage_of(harness, run_dir)[0] == "failed"
    weights.write_text(good)
    harness.controller(harness.run())
    assert answer(harness, run_dir, "approved", "ada").state is PromotionState.PROMOTED


def test_without_the_comparison_a_damaged_checkpoint_would_pass(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the previous test."""
    run_dir = approved(harness)
    (run_dir.checkpoint(10).model / "model.safetensors").write_text("weights of step 11")
    copy = promote._copy
    manifest = run_dir.checkpoint(10).manifest()
    assert manifest is not None

    def blind(source: Path, target: Path, tick: Callable[[], None]) -> Any:
        copy(source, target, tick)
        return manifest.files[f"model/{source.name}"]

    monkeypatch.setattr(promote, "_copy", blind)
    drive(harness.controller(run_dir))
    assert states(run_dir)[-1] == "promoted"
    assert damage(promoted_folder(run_dir, run_dir.read_spec().spec.promote)) != []


def test_something_else_at_the_target_is_not_touched(harness: ControllerHarness) -> None:
    run_dir = approved(harness)
    target = harness.site.home / "promoted" / run_dir.run_id
    target.mkdir(parents=True)
    (target / "notes.txt").write_text("mine")
    drive(harness.controller(run_dir))
    assert standing(run_dir).state is PromotionState.FAILED
    assert f"{target} already exists" in standing(run_dir).reason
    assert [path.name for path in target.iterdir()] == ["notes.txt"]


def test_a_full_disk_is_reported_and_the_promotion_can_be_retried(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = approved(harness)
    harness.controller(harness.run())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(promote, "write_text", full)
        controller = harness.controller(run_dir)
        with pytest.raises(PromotionFailed, match=r"the disk is full\. Nothing was left there"):
            promotion.carry_out(controller)
    assert standing(run_dir).state is PromotionState.FAILED
    assert list((harness.site.home / "promoted").iterdir()) == []
    harness.controller(harness.run())
    done = answer(harness, run_dir, "approved", "ada")
    assert done.path is not None
    assert damage(done.path) == []


def full(path: Path, text: str) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_that_cannot_be_created_is_reported(harness: ControllerHarness) -> None:
    (harness.site.home / "file").write_text("")
    run_dir = approved(harness, folder=str(harness.site.home / "file" / "models"))
    drive(harness.controller(run_dir))
    assert "Not a directory" in standing(run_dir).reason


# ---------------------------------------------------------------------------------------------------------------------
# Texts


def test_the_card_states_known_facts_and_leaves_the_rest_to_the_author(harness: ControllerHarness) -> None:
    run_dir = approved(harness)
    drive(harness.controller(run_dir))
    card = Path(standing(run_dir).path, "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert 'tags:\n- "rlhf"\n- "grpo"' in front
    assert "value: 0.9\n" in front
    assert "ci_low: 0.8\n" in front
    assert "| exact_match, greedy | 0.200 [0.100, 0.300], 8 samples | 0.900 [0.800, 1.000], 8 samples |" in body
    assert "random weights" in body
    assert body.count("*To be written by the person who publishes this model.*") == 3
    origin = json.loads(Path(standing(run_dir).path, "rlhf.json").read_text())
    assert "slurm" not in origin["spec"]


def test_the_request_contains_everything_needed_for_an_answer(harness: ControllerHarness) -> None:
    run_dir = completed(harness, needs_approval())
    shown = []

    @contextmanager
    def show(question: promotion.Question) -> Iterator[None]:
        shown.append(question.text)
        answers(run_dir, "refused")
        yield

    promotion.carry_out(harness.controller(run_dir, show=show))
    (text,) = shown
    assert "| exact_match, greedy | 0.200 [0.100, 0.300] | 0.900 [0.800, 1.000] | +0.700 |" in text
    assert f"rlhf approve {run_dir.run_id}" in text
    assert "No incidents on the way." in text
