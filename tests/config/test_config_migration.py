"""Settings of rlhf-flows 0.1: read with a warning, rewritten with their comments, and equivalent in every place."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from process_tools import Rlhf

from rlhf_core.cli.commands.config import migrated_text
from rlhf_core.cli.main import execute
from rlhf_core.config import loading as config
from rlhf_core.errors import BadConfig
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.algorithms.policy_gradient import GrpoSpec
from rlhf_core.schemas.algorithms.supervised import SftSpec
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.schemas.migration import OldSettings, current_document, current_name, current_settings
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.run import RunSpec

OLD = """\
# A config of 0.1.
name = "old"

[model]
tokenizer = "char"
config = { model_type = "qwen3" }

[data]
generator = "rlhf_core.training.tasks:sort_digits"

# First, supervised steps.
[sft] # the warm start
num_steps = 30 # thirty
batch_size = 128

[train]
num_steps = 100
# There is little margin.
learning_rate = 2e-4
micro_batch_size = 16 # sixteen

# The group decides.
[grpo]
samples_per_prompt = 16
measure_kl = true

# How completions are made.
[rollout]
temperature = 0.9
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.toml"
    path.write_text(OLD)
    return path


def load(path: Path | str, *overrides: str) -> RunSpec:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OldSettings)
        return config.load(path, overrides)


def rewritten(path: Path) -> Path:
    target = path.with_name(f"new-{path.name}")
    target.write_text(migrated_text(path))
    return target


def test_a_file_of_0_1_means_what_it_meant(old: Path) -> None:
    spec = load(old)
    warm_start, main = spec.loops.warm_start, spec.loops.main
    assert warm_start is not None
    assert (warm_start.num_steps, warm_start.algorithm) == (30, SftSpec(name="sft", batch_size=128))
    assert warm_start.optimizer.learning_rate == 1e-4, "the default of 0.1"
    assert (main.num_steps, main.optimizer.learning_rate) == (100, 2e-4)
    assert main.algorithm == GrpoSpec(name="grpo", samples_per_prompt=16, measure_kl=True)
    assert spec.trainer.micro_batch_size == 16


def test_a_file_of_0_1_is_read_with_a_warning_that_names_the_new_settings(old: Path) -> None:
    with pytest.warns(OldSettings) as caught:
        config.load(old)
    warning = str(caught[0].message)
    assert f"`rlhf config migrate {old}`" in warning
    for name, new in (
        ("sft.batch_size", "loops.warm_start.algorithm.batch_size"),
        ("train.micro_batch_size", "trainer.micro_batch_size"),
        ("grpo.measure_kl", "loops.main.algorithm.measure_kl"),
    ):
        assert f"write {new} instead of {name}" in warning


def test_a_name_too_long_to_read_is_cut_in_the_warning(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.toml"
    bomb.write_text(f"[train]\n{'k' * 400} = 1\n")
    with pytest.warns(OldSettings) as caught, pytest.raises(BadConfig):
        config.load(bomb)
    assert "... (406 characters)" in str(caught[0].message)
    assert "k" * 200 not in str(caught[0].message)


def test_overrides_of_0_1_are_answered_with_the_same_warning() -> None:
    with pytest.warns(OldSettings, match=r"write loops.main.num_steps instead of train.num_steps"):
        spec = config.load("quickstart", ["train.num_steps=7", "grpo.clip_high=0.28"])
    assert spec == config.load("quickstart", ["loops.main.num_steps=7", "loops.main.algorithm.clip_high=0.28"])


WRONG_OLD = """\
[sft]
num_steps = "thirty"
[train]
learning_rates = 1
max_grad_norm = true
[grpo]
samples_per_prompt = 0
"""
WRONG_BY_NAME = (
    "loops.warm_start.num_steps (written as sft.num_steps): found 'thirty'",
    'unknown key "loops.main.learning_rates" (written as train.learning_rates)',
    "loops.main.algorithm.samples_per_prompt (written as grpo.samples_per_prompt): found 0",
)


def test_a_problem_names_the_setting_as_the_file_of_0_1_does(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old.write_text(OLD.partition("# First")[0] + WRONG_OLD)
    with pytest.warns(OldSettings), pytest.raises(BadConfig) as refused:
        config.load(old)
    assert execute(["config", "migrate", str(old)]) == 2
    for message in (str(refused.value), capsys.readouterr().err):
        for problem in WRONG_BY_NAME:
            assert problem in message


def test_a_problem_in_a_flag_for_a_number_names_the_setting_of_0_1(old: Path) -> None:
    old.write_text(OLD.replace("learning_rate = 2e-4", "max_grad_norm = true"))
    with pytest.warns(OldSettings), pytest.raises(BadConfig, match=r"written as train\.max_grad_norm\): found true"):
        config.load(old)


@pytest.mark.parametrize("value", ["fast", "true"])
def test_a_problem_in_an_override_names_the_setting_as_the_override_does(value: str) -> None:
    with pytest.warns(OldSettings), pytest.raises(BadConfig) as refused:
        config.load("quickstart", [f"train.learning_rate={value}"])
    assert "loops.main.optimizer.learning_rate (written as train.learning_rate): found" in str(refused.value)


def test_a_problem_in_a_setting_of_today_names_no_other(old: Path) -> None:
    old.write_text(OLD.replace("temperature = 0.9", "temperature = -1"))
    with pytest.warns(OldSettings), pytest.raises(BadConfig) as refused:
        config.load(old)
    assert "rollout.temperature: found -1" in str(refused.value)
    assert "written as" not in str(refused.value)


def test_what_is_written_today_is_read_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.load("quickstart", ["loops.main.num_steps=7"])


@pytest.mark.parametrize(
    ("overrides", "today"),
    [
        (["sft.num_steps=0"], ["loops.warm_start.num_steps=0"]),
        (["sft.num_steps=5", "sft.learning_rate=1"], ["loops.warm_start.num_steps=5",
                                                      "loops.warm_start.optimizer.learning_rate=1"]),
        (["train.algorithm=sft", "sft.num_steps=0"], ["loops.main.algorithm.name=sft",
                                                      "loops.main.algorithm.batch_size=128",
                                                      "loops.warm_start.num_steps=0"]),
        (["train.algorithm=sft", "sft.batch_size=6", "grpo.clip_low=0.1", "sft.num_steps=0"],
         ["loops.main.algorithm.name=sft", "loops.main.algorithm.batch_size=6", "loops.warm_start.num_steps=0"]),
        (["train.gradient_checkpointing=true"], ["trainer.gradient_checkpointing=true"]),
    ],
)  # fmt: skip
def test_old_overrides_do_what_the_new_ones_do(old: Path, overrides: list[str], today: list[str]) -> None:
    wanted = load(rewritten(old), *today)
    assert load(old, *overrides) == wanted, "on a file of 0.1"
    assert load(rewritten(old), *overrides) == wanted, "on a file of today"


def test_old_settings_of_an_algorithm_count_beside_the_new_name_of_another(old: Path) -> None:
    another = "loops.main.algorithm.name=dr_grpo"
    found = load(old, another, "grpo.samples_per_prompt=4").loops.main.algorithm
    assert found == load(old, another, "loops.main.algorithm.samples_per_prompt=4").loops.main.algorithm
    with pytest.raises(BadConfig, match=r'"grpo\.samples_per_prompt" .*; it is a setting of another algorithm'):
        load(old, "loops.main.algorithm.name=kto", "grpo.samples_per_prompt=4")


def test_an_old_name_of_an_algorithm_beside_its_new_settings_is_refused(old: Path) -> None:
    overrides = ["loops.main.algorithm.batch_size=4", "train.algorithm=sft"]
    refusal = r"--set: found train\.algorithm, .* discard loops\.main\.algorithm\.batch_size; write loops\."
    with pytest.raises(BadConfig, match=refusal):
        load(old, *overrides)
    with pytest.raises(BadConfig, match=refusal):
        config.check_overrides(overrides)


def test_new_overrides_win_over_an_old_file(old: Path) -> None:
    assert load(old, "loops.main.num_steps=3").loops.main.num_steps == 3


def test_a_warm_start_can_be_added_by_an_old_override(old: Path) -> None:
    old.write_text(OLD.replace("num_steps = 30 # thirty\n", ""))
    assert load(old).loops.warm_start is None
    found = load(old, "sft.num_steps=4").loops.warm_start
    assert found is not None
    assert (found.num_steps, found.algorithm.rows_per_step) == (4, 128)


def test_a_problem_is_explained_by_the_new_name_beside_the_old_one(old: Path) -> None:
    number = r"loops.main.num_steps \(written as train.num_steps\): found 'many'"
    with pytest.raises(BadConfig, match=rf"1 problem in --set:\n +{number}"):
        load(old, "train.num_steps=many")
    choice = r"loops.main.algorithm.name \(written as train.algorithm\): found 'ppp', expected 'sft', 'grpo'"
    with pytest.raises(BadConfig, match=choice):
        load(old, "train.algorithm=ppp")


def test_a_file_of_both_forms_is_refused(old: Path) -> None:
    old.write_text(OLD + "\n[loops.main]\nnum_steps = 4\n")
    with pytest.raises(BadConfig, match=r"beside \[loops\]:\n  write loops.warm_start.num_steps instead of sft.num"):
        load(old)


def test_a_rewritten_file_means_the_same_and_keeps_its_comments(old: Path) -> None:
    before = load(old)
    new = rewritten(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.load(new) == before
    text = new.read_text()
    for kept in (
        "# A config of 0.1.\n",
        "# First, supervised steps.\n[loops.warm_start] # the warm start\nnum_steps = 30 # thirty\n",
        "# There is little margin.\nlearning_rate = 2e-4\n",
        "micro_batch_size = 16 # sixteen\n",
        "# The group decides.\n[loops.main.algorithm]\n",
        "# How completions are made.\n",
    ):
        assert kept in text, text
    assert migrated_text(new) == text, "nothing is left to rewrite"


def test_the_command_rewrites_the_file_in_place(old: Path, rlhf: Rlhf) -> None:
    before = load(old)
    assert execute(["config", "migrate", str(old)]) == 0
    assert load(old) == before
    assert "[train]" not in old.read_text()
    assert "already has the format of this version" in rlhf("config", "migrate", str(old)).stdout


@pytest.mark.parametrize("content", [b'name = "\xff"', b"name = [", None])
def test_a_file_that_cannot_be_read_is_refused_like_any_config(
    tmp_path: Path, content: bytes | None, rlhf: Rlhf
) -> None:
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_bytes(content)
    assert "unexpected" not in rlhf("config", "migrate", str(file), code=2).stderr


def test_a_file_that_cannot_be_rewritten_is_left_with_advice(old: Path, rlhf: Rlhf) -> None:
    text = OLD.replace("[grpo]\nsamples_per_prompt = 16\nmeasure_kl = true\n", "")
    old.write_text("grpo = { clip_low = 0.1 }\n" + text)
    answer = rlhf("config", "migrate", str(old), code=2)
    assert "write loops.main.algorithm.clip_low instead of grpo.clip_low" in answer.stderr
    assert "grpo = {" in old.read_text()


def test_a_stored_spec_of_0_1_is_read(tmp_path: Path) -> None:
    stored: dict[str, Any] = {
        "schema_version": 1, "run_id": "old-20260101-000000-abcdef", "created_at": "2026-01-01T00:00:00Z",
        "owner": "anna", "config_source": "old.toml", "package_version": "0.1.0",
        "spec": {
            "name": "old", "seed": 1, "model": {"config": {"model_type": "qwen3"}, "tokenizer": "char"},
            "data": {"train": "a.jsonl"}, "sft": {"num_steps": 0, "batch_size": 8, "learning_rate": 0.1},
            "train": {"algorithm": "sft", "num_steps": 9, "learning_rate": 0.5, "log_samples_every": 3},
            "grpo": {"prompts_per_step": 4}, "trainer": {"kind": "native", "zero_stage": 1},
        },
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(stored))
    spec = RunDir(tmp_path).read_spec().spec
    assert spec.loops.warm_start is None
    assert spec.loops.main.algorithm == SftSpec(name="sft", batch_size=8)
    assert (spec.loops.main.optimizer.learning_rate, spec.trainer.log_samples_every) == (0.5, 3)
    assert RunSpec.model_validate(current_document(spec.model_dump(mode="json"))) == spec


def test_changes_of_settings_that_are_stored_with_attempts_of_0_1_apply() -> None:
    spec = config.load("quickstart")
    assert with_changes(spec, {"train.micro_batch_size": 4}) == with_changes(spec, {"trainer.micro_batch_size": 4})


def test_settings_of_a_checkpoint_of_0_1_are_compared_in_the_form_of_today() -> None:
    old = {"sft": {"num_steps": 0, "learning_rate": 1e-4}, "train": {"algorithm": "grpo"}, "grpo": {"clip_low": 0.1}}
    loops = current_settings(old)["loops"]
    assert loops["warm_start"] is None
    assert loops["main"]["algorithm"] == {"name": "grpo", "clip_low": 0.1}
    assert current_settings({}) == {}


def test_a_renamed_setting_of_0_1_is_read_and_its_new_name_shown(old: Path) -> None:
    """All stored specs of 0.1 contain it."""
    old.write_text(f"{OLD}\n[preflight]\nmeet_s = 90\nprobe_s = 30\n")
    with pytest.warns(OldSettings, match=r"write supervise\.join_s instead of preflight\.meet_s"):
        spec = config.load(old)
    assert (spec.supervise.join_s, spec.preflight.probe_s) == (90.0, 30.0)
    assert load(old, "preflight.meet_s=20").supervise.join_s == 20.0
    stored = spec.model_dump(mode="json")
    stored["preflight"]["meet_s"] = stored["supervise"].pop("join_s")
    assert RunSpec.model_validate(stored) == spec
    with pytest.raises(BadConfig, match=r"by hand[\s\S]*write supervise\.join_s instead of preflight\.meet_s"):
        migrated_text(old)


def test_names_that_are_no_settings_of_0_1_stay() -> None:
    assert [current_name(name) for name in ("name", "trainer.kind", "training", "rollout.batch_size")] == [
        "name", "trainer.kind", "training", "rollout.batch_size",
    ]  # fmt: skip


def test_lines_and_manifests_of_0_1_are_read() -> None:
    moment = "2026-01-01T00:00:00Z"
    line = MetricsLine.model_validate({"step": 1, "time": moment, "stage": "sft", "metrics": {"a": 1.0}})
    assert line.loop == "sft"
    assert json.loads(line.model_dump_json())["loop"] == "sft"
    manifest = {"step": 1, "stage": "grpo", "stage_finished": True, "num_ranks": 1, "spec_hash": "", "files": {}}
    read = CheckpointManifest.model_validate({**manifest, "time": moment})
    assert (read.loop, read.loop_finished) == ("grpo", True)
    assert CheckpointManifest.model_validate_json(read.model_dump_json()) == read


def test_a_rewritten_file_keeps_its_mode_and_its_links(old: Path, tmp_path: Path) -> None:
    old.chmod(0o600)
    link = tmp_path / "link.toml"
    link.symlink_to(old.name)
    assert execute(["config", "migrate", str(link)]) == 0
    assert link.is_symlink()
    assert "[loops.main]" in old.read_text()
    assert old.stat().st_mode & 0o777 == 0o600
