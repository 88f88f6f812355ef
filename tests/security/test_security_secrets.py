"""Secrets in the environment of a node, in exceptions and in logs: none of them reaches a file or a page."""

import argparse
import json
import stat
import time
from pathlib import Path

import pytest
from control_fakes import NODE, FakeAgent, make_run, make_spec

from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.diagnosis.classify import Evidence, WorkerEnd, classify
from rlhf_core.render.evidence import read_evidence
from rlhf_core.render.markdown import incidents_markdown
from rlhf_core.schemas.agent_messages import WorkerReport
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.resources import Placement
from rlhf_core.schemas.site import is_private
from rlhf_core.text.redaction import masked
from rlhf_core.worker import worker_process
from rlhf_core.worker.evidence.collection import save_log_tails
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.nodes.probe import Probe

CANARY = "c4nary7Zq9Lw2Xv8Tb3Rn5"

PLANTED = """
    OPENAI_KEY DATABASE_URL https_proxy PREFECT_API_DATABASE_CONNECTION_URL PREFECT_API_ENCRYPTION_KEY HF_TOKEN
    WANDB_API_KEY AWS_SECRET_ACCESS_KEY
"""
USUAL = """
    AWS_SESSION_TOKEN AWS_ACCESS_KEY_ID PREFECT_CLIENT_CUSTOM_HEADERS PREFECT_SERVER_DATABASE_PASSWORD
    PREFECT_API_AUTH_STRING PREFECT_SERVER_API_AUTH_STRING RLHF_PREFECT_AUTH RLHF_DATABASE_URL RLHF_NOTIFY_WEBHOOK_URL
    PGPASSWORD PGPASSFILE_CONTENT HTTP_PROXY HTTPS_PROXY ALL_PROXY no_proxy_password PIP_EXTRA_INDEX_URL UV_INDEX_URL
    ANTHROPIC_API_KEY GITHUB_TOKEN GITLAB_PRIVATE_TOKEN SLACK_WEBHOOK_URL SENTRY_DSN REDIS_URL MONGO_URI AZURE_SAS
    GOOGLE_APPLICATION_CREDENTIALS_JSON COMET_API_KEY NEPTUNE_API_TOKEN CLEARML_API_SECRET_KEY KUBECONFIG_DATA SLURM_JWT
    NCCL_SECRET_KEY PYTHON_KEYRING_PASSWORD SSH_PRIVATE_KEY NETRC LICENSE MY_LOGIN
"""
NAMES = (*PLANTED.split(), *USUAL.split())


def value_of(name: str) -> str:
    return f"https://anna:{CANARY}@host:3128/{name}" if name.lower().endswith(("url", "proxy", "uri")) else CANARY


def test_what_a_node_says_holds_no_secret_under_any_of_these_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, value_of(name))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    run_dir = make_run(tmp_path / "runs")
    Probe(
        run_dir, 1, Nodes(("n1",), ("127.0.0.1",), 0), make_spec(), Placement(attempt=1, num_nodes=1, phases=()), ""
    ).facts()
    path = run_dir.attempt(1).node_facts("n1")
    shown = json.loads(path.read_text())["variables"]
    assert [name for name in NAMES if CANARY in shown[name]] == []
    assert shown["NCCL_DEBUG"] == "INFO", "control"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file for file in run_dir.root.rglob("*") if file.is_file() and CANARY.encode() in file.read_bytes()] == []


@pytest.mark.parametrize(
    "name",
    [
        "PREFECT_SERVER_DATABASE_PASSWORD",
        "PREFECT_API_DATABASE_CONNECTION_URL",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL",
        "PREFECT_API_ENCRYPTION_KEY",
        "PREFECT_CLIENT_CUSTOM_HEADERS",
        "PREFECT_API_AUTH_STRING",
        "PREFECT_SERVER_API_AUTH_STRING",
        "PREFECT_API_KEY",
        "RLHF_PREFECT_AUTH",
        "RLHF_PREFECT_DATABASE_URL",
        "RLHF_NOTIFY_WEBHOOK_URL",
        "RLHF_DATABASE_URL",
        "PGPASSWORD",
    ],
)
def test_secrets_of_the_control_plane_are_never_a_jobs(name: str) -> None:
    assert is_private(name)


# ---------------------------------------------------------------------------------------------------------------------
# Errors of user code

SAID = f"login failed: postgresql://anna:{CANARY}@db/x, api_key={CANARY}, Authorization: Bearer {CANARY}, hf_{CANARY}"


def test_the_exception_of_a_reward_function_is_stored_without_its_secrets() -> None:
    try:
        raise RuntimeError(SAID)
    except RuntimeError as error:
        arguments = argparse.Namespace(role=Role.TRAINER, node="n1")
        outcome = worker_process._outcome(arguments, 0, None, error)  # type: ignore[arg-type]
    assert CANARY not in outcome.model_dump_json()
    assert "login failed: postgresql://***@db/x, api_key=***" in outcome.message
    assert "RuntimeError: login failed" in outcome.traceback


def test_the_end_of_a_log_is_kept_and_shown_without_secrets(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "runs")
    agent = FakeAgent(run_dir)
    agent.status()
    agent.incident(FailureKind.HANG)
    restart = run_dir.attempt(1).restart(0)
    log = tmp_path / "worker.log"
    log.write_text(f"step 1\n{SAID}\nstep 2\n")
    assert save_log_tails({0: log}, restart.evidence_dir, NODE) == []
    kept = (restart.evidence_dir / f"log-{NODE}-0.txt").read_text()
    assert CANARY not in kept
    assert kept.startswith("step 1\nlogin failed: postgresql://***@db/x")
    (restart.evidence_dir / f"log-{NODE}-1.txt").write_text(f"an older version's: {SAID}\n")
    (restart.evidence_dir / f"stack-{NODE}-1.txt").write_text(f"an older version's: {SAID}\n")
    page = incidents_markdown(read_timeline(run_dir))
    assert "login failed" in page
    assert CANARY not in page
    assert CANARY not in str(read_evidence(restart.evidence_dir, (1,)))


def test_the_message_of_an_incident_holds_no_secret() -> None:
    log = f"Traceback (most recent call last):\nValueError: {SAID}\n"
    worker = WorkerEnd(WorkerReport(rank=0, local_rank=0, code=1, log_tail=log), "n1")
    assert "login failed" in (message := classify(Evidence(workers=(worker,))).message)
    assert CANARY not in message
    assert CANARY not in classify(Evidence(agent_vanished=True, agent_log=log)).message


@pytest.mark.parametrize(
    "line",
    ["a-", "a.", "eyJ-", "http://", "a@", "http://a@", "token ", "-----BEGIN PRIVATE KEY-----", "x.webhook.office.com"],
)
def test_no_line_of_a_log_takes_long_to_mask(line: str) -> None:
    """The test reads the end of a log. The time used to grow with the square of its length: minutes."""
    began = time.process_time()
    masked((line * 40_000)[: 32 << 10])
    assert time.process_time() - began < 3.0
