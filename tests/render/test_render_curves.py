"""The image of the curves: its content, its size, and failures to draw it."""

import io
import random
from pathlib import Path

from control_fakes import FakeAgent, make_run, make_spec
from PIL import Image

from rlhf_core.config import loading as config
from rlhf_core.control.views.curves import effective_curves, marks_of, picture_of
from rlhf_core.control.views.drawing import draw_in_process
from rlhf_core.render.curves_image import draw, drawn_series, plots_of
from rlhf_core.render.line_plots import LEARNING, stages_of
from rlhf_core.render.series import Marks
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.run import RunSpec

ALL_STEPS = 20_000


def trained(runs: Path) -> RunDir:
    """A run that made seven steps, hung, and continued from the fourth."""
    run_dir = make_run(runs)
    first, second = FakeAgent(run_dir), FakeAgent(run_dir, restart=1)
    for step in range(1, 8):
        first.step(step, **{"reward/mean": 0.1 * step})
    first.checkpoint(4)
    first.incident(FailureKind.HANG)
    second.step(5, **{"reward/mean": 0.9})
    return run_dir


def test_what_a_rewind_took_back_is_not_drawn(tmp_path: Path) -> None:
    curves = effective_curves(trained(tmp_path / "runs"), frozenset({"reward/mean"}))
    assert [step for step, _ in curves["reward/mean"]] == [1, 2, 3, 4, 5], "the weights of steps 6 and 7 are gone"
    assert curves["reward/mean"][-1] == (5, 0.9)


def test_marks_stand_where_something_happened(tmp_path: Path) -> None:
    run_dir = trained(tmp_path / "runs")
    assert marks_of(run_dir, make_spec(), 5) == Marks(5, 2, checkpoints=(4,), incidents=(3,), resumes=(4,))


def test_the_curves_are_those_of_the_algorithm() -> None:
    assert "reward" in {plot.name for plot in plots_of(make_spec())}
    sft = make_spec(train={"algorithm": "sft"}, sft={"num_steps": 0})
    assert losses_drawn(sft, 0) == {"loss-sft": [1, 2, 3, 4]}
    assert losses_drawn(make_spec(sft={"num_steps": 0}), 0) == {"loss-main": [1, 2, 3, 4]}
    assert losses_drawn(make_spec(), 2) == {"loss-sft": [1, 2], "loss-main": [3, 4]}
    assert losses_drawn(config.load("kto"), 0) == {"loss-preference": [1, 2, 3, 4]}
    assert losses_drawn(config.load("dpo"), 2) == {"loss-sft": [1, 2], "loss-preference": [3, 4]}
    from_pairs = config.load("quickstart", ["loops.warm_start.algorithm.name=dpo"])
    assert losses_drawn(from_pairs, 2) == {"loss-preference": [1, 2], "loss-main": [3, 4]}
    assert {"loss", "preference"} <= {plot.name for plot in plots_of(config.load("torchrun"))}


def losses_drawn(spec: RunSpec, warm_start_steps: int) -> dict[str, list[int]]:
    """Steps in each plot of the loss, by its name."""
    curves, marks = {"train/loss": [(step, 0.5) for step in range(1, 5)]}, Marks(4, warm_start_steps)
    plots = {plot.name: drawn_series(plot, curves, marks, stages_of(spec)) for plot in plots_of(spec)}
    return {name: [step for step, _ in series[0].curve] for name, series in plots.items() if series}


def test_a_long_and_noisy_run_is_a_small_picture() -> None:
    chance = random.Random(0)
    plots = plots_of(make_spec())
    noise = {key: [(step, chance.random()) for step in range(ALL_STEPS)] for plot in plots for key, _ in plot.keys}
    picture = draw(plots, noise, Marks(ALL_STEPS, 100, tuple(range(0, ALL_STEPS, 500)), (7000,), (6000,)))
    assert len(picture) < 150_000
    with Image.open(io.BytesIO(picture)) as image:
        assert image.width == 1380


def test_the_picture_is_drawn_by_a_process_of_its_own(tmp_path: Path) -> None:
    with Image.open(io.BytesIO(draw_in_process(trained(tmp_path / "runs")))) as image:
        assert image.format == "PNG"


def test_nothing_is_drawn_before_the_first_step(tmp_path: Path) -> None:
    assert picture_of(make_run(tmp_path / "runs")) == b""
    assert draw(LEARNING, {}, Marks()) == b""


def test_a_drawing_that_fails_or_takes_too_long_is_no_picture(tmp_path: Path) -> None:
    assert draw_in_process(RunDir(tmp_path / "none")) == b""
    assert draw_in_process(trained(tmp_path / "runs"), timeout_s=0.001) == b""
