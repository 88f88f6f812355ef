"""Secrets in settings are found and not repeated; passed secrets must exist; variables fit the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_preflight_checks import found, with_spec

from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.cluster import SlurmSpec

CANARY = "c4nary7Zq9Lw2Xv8"


def with_slurm(**slurm: Any) -> Any:
    return with_spec(slurm=slurm)


@pytest.mark.parametrize(
    ("section", "settings", "place"),
    [
        ("slurm", {"environment": {"OPENAI_KEY": CANARY}}, "slurm.environment.OPENAI_KEY"),
        ("slurm", {"environment": {"DATABASE_URL": f"mysql://anna:{CANARY}@h/d"}}, "slurm.environment.DATABASE_URL"),
        ("slurm", {"environment": {"HTTPS_PROXY": f"http://a:{CANARY}@proxy"}}, "slurm.environment.HTTPS_PROXY"),
        ("slurm", {"setup": ("module load cuda", f"export WANDB_API_KEY={CANARY}")}, "slurm.setup[1]"),
        ("slurm", {"extra": (f"--export=ALL,HF_TOKEN={CANARY}",)}, "slurm.extra[0]"),
        ("data", {"generator_args": {"api_key": CANARY}}, "data.generator_args.api_key"),
        ("promote", {"folder": f"/models/hf_{CANARY}"}, "promote.folder"),
    ],
)
def test_a_secret_in_a_setting_is_named_and_not_repeated(section: str, settings: dict[str, Any], place: str) -> None:
    (result,) = found(with_spec(**{section: settings}), "environment.secrets")
    assert result.status is CheckStatus.WARNING
    assert result.found.startswith(f"{place} looks like a secret")
    assert "slurm.pass_environment = [" in result.advice
    assert CANARY not in f"{result}"


def test_the_advice_names_the_variable_and_the_file() -> None:
    facts = replace(with_slurm(environment={"OPENAI_KEY": CANARY}), job_secrets=Path("/home/anna/secrets.env"))
    (result,) = found(facts, "environment.secrets")
    assert 'slurm.pass_environment = ["OPENAI_KEY"]' in result.advice
    assert "OPENAI_KEY=..., in /home/anna/secrets.env (mode 600)" in result.advice


def test_a_secret_in_the_settings_of_the_site_is_found_too() -> None:
    facts = replace(with_spec(), site_slurm=SlurmSpec(environment={"OPENAI_KEY": CANARY}))
    (result,) = found(facts, "environment.secrets")
    assert (result.status, "slurm.environment.OPENAI_KEY" in result.found) == (CheckStatus.WARNING, True)


def test_usual_settings_are_no_secrets() -> None:
    facts = with_slurm(
        environment={"NCCL_DEBUG": "WARN", "HF_HOME": "/data/hf", "TOKENIZERS_PARALLELISM": "false", "KEY": "$OTHER"},
        setup=("module load cuda", "export HF_TOKEN=$(cat ~/.token)"),
    )
    (result,) = found(facts, "environment.secrets")
    assert result.status is CheckStatus.PASSED


def test_a_secret_that_is_not_there_blocks_before_anything_is_submitted() -> None:
    problem = "A: named in slurm.pass_environment but not set where the job is submitted. Set it"
    (result,) = found(replace(with_slurm(pass_environment=("A",)), passed_problem=problem), "environment.passed")
    assert (result.status, result.advice) == (CheckStatus.BLOCKED, "Set it")
    (result,) = found(with_slurm(pass_environment=("A",)), "environment.passed")
    assert result.status is CheckStatus.PASSED
    assert found(with_spec(), "environment.passed") == []


@pytest.mark.parametrize(
    ("environment", "blocked"),
    [
        ({"NPROC_PER_NODE": "7"}, ["slurm.environment.NPROC_PER_NODE = 7"]),
        ({"NNODES": "1", "WORLD_SIZE": "9"}, ["slurm.environment.NNODES = 1", "slurm.environment.WORLD_SIZE = 9"]),
        ({"NODE_RANK": "0"}, ["slurm.environment.NODE_RANK = 0 for all 4 nodes"]),
        ({"NPROC_PER_NODE": "2", "NNODES": "4", "WORLD_SIZE": "8", "NCCL_DEBUG": "INFO"}, []),
    ],
)
def test_launch_variables_for_all_nodes_must_fit_the_plan(environment: dict[str, str], blocked: list[str]) -> None:
    facts = with_spec(slurm={"environment": environment}, resources={"num_nodes": 4, "ranks_per_node": 2})
    results = found(facts, "environment.launch")
    assert [one.found for one in results] == blocked
    assert all(one.status is CheckStatus.BLOCKED for one in results)
