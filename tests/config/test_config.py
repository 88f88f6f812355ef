"""Config files, overrides and site settings: accepted input, and the messages about mistakes."""

import errno
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from rlhf_core.config import fields as config_fields
from rlhf_core.config import loading as config
from rlhf_core.config import problems
from rlhf_core.config import site as site_config
from rlhf_core.config.site_paths import make_absolute
from rlhf_core.errors import BadConfig
from rlhf_core.history.database import parse_url
from rlhf_core.presets import PRESETS
from rlhf_core.schemas.algorithms.policy_gradient import GrpoSpec
from rlhf_core.schemas.algorithms.supervised import SftSpec
from rlhf_core.schemas.base import Schema, field_docs
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.trainers import NativeTrainer

MINIMAL = """
name = "trial"
[model]
tokenizer = "char"
[model.config]
model_type = "qwen3"
[data]
generator = "rlhf_core.training.tasks:sort_digits"
[loops.main]
num_steps = 3
algorithm = {name = "grpo"}
optimizer = {learning_rate = 1e-6}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "trial.toml"
    path.write_text(MINIMAL)
    return path


def problem(path: Path, *overrides: str) -> str:
    """The message that refuses a config."""
    with pytest.raises(BadConfig) as caught:
        config.load(path, overrides)
    return str(caught.value)


def site_in(home: Path, **variables: str) -> site_config.Site:
    """The settings of a site with this home folder."""
    return site_config.load_site({"RLHF_HOME": str(home), **variables})


def test_a_minimal_file_loads_with_defaults(minimal: Path) -> None:
    spec = config.load(minimal)
    assert spec.name == "trial"
    assert spec.total_steps == 3
    assert spec.num_ranks == 1


def test_overrides_are_toml_values_and_bare_words_are_text(minimal: Path) -> None:
    overrides = ["loops.main.num_steps=10", "name=other", "loops.main.optimizer.learning_rate=1e-3"]
    spec = config.load(minimal, [*overrides, 'reward.functions=["a.b:c"]', "loops.main.algorithm.measure_kl=true"])
    main = spec.loops.main
    assert (main.num_steps, spec.name, main.optimizer.learning_rate) == (10, "other", 1e-3)
    assert spec.reward.functions == ("a.b:c",)
    assert isinstance(main.algorithm, GrpoSpec)
    assert main.algorithm.measure_kl


@pytest.mark.parametrize(
    ("override", "number"),
    [
        ("resources.time_limit_s=24h", "a whole number; in seconds, that is 86400"),
        ("resources.time_limit_s=27.123h", "in seconds, that is 97642.8"),
        ("supervise.max_node_hours=10min", "in hours, that is 0.1667"),
        ("resources.time_limit_s=1-00:30:00", "in seconds, that is 88200"),
        ("resources.time_limit_s=12:00:00", "in seconds, that is 43200"),
        ("supervise.floor_s=1.5 min", "a number; in seconds, that is 90"),
        ("supervise.max_node_hours=2d", "in hours, that is 48"),
        ("resources.memory_gb=64GB", "in GiB, that is 64"),
        ("resources.memory_gb=512M", "in GiB, that is 0.5"),
    ],
)
def test_a_value_with_a_unit_is_answered_with_the_number_to_write(minimal: Path, override: str, number: str) -> None:
    assert number in problem(minimal, override)


@pytest.mark.parametrize(
    ("override", "form"),
    [
        ("reward.functions=my_rewards:f", "'reward.functions=[\"my_rewards:f\"]'"),
        ("preflight.off.memory.trainer=it fits", '\'preflight.off={"memory.trainer" = "it fits"}\''),
        ("preflight.off=memory.trainer", '\'preflight.off={"memory.trainer" = "the reason"}\''),
    ],
)
def test_a_list_or_table_is_shown_as_a_shell_takes_it(minimal: Path, override: str, form: str) -> None:
    assert form in problem(minimal, override)
    config.load(minimal, [form.strip("'")])


@pytest.mark.parametrize("value", ["{memory.trainer=it fits}", '["memory.trainer"]'])
def test_a_malformed_table_of_checks_is_answered_with_its_form(minimal: Path, value: str) -> None:
    """As a shell passes it on without quotes, or as a list."""
    found = problem(minimal, f"preflight.off={value}")
    assert '; write \'preflight.off={"CHECK" = "the reason"}\'' in found
    assert ("it is not valid TOML" in found) == value.startswith("{")


@pytest.mark.parametrize("override", ["resources.time_limit_s=24x", "seed=24h", "resources.time_limit_s=64GB"])
def test_other_text_for_a_number_has_no_unit(minimal: Path, override: str) -> None:
    assert "that is" not in problem(minimal, override)


def test_names_of_other_programs_are_no_settings() -> None:
    """Every suggested name exists, and none of the explained names is a setting itself."""
    names = {field.name for field in config_fields.describe_fields()}
    assert names.isdisjoint(problems._MEANT)
    suggested = {name for text in problems._MEANT.values() for name in re.findall(r'"([a-z_.]+)"', text)}
    assert suggested - names == set()


@pytest.mark.parametrize("override", ["loops.main.num_steps", "=3", "loops..x=1", ".x=1"])
def test_an_override_without_form_is_refused(minimal: Path, override: str) -> None:
    with pytest.raises(BadConfig, match="does not have the form"):
        config.load(minimal, [override])


def test_an_override_below_a_value_is_refused(minimal: Path) -> None:
    with pytest.raises(BadConfig, match="name is a value, not a section"):
        config.load(minimal, ["name.x=1"])


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("loops.main.num_stepps=1", 'did you mean "loops.main.num_steps"?'),
        ("loops.main.samples_per_prompt=4", 'did you mean "loops.main.algorithm.samples_per_prompt"?'),
        ("loops.main.algorithm.batch_size=4", "it is a setting of another algorithm"),
        ('trainer.argv=["python"]', "it is a setting of another trainer"),
        ("train.num_stepps=1", 'did you mean "loops.main.num_steps"?'),
        ("loops.main.lr=1", 'the name here is "loops.main.optimizer.learning_rate"'),
        ("slurm.time=1", 'the name here is "resources.time_limit_s"'),
        ("slurm.mem=64", 'the name here is "resources.memory_gb"'),
        ("slurm.nodelist=a[1-4]", 'write slurm.extra = ["--nodelist=..."]'),
        ("checkpoint.steps=5", 'the name here is "checkpoint.every_num_steps"'),
        ("resources.gpu_type=h100", 'the name here is "slurm.gpu_type"'),
        ("scheduler=slurm", "set RLHF_SCHEDULER in the environment"),
        ("algorithm=ppo", 'the algorithm is chosen by "loops.main.algorithm.name"'),
        ("loops.main.algorithm=ppo", "the algorithm is chosen by loops.main.algorithm.name"),
        ("lops.main.num_steps=1", 'did you mean "loops.main.num_steps"?'),
        ("seeed=1", 'did you mean "seed"?'),
        ("name=MyRun", 'starting with a letter or digit, for instance "myrun"'),
        ("loops.main.zzzzzzzzz=1", "[loops.main] has num_steps, epochs"),
        ("model.lora={r=16}", 'unknown key "model.lora.r"; [model.lora] has rank'),
        ("reward.models.good.batch=3", "[reward.models.good] has path, weight, dtype, device, batch_size"),
        (
            "reward.models.good={batch=3}",
            'unknown key "reward.models.good.batch"; [reward.models.good] has path, weight',
        ),
        ("reward.models.good.weight=3", 'missing key "reward.models.good.path": Folder of a Hugging Face'),
        ("zzz=1", "the sections are"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_right_one(minimal: Path, override: str, answer: str) -> None:
    assert answer in problem(minimal, override)


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("seed=abc", "seed: found 'abc'"),
        ("loops.main.optimizer.learning_rate=inf", "finite"),
        ("loops.main.optimizer.learning_rate=nan", "loops.main.optimizer.learning_rate"),
        ("loops.main.algorithm.name=ppp", "loops.main.algorithm.name: found 'ppp', expected 'sft', 'grpo'"),
        ("loops.main.algorithm=3", "loops.main.algorithm: found 3"),
        ("data.generator=abc", 'expected "module:function"'),
        ("data.train=x.jsonl", "either the generator or the files"),
        ("reward.weights=[nan]", "reward.weights.0: found nan, expected a finite number"),
        ("supervise.gap_factor=inf", "supervise.gap_factor: found inf, expected a finite number"),
        ("reward.weights=[1.0, 2.0]", "found 2 reward.weights for 1 reward.functions"),
        ("loops.main.algorithm.samples_per_prompt=1", "loops.main.algorithm.samples_per_prompt: found 1"),
        ("name=Has Spaces", "name: found 'Has Spaces'"),
        ("seed=1.5", "seed: found 1.5, expected a whole number"),
        ("seed=true", "seed: found true, expected a number"),
        ("loops.main.optimizer.learning_rate=true", "learning_rate: found true, expected a number"),
        ("loops.main.optimizer.adam_beta2=1.0", "adam_beta2: found 1.0, expected less than 1"),
        ("loops.main.algorithm.correction_cap=1", "correction_cap: found 1, expected more than 1"),
        ("loops.main.num_steps=0", "loops.main: found neither num_steps nor epochs"),
        ("resources.memory_gb=1e300", "resources.memory_gb: found 1e+300, expected at most 2147483647"),
        ("supervise.backoff_s=-1e300", "supervise.backoff_s: found -1e+300, expected at least 0"),
        ("promote.timeout_h=1e300", "promote.timeout_h: found 1e+300, expected at most 876000"),
        ("rollout.top_p=0.9", "rollout: found rollout.top_p, but training samples from the whole distribution of the"),
        ('rollout.stop_strings=[""]', "rollout.stop_strings.0: found ''"),
        ("evaluate.top_p=0", "evaluate.top_p: found 0, expected more than 0"),
        ("resources=3", "resources: found 3, expected a table of settings"),
        ("trainer.zero_stage=7", "trainer.zero_stage: found 7, expected 0, 1, 2 or 3"),
        ("reward.functions=a:b", "reward.functions: found 'a:b', expected a list in square brackets"),
        ("slurm.account=12", "found 12, expected text; as text it needs quotes: 'slurm.account=\"12\"'"),
        ("slurm.environment.A=1", "expected text; as text it needs quotes: 'slurm.environment.A=\"1\"'"),
        ('reward.functions=["a:b"', "a list in square brackets; it is not valid TOML, so it was read as text"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(minimal: Path, override: str, answer: str) -> None:
    assert answer in problem(minimal, override)


@pytest.mark.parametrize("other", ["delta=true", "transport=files", "transport=shared_memory"])
def test_several_senders_are_refused_where_one_rank_alone_can_send(minimal: Path, other: str) -> None:
    for senders in (1, 2):
        overrides = [f"rollout.sync.{one}" for one in (f"senders={senders}", other)]
        if senders == 1:
            config.load(minimal, overrides)
        else:
            with pytest.raises(BadConfig, match=r"rollout.sync: found senders = 2 with .* or senders = 1"):
                config.load(minimal, overrides)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_library_of_the_broadcast_is_refused_for_other_ways(minimal: Path, backend: str) -> None:
    config.load(minimal, [f"rollout.sync.backend={backend}"])
    with pytest.raises(BadConfig, match=rf'rollout.sync: found backend = "{backend}" with transport = "files"'):
        config.load(minimal, [f"rollout.sync.backend={backend}", "rollout.sync.transport=files"])


def test_every_time_in_seconds_fits_into_clocks_and_timers(minimal: Path) -> None:
    """They overflow long before a float does, some of them only on the nodes."""
    names = [field.name for field in config_fields.describe_fields() if re.search(r"(?<!_gb)_s$", field.name)]
    assert "supervise.setup_floor_s" in names
    for name in names:
        with pytest.raises(BadConfig, match=rf"{name}: found 1e\+300, expected (at most 2147483647|a whole number)"):
            config.load(minimal, [f"{name}=1e300"])


def test_all_problems_of_a_file_are_reported_at_once(minimal: Path) -> None:
    found = problem(minimal, "seed=x", "loops.main.lr=1", "loops.main.algorithm.clip_low=2")
    assert all(text in found for text in ("3 problems", "seed", "loops.main.lr", "algorithm.clip_low"))


def test_the_word_for_the_newest_run_names_no_new_run(minimal: Path) -> None:
    with pytest.raises(BadConfig, match=r'found name = "last", which commands take for the newest run; choose another'):
        config.load(minimal, ["name=last"])
    spec = config.load(minimal, ["name=last-one"])
    assert RunSpec.model_validate({**spec.model_dump(), "name": "last"}), "runs of older versions are read"


def test_a_missing_key_comes_with_its_meaning(minimal: Path) -> None:
    minimal.write_text(MINIMAL.replace("learning_rate = 1e-6", ""))
    with pytest.raises(BadConfig, match=r'missing key "loops.main.optimizer.learning_rate": Peak learning rate'):
        config.load(minimal)
    minimal.write_text(MINIMAL.replace("num_steps = 3", ""))
    with pytest.raises(BadConfig, match=r"loops.main: found neither num_steps nor epochs"):
        config.load(minimal)
    minimal.write_text(MINIMAL.replace("optimizer = {learning_rate = 1e-6}", "").replace('name = "grpo"', ""))
    found = problem(minimal)
    assert 'missing section "loops.main.optimizer"; it needs loops.main.optimizer.learning_rate' in found
    assert 'missing key "loops.main.algorithm.name": `sft`:' in found


@pytest.mark.parametrize(
    ("content", "answer"), [(b"name = ", "not valid TOML"), (b"\xff\xfe", "not UTF-8"), (b"", "problem in")]
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, answer: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    found = problem(path)
    assert answer in found
    assert "broken.toml" in found


def test_a_config_that_is_not_there_is_answered_with_those_of_its_folder(
    minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(minimal.parent)
    folder, other = minimal.parent, minimal.with_name("other.toml")
    other.write_text(MINIMAL)
    answers = {
        "othr.toml": r"does not exist; did you mean other\.toml\?",
        f"{folder}": rf"is a folder; {folder} has other\.toml, trial\.toml",
        "nowhere/zzz.toml": "does not exist; `rlhf init` writes one",
        "quickstart.toml": 'did you mean the preset "quickstart"',
        "quickstrt": '/quickstrt does not exist; did you mean the preset "quickstart"',
        "zzz": "shipped presets are quickstart",
    }
    for given, answer in answers.items():
        with pytest.raises(BadConfig, match=answer):
            config.load(given)


def test_a_byte_order_mark_is_passed_over(minimal: Path) -> None:
    expected = config.load(minimal)
    minimal.write_bytes(b"\xef\xbb\xbf" + minimal.read_bytes())
    assert config.load(minimal) == expected


def test_an_open_bracket_is_named_where_it_stands(tmp_path: Path) -> None:
    """The parser reports the line after it."""
    path = tmp_path / "broken.toml"
    path.write_text('# not this [\nname = "a]"\nreward.functions = [\n  "a:b",\nseed = 3\n')
    with pytest.raises(BadConfig, match=r"broken.toml is not valid TOML: .*; the \[ in line 3 is never closed"):
        config.load(path)


@pytest.mark.parametrize(
    ("second", "named"),
    [('api_key = "secret"', "api_key"), ("[trainer]", r"\[trainer\]"), ("[[trainer]]", r"\[\[trainer\]\]")],
)
def test_what_is_given_twice_is_named_without_its_value(tmp_path: Path, second: str, named: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(f'[trainer]\napi_key = "first"\n{second}\n')
    with pytest.raises(BadConfig, match=rf"not valid TOML: Cannot .*\(at line 3.*\), in {named}$") as raised:
        config.load(path)
    assert "secret" not in str(raised.value)


def test_true_is_still_true_where_a_setting_takes_it(minimal: Path) -> None:
    trainer = config.load(minimal, ["trainer.gradient_checkpointing=true"]).trainer
    assert isinstance(trainer, NativeTrainer)
    assert trainer.gradient_checkpointing is True


def test_a_teacher_is_needed_to_learn_from_and_a_reference_to_compare_with(minimal: Path) -> None:
    taught = ["loops.main.algorithm.name=distillation"]
    with pytest.raises(BadConfig, match=r"found distillation without a teacher; expected reference, the folder of"):
        config.load(minimal, taught)
    loop = config.load(minimal, [*taught, "loops.main.reference=models/teacher"]).main_loop
    assert (loop.reference, loop.algorithm.reference, loop.algorithm.samples) == ("models/teacher", True, True)
    named = ["loops.main.algorithm.name=grpo", "loops.main.reference=models/base"]
    with pytest.raises(BadConfig, match=r"found reference = 'models/base' with grpo, which as set here compares"):
        config.load(minimal, named)
    assert config.load(minimal, [*named, "loops.main.algorithm.kl_coefficient=0.1"]).main_loop.algorithm.reference


def test_no_tokenizer_is_built_for_a_model_that_exists(minimal: Path) -> None:
    found = r'found model.tokenizer = "char" with model.path; .* leave model.tokenizer out, or name the folder'
    with pytest.raises(BadConfig, match=found):
        config.load(minimal, ["model.path=/models/a", "model.tokenizer=char"])
    config.load(minimal, ["model.path=/models/a", "model.tokenizer=/models/b"])


def test_a_model_given_as_a_path_replaces_the_one_that_the_file_builds(minimal: Path) -> None:
    model = config.load(minimal, ["model.path=/models/a"]).model
    assert (model.path, model.config, model.tokenizer) == ("/models/a", {}, "")
    for others in (
        ["model.path=/models/a", "model.config.hidden_size=8"],
        ["model.config.hidden_size=8", "model.path=/a"],
    ):
        with pytest.raises(BadConfig, match=r"found both of model.path and model.config"):
            config.load(minimal, others)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_by_name(name: str) -> None:
    assert isinstance(config.load(name), RunSpec)


def test_every_setting_has_a_meaning_of_one_sentence() -> None:
    fields = config_fields.describe_fields()
    assert len(fields) > 50
    for field in fields:
        assert field.meaning.endswith("."), field.name
        assert "\n" not in field.meaning, field.name
        assert field.type, field.name
    assert set(config_fields.describe_sections()) == {field.name.rpartition(".")[0] for field in fields} - {""}


class _Base(Schema):
    kept: int = 0
    """Of the
    base."""
    changed: int = 0
    """Of the base too."""
    bare: int = 0


class _Derived(_Base):
    changed: int = 1
    own: str = "a"
    """Its own."""
    "Another text."


def test_the_meaning_of_a_field_is_the_string_under_it() -> None:
    assert field_docs(_Base) == {"kept": "Of the base.", "changed": "Of the base too."}
    assert field_docs(_Derived) == {"kept": "Of the base.", "changed": "Of the base too.", "own": "Its own."}


def test_sections_with_a_choice_are_described_in_words() -> None:
    fields = {field.name: field for field in config_fields.describe_fields()}
    assert not [field for field in fields.values() if "<" in field.type or "." in field.type], "no class name"
    chosen = fields["loops.main.algorithm.name"]
    assert (chosen.type.startswith('"sft" | "grpo" | "dr_grpo"'), chosen.required) == (True, True)
    assert chosen.meaning.startswith("`sft`: Supervised")
    assert fields["loops.main.algorithm.gae_lambda"].meaning.endswith("Only for `ppo`.")
    higher = fields["loops.main.algorithm.clip_high"]
    assert higher.default == "0.2"
    assert "Other defaults: `dapo`: 0.28," in higher.meaning
    assert "sft" not in higher.only_for
    assert "Only for `sft`, `dpo`" in fields["loops.main.algorithm.batch_size"].meaning
    assert config_fields.optional_sections() == {"loops.warm_start", "model.lora"}


def test_another_algorithm_does_not_take_over_the_settings_of_the_file(minimal: Path) -> None:
    minimal.write_text(MINIMAL.replace('name = "grpo"', 'name = "grpo", clip_low = 0.1'))
    assert config.load(minimal, ["loops.main.algorithm.name=sft"]).loops.main.algorithm == SftSpec(name="sft")
    same = config.load(minimal, ["loops.main.algorithm.name=grpo"]).loops.main.algorithm
    assert same == GrpoSpec(name="grpo", clip_low=0.1)


def test_the_name_of_an_algorithm_keeps_the_overrides_before_it(minimal: Path) -> None:
    overrides = ["loops.main.algorithm.batch_size=6", "loops.main.algorithm.name = sft"]
    expected = SftSpec(name="sft", batch_size=6)
    assert config.load(minimal, overrides).loops.main.algorithm == expected
    assert config.load(minimal, overrides[::-1]).loops.main.algorithm == expected
    wrong = ["loops.main.algorithm.clip_low=0.1", "loops.main.algorithm.name=sft"]
    with pytest.raises(BadConfig, match="clip_low"):
        config.load(minimal, wrong)
    with pytest.raises(BadConfig, match="clip_low"):
        config.check_overrides(wrong)


def test_defaults_in_the_help_are_valid_toml_and_true(minimal: Path) -> None:
    spec = config.load(minimal)
    stated = [field for field in config_fields.describe_fields() if not field.required]
    changed = (
        "model.tokenizer",
        "model.config",
        "model.lora.",
        "data.generator",
        "loops.warm_start.",
        "loops.main.num_steps",
        "loops.main.algorithm.batch_size",
    )
    kept = [
        one
        for one in stated
        if not one.name.startswith(changed) and (not one.only_for or {"grpo", "native"} & {*one.only_for})
    ]
    again = config.load(minimal, [f"{one.name}={one.default}" for one in kept])
    assert again == spec


def test_site_settings_from_environment_file_and_default(tmp_path: Path) -> None:
    site = site_in(tmp_path)
    assert site.runs_dir == tmp_path / "runs"
    assert site.database_url == f"sqlite:///{tmp_path / 'history.db'}"
    assert (site.scheduler, site.compute_python) == ("local", sys.executable)

    (tmp_path / "rlhf.toml").write_text('scheduler = "slurm"\nruns = "/shared/runs"\n')
    site = site_in(tmp_path)
    assert (site.scheduler, site.runs_dir) == ("slurm", Path("/shared/runs"))
    assert site_in(tmp_path, RLHF_SCHEDULER="local").scheduler == "local"


def test_paths_in_the_site_file_are_in_its_folder(tmp_path: Path) -> None:
    """Paths mean the same to a command and to a service that starts in another folder."""
    lines = ('runs = "runs-of-ours"', 'compute_python = "env/bin/python"', 'job_secrets = "keys.env"')
    (tmp_path / "rlhf.toml").write_text("\n".join(lines))
    site = site_in(tmp_path)
    assert site.runs_dir == tmp_path / "runs-of-ours"
    assert site.compute_python == str(tmp_path / "env/bin/python")
    assert site.job_secrets == tmp_path / "keys.env"
    (tmp_path / "rlhf.toml").write_text('compute_python = "python3.11"\nruns = ""\n')
    site = site_in(tmp_path)
    assert (site.compute_python, site.runs_dir) == ("python3.11", tmp_path / "runs")


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite:///ours.db", "{home}/ours.db"),
        ("sqlite:///./a/ours.db", "{home}/a/ours.db"),
        ("sqlite+pysqlite:///ours.db", "{home}/ours.db"),
        ("sqlite:////var/ours.db", "/var/ours.db"),
        ("sqlite:///~/ours.db", f"{Path.home()}/ours.db"),
    ],
)
def test_a_relative_database_in_the_site_file_is_in_its_folder(tmp_path: Path, url: str, file: str) -> None:
    (tmp_path / "rlhf.toml").write_text(f'database_url = "{url}"\n')
    site = site_in(tmp_path)
    assert parse_url(site.database_url).database == file.format(home=tmp_path)


@pytest.mark.parametrize("url", ["postgresql://user@host/ours", "sqlite:///:memory:", "sqlite://", "ours.db"])
def test_other_databases_in_the_site_file_stay_as_they_are(tmp_path: Path, url: str) -> None:
    (tmp_path / "rlhf.toml").write_text(f'database_url = "{url}"\n')
    assert site_in(tmp_path).database_url == url


def test_a_relative_database_in_the_environment_is_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site = site_config.load_site({"RLHF_HOME": "/home-of-ours", "RLHF_DATABASE_URL": "sqlite:///ours.db"})
    assert parse_url(site.database_url).database == str(tmp_path / "ours.db")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RLHF_RUNS", "/shared/runs"),
        ("RLHF_RUNS", "~/runs"),
        ("RLHF_RUNS", ""),
        ("RLHF_COMPUTE_PYTHON", "python3.11"),
        ("RLHF_DATABASE_URL", "postgresql://user@host/ours"),
        ("RLHF_DATABASE_URL", "sqlite:////var/ours.db"),
        ("RLHF_DATABASE_URL", "sqlite:///~/ours.db"),
    ],
)
def test_variables_without_a_relative_path_stay_as_they_are(name: str, value: str) -> None:
    variables = {name: value}
    make_absolute(variables)
    assert variables == {name: value}


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (None, "found a folder"),
        (b"runs = [", "not valid TOML"),
        (b"\xff", "not UTF-8"),
        (b"runs = 3", "runs: found 3, expected text"),
        (b"scheduler = 'pbs'", "scheduler: found 'pbs', expected one of local, slurm"),
        (b"max_restarts_per_hour = 0", "max_restarts_per_hour: found '0', expected a positive integer"),
        (b"[slurm]\nx = 1", 'unknown key "slurm.x"'),
        (b"[retention]\ncheckpoints_days = 999999", "retention.checkpoints_days: found 999999, expected at most 36500"),
        (b"[prefect]\nkeep_days = 999999", "prefect.keep_days: found 999999, expected at most 36500"),
        (b"[prefect]\nreconcile_s = 1e300", "prefect.reconcile_s: found 1e+300, expected at most 2147483647"),
        (b"[retention]\ncheckpoints_days = true", "retention.checkpoints_days: found true, expected a number"),
        (b"[prefect]\nrestart_s = false", "prefect.restart_s: found false, expected a number"),
    ],
)
def test_a_wrong_site_file_is_refused_and_named_once(tmp_path: Path, content: bytes | None, answer: str) -> None:
    file = tmp_path / "rlhf.toml"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(BadConfig, match=re.escape(answer)) as refused:
        site_in(tmp_path)
    assert str(refused.value).count("rlhf.toml") == 1


def test_all_problems_of_a_site_file_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "rlhf.toml").write_text("schedular = 'slurm'\nrun = '/shared'\ncompute_python = 3\n")
    with pytest.raises(BadConfig) as refused:
        site_in(tmp_path)
    assert str(refused.value).splitlines() == [
        f"{tmp_path / 'rlhf.toml'}:",
        '  unknown key "schedular"; did you mean "scheduler"?',
        '  unknown key "run"; did you mean "runs"?',
        "  compute_python: found 3, expected text",
    ]


def test_a_config_of_another_user_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(BadConfig, match=r"not accessible to .* denied\. .* deployed by the user of the worker"):
        config.find("/home/anna/.rlhf/deployments/x/config.toml")


def test_a_home_folder_of_another_user_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(site_config, "read_toml", refused)
    with pytest.raises(BadConfig, match=r"rlhf\.toml: Permission denied\. Set RLHF_HOME to a folder of your own"):
        site_in(tmp_path)


def test_a_problem_is_blamed_on_what_made_it(minimal: Path) -> None:
    with minimal.open("a") as file:
        file.write(
            "[loops.warm_start]\nlr = 1\nnum_steps = 1\nalgorithm = {name = 'sft'}\noptimizer = {learning_rate = 1}\n"
        )
    with pytest.raises(BadConfig) as caught:
        config.load(minimal, ["loops.main.num_stepz=3", "seed=x"], "the form")
    in_form, _, in_file = str(caught.value).partition(f"1 problem in {minimal}:")
    assert in_form.startswith("2 problems in the form:")
    assert "loops.main.num_stepz=3" in in_form
    assert "seed: found 'x'" in in_form
    assert "loops.warm_start.lr" in in_file
    with pytest.raises(BadConfig, match="the form: override 'seed' does not have the form"):
        config.load(minimal, ["seed"], "the form")


def test_overrides_without_a_config_are_checked_for_what_no_config_can_have() -> None:
    config.check_overrides(["loops.main.num_steps=3", "model.config.anything=1", "resources.num_nodes=400"])
    with pytest.raises(BadConfig, match="3 problems in --set") as caught:
        config.check_overrides(["loops.main.num_stepz=3", "seed=x", "name=MyRun"])
    assert "model" not in str(caught.value), "the missing key may be set in the config"


@pytest.mark.parametrize(
    "override",
    [
        "loops.main.algorithm.samples_per_promt=4",
        "loops.main.algorithm.clip_low=7",
        "grpo.samples_per_promt=4",
        "loops.warm_start.algorithm.batch_sice=4",
    ],
)
def test_settings_of_an_algorithm_are_checked_though_the_config_names_it(override: str) -> None:
    config.check_overrides(["loops.main.algorithm.clip_low=0.1", "loops.warm_start.algorithm.batch_size=4"])
    with pytest.raises(BadConfig, match="1 problem in --set"):
        config.check_overrides(["loops.main.num_steps=3", override])


@pytest.mark.parametrize("setting", ["RLHF_HOME", "RLHF_RUNS", "RLHF_COMPUTE_PYTHON", "RLHF_JOB_SECRETS"])
def test_the_home_of_nobody_is_named(setting: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="~no-such-user/x, but there is no user no-such-user; give"):
        site_in(tmp_path, **{setting: "~no-such-user/x"})


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user without a name."""

    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    with pytest.raises(BadConfig, match=r"~/\.rlhf, but .*, has no home folder; set HOME, or give"):
        site_config.load_site({})


@pytest.mark.parametrize("text", ["0", "-1", "²", "1.5"])
def test_the_limit_of_restarts_is_a_positive_integer(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="expected a positive integer"):
        site_in(tmp_path, RLHF_MAX_RESTARTS_PER_HOUR=text)


def test_any_text_can_be_written_as_toml() -> None:
    """A setting with a carriage return, as of a form in a browser, would be read as text with quotes and escapes."""
    text = "".join(map(chr, range(256)))
    assert tomllib.loads(f"value = {config_fields.to_toml(text)}")["value"] == text
