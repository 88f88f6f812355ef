"""How far a run is, as Prefect shows it: what is said, and that it never goes back in silence."""

from control_fakes import FakeAgent, make_run, make_spec
from desk import Desk
from view_tools import look

from flows.view.progress import Seen, describe, furthest_step
from flows.view.story import read_story
from rlhf_core.control.steps import drive
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.failures import FailureKind


def test_a_step_in_a_line_with_the_time_that_is_left(desk: Desk) -> None:
    run_dir = desk.run()
    seen = Seen(make_spec())
    seen.saw(look(6))
    text = describe(seen, read_story(run_dir))
    assert seen.percent == 60.0
    assert "**step 6 of 10 (grpo), 60 %** · 8.0 s left" in text
    assert "attempt 1, 0 restarts · on n1 · 2.0 s a step" in text
    assert "reward 0.250" in text


def test_the_warm_start_says_nothing_about_how_long_the_main_algorithm_takes() -> None:
    seen = Seen(make_spec())
    seen.saw(look(2, loop="sft", metrics={"time/step_s": 0.1}))
    assert seen.left_s() is None
    seen.saw(look(3, metrics={"time/step_s": 4.0}))
    assert seen.left_s() == 7 * 4.0


def test_looks_at_the_same_step_count_once_in_the_time_of_a_step() -> None:
    seen = Seen(make_spec())
    seen.saw(look(3, metrics={"time/step_s": 1.0}))
    for _ in range(100):
        seen.saw(look(4, metrics={"time/step_s": 2.0}))
    assert seen.step_s() == 1.1


def gone_back(run_dir: RunDir) -> None:
    agent = FakeAgent(run_dir)
    agent.begin()
    for step in range(1, 8):
        agent.step(step)
    agent.incident(FailureKind.HANG)


def test_a_run_that_goes_back_says_why(desk: Desk) -> None:
    run_dir = desk.run()
    gone_back(run_dir)
    seen = Seen(make_spec())
    seen.saw(look(7))
    assert "Went back" not in describe(seen, read_story(run_dir))
    seen.saw(look(4, restart=1))
    assert "Went back after hang: step 7 was reached before" in describe(seen, read_story(run_dir))
    seen.saw(look(7, restart=1))
    assert "Went back" not in describe(seen, read_story(run_dir))


def test_a_controller_that_comes_later_knows_how_far_it_was(desk: Desk) -> None:
    """Its own looks begin at the checkpoint: without the files it would show less than was shown before, in silence."""
    run_dir = desk.run()
    gone_back(run_dir)
    assert furthest_step(run_dir) == 7
    later = Seen(make_spec(), furthest=furthest_step(run_dir))
    later.saw(look(4, attempt=2))
    assert "Went back after hang" in describe(later, read_story(run_dir))


def test_a_trial_makes_no_step_of_its_run(desk: Desk) -> None:
    run_dir = desk.run()
    seen = Seen(make_spec())
    seen.title = "trial on one node: train attempt 1"
    seen.turns_to(make_spec(train={"num_steps": 2}))
    seen.saw(look(3))
    assert (seen.percent, seen.furthest) == (0.0, 0)
    assert "**trial on one node: train attempt 1, step 3 of 4**" in describe(seen, read_story(run_dir))
    seen.turns_to(make_spec())
    seen.saw(look(5))
    assert (seen.percent, seen.furthest) == (50.0, 5)


def test_the_end_says_how(desk: Desk) -> None:
    run_dir = desk.run()
    desk.scheduler.on_submit = lambda request: FakeAgent(run_dir).whole_run()
    drive(desk.controller(run_dir))
    seen = Seen(make_spec())
    seen.saw(look(10))
    assert describe(seen, read_story(run_dir)).startswith("**completed** · attempt 1 completed")


def test_before_anything_is_known_there_is_no_figure(desk: Desk) -> None:
    run_dir = make_run(desk.site.runs_dir)
    assert Seen(make_spec()).percent == 0.0
    assert describe(Seen(make_spec()), read_story(run_dir)) == "**pending**"
