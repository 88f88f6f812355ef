"""Resubmission by a process that lacks a secret of the job: the secret is reported, and the run can be resumed."""

import pytest
from control_fakes import FakeAgent, make_spec
from harness import ControllerHarness

from rlhf_core.control.steps import drive
from rlhf_core.errors import RunFailed
from rlhf_core.launch.journal import read_record
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.failures import FailureKind

CANARY = "c4nary-that-is-handed-over"


def test_an_attempt_without_its_secret_is_not_submitted_and_can_be_resumed(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    run_dir = harness.run(make_spec(slurm={"pass_environment": ["WANDB_API_KEY"]}))

    def fail(agent: FakeAgent) -> None:
        agent.start()
        agent.checkpoint(6)
        agent.fail(FailureKind.NODE_LOST, fingerprint="abc")
        monkeypatch.delenv("WANDB_API_KEY")  # the process that drives the run from now on lacks the secret

    harness.runs_well(run_dir, 1, fail)
    with pytest.raises(RunFailed, match="WANDB_API_KEY: named in") as error:
        drive(harness.controller(run_dir))
    assert str(harness.site.job_secrets) in str(error.value)
    assert [one.placement.attempt for one in harness.scheduler.submitted] == [1]

    assert harness.site.job_secrets is not None
    harness.site.job_secrets.touch(mode=0o600)
    harness.site.job_secrets.write_text(f"WANDB_API_KEY={CANARY}\n")
    drive(harness.controller(run_dir, resumed=True))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert harness.scheduler.submitted[-1].placement.resume_checkpoint == "step-000006"
    kept = [path for path in harness.site.home.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert kept == [harness.site.job_secrets]
