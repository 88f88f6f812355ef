"""Environment shown by a node: listed names with masked credentials; of all other variables only a keyed hash."""

import json
from pathlib import Path

import pytest
from control_fakes import make_run, make_spec

from rlhf_core.diagnosis.nodes.checks import Plan, compare
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.resources import PASSED_VARIABLE, Placement
from rlhf_core.worker.nodes import facts as node_facts
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.nodes.probe import Probe
from rlhf_core.worker.nodes.shown_variables import HIDDEN, attempt_key, shown, shown_variables

KEY = b"key of the attempt"
CANARY = "c4nary7Zq9Lw2Xv8"

SECRETS = """
    OPENAI_KEY OPENAI_API_KEY GITHUB_PAT GITHUB_TOKEN HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY COMET_API_KEY
    MLFLOW_TRACKING_PASSWORD AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AZURE_CLIENT_SECRET NPM_AUTH REGISTRY_AUTH
    DOCKER_AUTH_CONFIG PGPASSWORD MYSQL_PWD DATABASE_URL SQLALCHEMY_DATABASE_URI REDIS_URL SENTRY_DSN SLACK_WEBHOOK
    SMTP_PASS VAULT_TOKEN SLURM_JWT SSH_PASSPHRASE HTTPS_PROXY http_proxy ALL_PROXY PIP_INDEX_URL VLLM_API_KEY
    RAY_AUTH_TOKEN MY_TOOLS_LOGIN BORG_REPO_PASSCOMMAND LICENSE_STRING
"""


@pytest.mark.parametrize("name", SECRETS.split())
@pytest.mark.parametrize("value", [CANARY, f"https://anna:{CANARY}@host:3128/path"], ids=["bare", "in an address"])
def test_no_secret_leaves_the_node_under_any_usual_name(name: str, value: str) -> None:
    text = shown(name, value, KEY)
    assert CANARY not in text
    assert text != shown(name, value + "x", KEY), "that two nodes differ is still seen"


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_ALGO", "Ring"), ("OMP_NUM_THREADS", "8"), ("SLURM_JOB_ID", "7"), ("HF_HOME", "/data/hf"), ("NNODES", "2")],
)
def test_variables_that_explain_separate_training_are_shown(name: str, value: str) -> None:
    assert shown(name, value, KEY) == value


def test_credentials_in_shown_values_are_masked() -> None:
    text = shown("HF_ENDPOINT", f"https://anna:{CANARY}@mirror.example/hf", KEY)
    assert text.startswith("https://***@mirror.example/hf (hidden, hash ")
    assert text != shown("HF_ENDPOINT", f"https://anna:{CANARY}x@mirror.example/hf", KEY)


def test_a_passed_secret_is_hidden_whatever_its_name() -> None:
    given = {"VLLM_LICENCE": CANARY, "NCCL_DEBUG": "WARN", PASSED_VARIABLE: "OTHER,VLLM_LICENCE"}
    assert CANARY not in str(shown_variables(given, KEY))
    assert shown_variables({**given, PASSED_VARIABLE: ""}, KEY)["VLLM_LICENCE"] == CANARY, "the control"


def test_a_hash_means_nothing_without_the_key_of_the_attempt(tmp_path: Path) -> None:
    first, second = attempt_key(tmp_path / "1" / "key"), attempt_key(tmp_path / "2" / "key")
    assert first == attempt_key(tmp_path / "1" / "key"), "the same on all nodes"
    assert shown("OPENAI_KEY", CANARY, first) != shown("OPENAI_KEY", CANARY, second)
    assert (tmp_path / "1" / "key").stat().st_mode & 0o777 == 0o600


def test_without_a_run_directory_nothing_is_compared_and_nothing_shown(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    key = attempt_key(tmp_path / "file" / "key")
    assert shown("OPENAI_KEY", CANARY, key) == shown("OPENAI_KEY", "other", key) == HIDDEN


def test_nodes_that_differ_in_a_hidden_variable_are_still_distinguished(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "runs")
    facts = {}
    for index, value in enumerate((CANARY, f"{CANARY}-of-another-team", CANARY)):
        nodes = Nodes(("n1", "n2", "n3"), ("127.0.0.1",) * 3, index)
        facts[index] = node_facts.gather(run_dir, 1, nodes, make_spec(), 0, {"DATABASE_URL": value})
    found = compare(facts, {}, Plan(("n1", "n2", "n3"), 2))
    (result,) = [one for one in found if one.id == "node.variables" and one.status is not CheckStatus.PASSED]
    assert result.node == "n2"
    assert "DATABASE_URL" in result.found
    assert CANARY not in f"{result}"
    assert CANARY not in json.dumps([one.model_dump(mode="json") for one in facts.values()])


def test_the_report_of_a_node_is_readable_only_by_the_owner_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_KEY", CANARY)
    monkeypatch.setenv("HTTPS_PROXY", f"http://anna:{CANARY}@proxy:3128")
    monkeypatch.setenv("NCCL_NOTE", "in the open")
    run_dir = make_run(tmp_path / "runs")
    placement = Placement(attempt=1, num_nodes=1, phases=())
    Probe(run_dir, 1, Nodes(("n1",), ("127.0.0.1",), 0), make_spec(), placement, "").facts()
    path = run_dir.attempt(1).node_facts("n1")
    assert path.stat().st_mode & 0o777 == 0o600
    assert run_dir.spec.stat().st_mode & 0o044, "the control: others may read what is written as usual"
    assert "in the open" in path.read_text(), "the control"
    assert [file for file in run_dir.root.rglob("*") if file.is_file() and CANARY in file.read_text()] == []
