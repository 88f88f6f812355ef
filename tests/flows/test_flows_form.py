"""The form for requesting runs: flat, documented and validated; and the overrides made from its values."""

from pathlib import Path
from typing import Any

import pytest

from flows.form import Form, overrides_of, prefilled, read_form, settings_text
from flows.run import rlhf_run
from rlhf_core.config import loading as config
from rlhf_core.config.fields import describe_fields
from rlhf_core.config.site import load_site
from rlhf_core.control.driving_flow_run import DrivingFlowRun
from rlhf_core.control.new_run import new_run
from rlhf_core.control.snapshots import keep, kept_with
from rlhf_core.errors import BadInput

SMALL = """
name = "small"
model = { tokenizer = "char", config = { model_type = "qwen3" } }
data = { generator = "my_data:rows" }
reward = { functions = ["my_rewards:score"] }
loops.main = { num_steps = 8, algorithm = { name = "grpo" }, optimizer = { learning_rate = 1e-4 } }
resources = { num_nodes = 2 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a config and the code it needs."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "small.toml").write_text(SMALL)
    (place / "my_rewards.py").write_text("def score(**columns): return [1.0]\n")
    (place / "my_data.py").write_text("def rows(split, seed): return []\n")
    return place


def test_every_field_is_flat_and_explained() -> None:
    """Tables, lists, alternatives and empty values break the forms of Prefect's UI (observed with 3.7.7)."""
    properties = rlhf_run.parameters.model_dump()["properties"]
    assert set(properties) == set(Form.model_fields)
    assert {one["type"] for one in properties.values()} == {"string", "integer", "number"}
    assert not any("anyOf" in one or "allOf" in one or "$ref" in one for one in properties.values())
    assert all(one["description"].endswith(".") for one in properties.values())
    assert properties["nodes"]["minimum"] == 0
    assert "loops.main.optimizer.learning_rate" in properties["learning_rate"]["description"]


def test_the_list_of_settings_has_every_setting_with_its_own_default() -> None:
    items = settings_text().splitlines()
    assert len(items) == len(describe_fields())
    for item, field in zip(items, describe_fields(), strict=True):
        assert item.startswith(f"- `{field.name}` (")
        assert item.endswith(f": {field.meaning}")
        assert "|" not in item.removesuffix(field.meaning), "in a table it would begin another cell"
    (dtype,) = [item for item in items if item.startswith("- `model.dtype` ")]
    assert '("float32" or "bfloat16"; default `"float32"`)' in dtype


def test_unchanged_fields_are_no_overrides(folder: Path) -> None:
    source = str(folder / "small.toml")
    filled = prefilled(config.load(source))
    assert overrides_of(read_form({"config": source, **filled})) == []
    assert overrides_of(read_form({"config": source})) == [], "nor is a form without values"


def test_a_changed_field_overrides_its_setting(folder: Path) -> None:
    source = str(folder / "small.toml")
    changed = {"name": "other", "nodes": 4, "gpus_per_node": 8, "steps": 5, "learning_rate": 3e-4, "seed": 7}
    form = read_form(
        {"config": source, **changed, "overrides": "rollout.temperature=0.5\n\n loops.main.algorithm.name=sft "}
    )
    overrides = overrides_of(form)
    assert overrides[:2] == ["rollout.temperature=0.5", "loops.main.algorithm.name=sft"]
    spec = config.load(source, overrides)
    assert prefilled(spec) == changed
    assert len(overrides) == 8


def test_an_override_wins_over_an_unchanged_field(folder: Path) -> None:
    source = str(folder / "small.toml")
    form = read_form({"config": source, **prefilled(config.load(source)), "overrides": "loops.main.num_steps=3"})
    assert config.load(source, overrides_of(form)).loops.main.num_steps == 3


def test_a_seed_that_a_browser_would_round_stays_as_in_the_config(folder: Path) -> None:
    source = str(folder / "small.toml")
    spec = config.load(source, [f"seed={2**63 - 1}"])
    filled = prefilled(spec)
    assert "seed" not in filled
    kept = str(keep(source, [f"seed={2**63 - 1}"], "nightly", folder / "home", folder).config)
    assert config.load(kept, overrides_of(read_form({"config": kept, **filled}))).seed == spec.seed
    assert overrides_of(read_form({"config": kept, **filled, "seed": 7})) == ["seed=7"]


def test_a_setting_that_is_given_twice_is_refused(folder: Path) -> None:
    form = read_form({"config": str(folder / "small.toml"), "steps": 5, "overrides": "loops.main.num_steps=3"})
    with pytest.raises(BadInput, match=r"steps = 5, and loops.main.num_steps = 3 among the overrides"):
        overrides_of(form)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": -1}, r"nodes \(resources.num_nodes\): found -1"),
        ({"seed": "abc"}, "seed"),
        ({"name": "Has Spaces"}, "name"),
        ({"steps": None}, "steps"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"tags": {"__prefect_kind": "json"}}, r"found tags = \{'__prefect_kind': 'json'\}.*fill in tags"),
        ({"nodes": {"__prefect_kind": "none"}}, "fill in nodes"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_invalid_values_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_form({"config": "quickstart", **given})


def test_a_form_without_a_config_reports_the_missing_field() -> None:
    with pytest.raises(BadInput, match="give either config"):
        overrides_of(read_form({}))


def test_texts_and_lists_mean_the_same() -> None:
    one = read_form({"tags": "a, b c,\n", "overrides": "seed=1\nloops.main.num_steps=2"})
    assert one == read_form({"tags": ["a", "b c"], "overrides": ["seed=1", "loops.main.num_steps=2"]})


# ---------------------------------------------------------------------------------------------------------------------
# Kept configs


def test_a_kept_config_does_not_change_with_the_file_and_the_code(folder: Path, tmp_path: Path) -> None:
    kept = keep(str(folder / "small.toml"), ["seed=5"], "nightly", tmp_path / "home", folder)
    (folder / "small.toml").write_text(SMALL.replace("num_steps = 8", "num_steps = 9"))
    (folder / "my_rewards.py").write_text("changed")
    spec = config.load(kept.config)
    assert (spec.loops.main.num_steps, spec.seed) == (8, 5)
    site = load_site({"RLHF_HOME": str(tmp_path / "home")})
    run_dir = new_run(str(kept.config), [], site)
    snapshot = run_dir.code / "snapshot"
    assert "changed" not in (snapshot / "my_rewards.py").read_text()
    assert (snapshot / "my_data.py").is_file()


def test_code_named_by_an_override_is_kept_too(folder: Path, tmp_path: Path) -> None:
    """`rlhf submit FILE --set reward.functions=[...]` names a module that is not in the file."""
    (folder / "other_rewards.py").write_text("def score(**columns): return []")
    overrides = ['reward.functions=["other_rewards:score"]']
    kept = keep(str(folder / "small.toml"), [], "small", tmp_path / "home", folder, further=overrides)
    assert "other_rewards" not in kept.config.read_text(), "the override is the run's, and stands with the run"
    site = load_site({"RLHF_HOME": str(tmp_path / "home")})
    run_dir = new_run(str(kept.config), overrides, site)
    assert (run_dir.code / "snapshot" / "other_rewards.py").is_file()
    without = keep(str(folder / "small.toml"), [], "small", tmp_path / "home", folder)
    assert not (new_run(str(without.config), overrides, site).code / "snapshot" / "other_rewards.py").exists()


def test_an_equal_config_is_kept_once_and_a_changed_one_separately(folder: Path, tmp_path: Path) -> None:
    def again() -> Path:
        return keep(str(folder / "small.toml"), [], "small", tmp_path / "home", folder).config

    first = again()
    assert again() == first
    (folder / "my_rewards.py").write_text("changed")
    assert again() != first
    assert first.is_file(), "a schedule that uses it still finds it"


def test_relative_paths_start_at_the_folder_of_the_deployment(folder: Path, tmp_path: Path) -> None:
    (folder / "helpers").mkdir()
    (folder / "helpers" / "one.py").write_text("")
    (folder / "small.toml").write_text(SMALL + 'code = { paths = ["helpers"] }\n')
    kept = keep(str(folder / "small.toml"), [], "small", tmp_path / "home", folder)
    assert kept_with(str(kept.config)) == kept
    site = load_site({"RLHF_HOME": str(tmp_path / "home")})
    run_dir = new_run(
        str(kept.config), ["model.config={}", "model.tokenizer=", "model.path=weights"], site, folder=kept.folder
    )
    assert run_dir.read_spec().spec.model.path == str(folder / "weights")
    assert (run_dir.code / "snapshot" / "helpers" / "one.py").is_file()


def test_a_config_of_a_user_is_not_a_kept_one(folder: Path) -> None:
    assert kept_with(str(folder / "small.toml")) is None
    assert kept_with("quickstart") is None


# ---------------------------------------------------------------------------------------------------------------------
# The run made by a flow run


def test_a_flow_run_finds_only_its_own_run(folder: Path, tmp_path: Path) -> None:
    from rlhf_core.schemas.base import utc_now

    site = load_site({"RLHF_HOME": str(tmp_path / "home")})
    one, other = DrivingFlowRun("1" * 32, created=utc_now()), DrivingFlowRun("2" * 32, created=utc_now())
    source = str(folder / "small.toml")
    assert one.run_dir(site.runs_dir) is None
    made = new_run(source, [], site, flow_run=one)
    assert one.run_dir(site.runs_dir) == made
    assert made.run_id == one.run_id("small")
    assert other.run_dir(site.runs_dir) is None
    assert DrivingFlowRun().run_dir(site.runs_dir) is None, "without Prefect there is nothing to find"
    from rlhf_core.errors import RunDirError

    with pytest.raises(RunDirError, match="already exists"):
        new_run(source, [], site, flow_run=one)
    assert len(list(site.runs_dir.iterdir())) == 1, "two processes of one flow run cannot make two runs"


def test_a_run_of_a_preset_names_the_checkout_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deployments of `rlhf up` start such runs outside of any repository. A user's config is not the program's."""
    site = load_site({"RLHF_HOME": str(tmp_path / "home")})
    monkeypatch.setattr("rlhf_core.control.new_run.program_revision", lambda: "0123abc")
    outside = tmp_path / "outside"
    outside.mkdir()
    assert new_run("quickstart", [], site, folder=outside).read_spec().code_revision == "0123abc"
    own = outside / "own.toml"
    own.write_text(config.preset_path("quickstart").read_text(encoding="utf-8"), encoding="utf-8")
    assert new_run(str(own), [], site, folder=outside).read_spec().code_revision == ""
