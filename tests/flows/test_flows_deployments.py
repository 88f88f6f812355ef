"""Deployments on a real Prefect server, and a real worker whose flow runs are cancelled, killed and retried."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sites
from process_tools import ASKING_INTERVAL_S, Rlhf, kill_tree, until
from site_files import GRADER, SMALL

from flows.deployments import work_pool
from flows.deployments.registration import SCHEDULE, environment, register, register_presets
from flows.deployments.submission import submit, submit_config
from flows.deployments.work_pool import QUEUES
from flows.flow_runs.facts import RESUME_DEPLOYMENT, PrefectFlowRuns
from flows.form import overrides_of, read_form
from flows.schedules import SKIP_IF_BUSY
from rlhf_core.cli.main import execute
from rlhf_core.config import loading as config
from rlhf_core.config.site import Site, load_site
from rlhf_core.diagnosis.reconcile.facts import FlowState
from rlhf_core.errors import BadConfig, BadInput, PrefectUnavailable
from rlhf_core.history.queries import show_run
from rlhf_core.history.queries.open_runs import runs_of_flow_runs
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import read_record
from rlhf_core.launch.lease import Owner
from rlhf_core.machine.accounts import user_name
from rlhf_core.presets import PRESETS, preset_path
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState

ROOT = Path(__file__).parents[2]
LONG = [
    *SMALL,
    "loops.main.num_steps=3000",
    "loops.warm_start.num_steps=1",
    "evaluate.num_prompts=16",
    "checkpoint.every_num_steps=5",
    'reward.functions=["grader:patient"]',
]
"""A run that is there until it is ended, and sleeps meanwhile."""


@pytest.fixture
def site() -> Site:
    home = load_site().home
    home.mkdir(parents=True)
    (home / "rlhf.toml").write_text('[prefect]\nurl = "https://prefect.example.org/ui/"\n')
    return load_site()


@pytest.fixture
def client(server: sites.Site, pool: None) -> Iterator[Any]:
    from flows.server.clients import api_client

    with api_client() as found:
        yield found


# ---------------------------------------------------------------------------------------------------------------------
# Registration


def test_the_form_of_a_deployment_has_the_values_of_its_config(client: Any, site: Site) -> None:
    done = register("quickstart", site, overrides=["loops.main.num_steps=7"], name="seven", tags=["a"], owner="ann")
    deployment = client.read_deployment(UUID(done.id))
    assert done.name == "rlhf-run/seven"
    assert done.url.endswith(f"/deployments/deployment/{done.id}")
    assert deployment.parameters["steps"] == 7
    assert (deployment.parameters["owner"], deployment.parameters["tags"]) == ("ann", "a")
    properties = deployment.parameter_openapi_schema["properties"]
    assert "config" not in properties
    assert "run_id" not in properties
    for name, field in properties.items():
        assert field["default"] == deployment.parameters[name]
    assert config.load(deployment.parameters["config"]).loops.main.num_steps == 7
    assert deployment.enforce_parameter_schema
    assert (deployment.pull_steps or []) == []


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"learning_rate": 0}, {"steps": -3}, {"name": "Has Spaces"}])
def test_the_server_refuses_the_same_values_as_the_form(client: Any, site: Site, wrong: dict[str, Any]) -> None:
    from prefect.exceptions import PrefectHTTPStatusError

    done = register("quickstart", site, name="strict")
    with pytest.raises(PrefectHTTPStatusError, match=f"Validation failed for field '{next(iter(wrong))}'"):
        client.create_flow_run_from_deployment(UUID(done.id), parameters=wrong)


def test_presets_and_resume_are_registered_and_only_changes_are_updated(client: Any, site: Site) -> None:
    from prefect.client.schemas.actions import DeploymentUpdate

    names = [one.name for one in register_presets(site)]
    assert names == [*(f"rlhf-run/{config.load(preset).name}" for preset in PRESETS), RESUME_DEPLOYMENT]
    resume = client.read_deployment_by_name(RESUME_DEPLOYMENT)
    assert set(resume.parameter_openapi_schema["properties"]) == {"run_id"}
    assert resume.parameter_openapi_schema["required"] == ["run_id"]

    def updates() -> dict[str, Any]:
        return {one.name: one.updated for one in client.read_deployments()}

    before = updates()
    client.update_deployment(resume.id, DeploymentUpdate(description="changed"))
    changed = updates()
    assert {name for name in before if before[name] != changed[name]} == {"resume"}
    again = register_presets(site)
    after = updates()
    assert {name for name in before if changed[name] != after[name]} == {"resume"}
    assert client.read_deployment_by_name(RESUME_DEPLOYMENT).description == resume.description
    assert register_presets(site) == again
    assert updates() == after


def test_a_takeover_comes_before_earlier_requests(client: Any, site: Site, server: sites.Site) -> None:
    """The places of the pool may be too few for both, and the job of the run that is taken over may be running."""
    work_pool.set_up(site)
    made = [submit("quickstart", site).flow_run_id, PrefectFlowRuns(site).adopt("small-1", "key of the takeover")]
    try:
        due = {"limit": 1, "scheduled_before": datetime.now(UTC).isoformat()}
        (first,) = server.ask("/work_pools/rlhf/get_scheduled_flow_runs", due)[1]
        assert first["flow_run"]["id"] == made[1]
    finally:
        for flow_run_id in made:
            client.delete_flow_run(UUID(flow_run_id))


def test_a_withdrawn_takeover_has_not_begun(client: Any, site: Site) -> None:
    """As opposed to a cancelled flow run, which ends its run."""
    from prefect.states import Cancelling

    register_presets(site)
    flow_runs = PrefectFlowRuns(site)
    made = flow_runs.adopt("small-2", "key of a takeover to withdraw")
    client.set_flow_run_state(UUID(made), Cancelling())
    seen = flow_runs.poll({"small-2"}, (), lambda ids: {}, datetime.now(UTC)).flow_runs
    assert [(one.state, one.begun) for one in seen if one.flow_run_id == made] == [(FlowState.CANCELLED, False)]


def test_changes_made_in_the_ui_are_kept(client: Any, site: Site) -> None:
    from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
    from prefect.client.schemas.schedules import CronSchedule

    done = register(
        "quickstart", site, name="mine", cron="0 2 * * *", timezone="Europe/Berlin", limit=2, priority="low"
    )
    deployment_id = UUID(done.id)
    client.create_deployment_schedules(
        deployment_id, [DeploymentScheduleCreate(schedule=CronSchedule(cron="0 9 * * *"), slug="by-hand")]
    )
    client.update_deployment(deployment_id, DeploymentUpdate(concurrency_limit=5, tags=["rlhf"]))
    register("quickstart", site, name="mine")
    found = client.read_deployment(deployment_id)
    assert found.global_concurrency_limit.limit == 5
    assert found.concurrency_options.collision_strategy == "ENQUEUE"
    assert found.work_queue_name == "low"
    assert {one.slug for one in client.read_deployment_schedules(deployment_id)} == {SCHEDULE, "by-hand"}
    register("quickstart", site, name="mine", cron="30 4 * * *", priority="high")
    crons = {one.slug: one.schedule.cron for one in client.read_deployment_schedules(deployment_id)}
    assert crons == {SCHEDULE: "30 4 * * *", "by-hand": "0 9 * * *"}
    assert client.read_deployment(deployment_id).work_queue_name == "high"
    for submitted, skips in ((True, True), (None, True), (False, False), (None, False)):
        register("quickstart", site, name="mine", skip_if_busy=submitted, tags=["mine"])
        assert client.read_deployment(deployment_id).tags == ["rlhf", "mine", *([SKIP_IF_BUSY] if skips else [])]


def test_a_deployment_keeps_its_tags_and_tells_a_new_owner_about_the_earlier_one(
    client: Any, site: Site, rlhf: Rlhf
) -> None:
    """Before, the tags were dropped, and nothing was said."""
    arguments = ["deploy", "quickstart", "--name", "ours"]
    answer = rlhf(*arguments, "--tag", "nightly", "--owner", "ann")
    assert "was a deployment of" not in answer.stderr, "negative control: it is new"
    told = rlhf(*arguments, "--owner", "ben").stderr
    assert "rlhf-run/ours was a deployment of ann: it now has this config, and its runs belong to ben" in told
    found = client.read_deployment_by_name("rlhf-run/ours")
    assert (found.parameters["tags"], found.tags) == ("nightly", ["rlhf", "nightly"])
    assert found.parameter_openapi_schema["properties"]["tags"]["default"] == "nightly"
    assert "was a deployment of" not in rlhf(*arguments, "--tag", "weekly", "--owner", "ben").stderr
    assert client.read_deployment_by_name("rlhf-run/ours").tags == ["rlhf", "weekly"]


def test_the_next_start_of_a_worker_keeps_a_config_deployed_under_the_name_of_a_preset(client: Any, site: Site) -> None:
    """Before, the preset replaced it, and its scheduled runs had other settings from then on."""

    def steps() -> int:
        return int(client.read_deployment_by_name("rlhf-run/quickstart").parameters["steps"])

    register_presets(site)
    preset = steps()
    register("quickstart", site, overrides=["loops.main.num_steps=7"])
    register_presets(site)
    assert steps() == 7 != preset
    register("quickstart", site)
    assert steps() == preset, "this brings the preset back"


def test_a_run_belongs_to_the_user_who_submits_it(client: Any, site: Site) -> None:
    """Before, it belonged to the user of the deployment: for a preset, to the user of the services."""
    register("quickstart", site, name="shared", owner="ann")
    assert execute(["submit", "shared"]) == 0
    (flow_run,) = (one for one in client.read_flow_runs() if str(one.deployment_id) == deployment_id(client, "shared"))
    assert flow_run.parameters["owner"] == user_name()


def deployment_id(client: Any, name: str) -> str:
    return str(client.read_deployment_by_name(f"rlhf-run/{name}").id)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cron": "every night"}, "no schedule"),
        ({"cron": "0 0 2 * * *"}, "is no schedule: it has 6 fields. Expected minute, hour"),
        ({"cron": "0 2 30 2 *"}, "is no schedule: no date fits it"),
        ({"cron": "0 2 * * *", "timezone": "Mars/Base"}, "--timezone 'Mars/Base' is unknown"),
        ({"cron": "0 2 * * *", "timezone": "Europe/Berln"}, "for instance Europe/Berlin"),
        ({"timezone": "UTC"}, "which is not given"),
        ({"priority": "urgent"}, f"one of {', '.join(QUEUES)}"),
        ({"limit": -1}, "a number of runs, or 0 for no limit"),
        ({"name": "resume"}, "resumes runs"),
        ({"name": "No Name"}, "give --name"),
    ],
)
def test_what_cannot_be_deployed_is_reported_without_a_server(
    site: Site, given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.deployments.registration.server_answers", lambda: False)
    with pytest.raises(BadInput, match=message):
        register("quickstart", site, **given)


def test_no_password_is_stored(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_SCHEDULER", "slurm")
    for url, told in (
        ("postgresql://u:secret@h/d", False),
        ("postgresql://u@h/d?password=x", False),
        ("sqlite:///a", True),
    ):
        monkeypatch.setenv("RLHF_DATABASE_URL", url)
        monkeypatch.setenv("RLHF_NOTIFY_WEBHOOK_URL", "https://hooks/secret")
        found = environment(site)
        assert ("RLHF_DATABASE_URL" in found) == told
        assert "secret" not in json.dumps(found)
        assert (found["RLHF_HOME"], found["RLHF_SCHEDULER"]) == (str(site.home), "slurm")


def test_without_a_server_the_command_is_named(site: Site) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), pytest.raises(PrefectUnavailable, match="up"):
        register("quickstart", site)


def test_a_submission_uses_the_current_file_and_leaves_schedules_alone(
    client: Any, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    text = preset_path("quickstart").read_text().replace('name = "quickstart"', 'name = "edited"')
    file.write_text(text)
    monkeypatch.chdir(tmp_path)
    done = register("mine.toml", site)
    file.write_text(text.replace("num_steps = 100", "num_steps = 50"))
    submitted = submit_config("mine.toml", site, overrides=["rollout.temperature=0.5"], tags=["b"])
    flow_run = client.read_flow_run(UUID(submitted.flow_run_id))
    assert flow_run.name == submitted.run_id
    assert flow_run.parameters["steps"] == 50
    assert config.load(flow_run.parameters["config"]).loops.main.num_steps == 50
    assert client.read_deployment(UUID(done.id)).parameters["steps"] == 100
    (tmp_path / "train.py").touch()
    file.write_text(preset_path("torchrun").read_text().replace('name = "torchrun"', 'name = "edited"'))
    submitted = submit_config("mine.toml", site)
    parameters = client.read_flow_run(UUID(submitted.flow_run_id)).parameters
    assert overrides_of(read_form(parameters)) == [], "the learning rate of the deployment is no setting of this one"
    with pytest.raises(BadConfig, match=r"loops\.main: found neither num_steps nor epochs"):
        submit("edited", site, overrides=["loops.main.num_steps=0"])
    with pytest.raises(BadInput, match="there is no deployment"):
        submit("unheard-of", site)


def test_a_file_that_only_its_overrides_complete_is_submitted(
    client: Any, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = preset_path("quickstart").read_text()
    (tmp_path / "open.toml").write_text(
        text.replace('name = "quickstart"', 'name = "open"').replace("num_steps = 100", "")
    )
    monkeypatch.chdir(tmp_path)
    for steps in (5, 6):  # the second time, it is deployed
        submitted = submit_config("open.toml", site, overrides=[f"loops.main.num_steps={steps}"])
        form = read_form(client.read_flow_run(UUID(submitted.flow_run_id)).parameters)
        assert config.load(form.config, overrides_of(form)).loops.main.num_steps == steps


def test_the_commands_print_names_and_pages(
    site: Site, server: sites.Site, pool: None, monkeypatch: pytest.MonkeyPatch, rlhf: Rlhf
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server.api)
    answer = rlhf("deploy", "quickstart", "--name", "typed", "--cron", "0 2 * * *", "--json")
    assert answer.json()["deployment"] == "rlhf-run/typed"
    submitted = rlhf("submit", "typed", "--set", "seed=3", "--json").json()
    assert submitted["run_id"].startswith("quickstart-")
    assert submitted["flow_run_id"] in submitted["url"]
    assert "no schedule" in rlhf("deploy", "quickstart", "--cron", "nightly", code=2).stderr


def test_schedules_declared_in_code_are_deployed(client: Any, server: sites.Site, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "flows.prefect_imports",
            "prefect",
            "--no-prompt",
            "deploy",
            "--all",
            "--prefect-file",
            ROOT / "infra/prefect.yaml",
        ],
        cwd=tmp_path,
        env={**os.environ, "PREFECT_API_URL": server.api, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    nightly = client.read_deployment_by_name("rlhf-run/quickstart-nightly")
    (schedule,) = client.read_deployment_schedules(nightly.id)
    assert (schedule.schedule.cron, schedule.schedule.timezone) == ("0 2 * * *", "Europe/Berlin")
    assert nightly.global_concurrency_limit.limit == 1
    assert client.read_deployment_by_name("rlhf-run/slurm-weekly").work_queue_name == "low"


# ---------------------------------------------------------------------------------------------------------------------
# Under a worker


@pytest.fixture(scope="module")
def worker(real_prefect: sites.Site, pool: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A worker of the pool, started from another folder; gives its log. It imports Prefect as the site's worker does.

    No flow run is waiting for it: it would train the submissions of earlier tests, at the full length of a preset.
    """
    from prefect.workers.process import ProcessWorker

    real_prefect.delete_deployments()
    template = ProcessWorker.get_default_base_job_template()
    command = shlex.join([sys.executable, "-m", "flows.prefect_imports", "prefect.engine"])
    template["variables"]["properties"]["command"]["default"] = command
    real_prefect.ask("/work_pools/rlhf", {"base_job_template": template}, method="PATCH")
    folder = tmp_path_factory.mktemp("worker")
    log = folder / "worker.log"
    settings = {
        "PREFECT_API_URL": real_prefect.api,
        "PREFECT_API_AUTH_STRING": real_prefect.password,
        "PREFECT_HOME": str(folder),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",  # a command tested earlier may have silenced it
    }
    words = ["prefect", "worker", "start", "--pool", "rlhf", "--type", "process"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_imports", *words],
            cwd="/",
            env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield log
        finally:
            kill_tree(process.pid)  # on SIGTERM it would continue for half a minute
            process.wait()


def training(site: Site, run_id: str) -> RunDir:
    run_dir = RunDir.of(site.runs_dir, run_id)
    until(lambda: run_dir.spec.is_file() and read_record(run_dir).state is RunState.TRAINING)
    return run_dir


def state_of(client: Any, flow_run_id: str, *names: str) -> Any:
    """The state of a flow run, once it is one of the given ones."""

    def now() -> Any:
        state = client.read_flow_run(UUID(flow_run_id)).state
        return state if state.name in names else None

    return until(now, interval_s=ASKING_INTERVAL_S)


def jobs_at_work(site: Site, run_dir: RunDir) -> list[str]:
    from rlhf_core.scheduler import JobState, get_scheduler

    submissions = [one.submission for one in read_record(run_dir).attempts.values() if one.submission is not None]
    states = get_scheduler(site.scheduler).status(submissions)
    return [job for job, status in states.items() if status.state is not JobState.ENDED]


@pytest.mark.end_to_end
@pytest.mark.training
def test_a_cancellation_in_prefect_ends_the_job_and_a_killed_process_does_not(
    client: Any, site: Site, worker: Path
) -> None:
    """One run: its process is killed, it is retried and adopts its job, then it is cancelled."""
    from prefect.states import AwaitingRetry, Cancelling

    (site.home / "grader.py").write_text(GRADER.format(service=""))
    register("quickstart", site)
    submitted = submit("quickstart", site, overrides=LONG)
    run_dir = training(site, submitted.run_id)
    with HistoryStore(site.database_url) as store:
        assert runs_of_flow_runs(store, [submitted.flow_run_id])[submitted.flow_run_id][0] == run_dir.run_id
        (first,) = show_run(store, run_dir.run_id).controllers
        assert (
            first["flow_run_url"]
            == submitted.url
            == f"https://prefect.example.org/ui/runs/flow-run/{submitted.flow_run_id}"
        )
    controller = Owner.parse(first["controller"])
    assert controller is not None
    os.kill(controller.pid, signal.SIGKILL)
    state_of(client, submitted.flow_run_id, "Crashed")
    until(lambda: f"the controller of run {run_dir.run_id} died" in worker.read_text())
    (job,) = jobs_at_work(site, run_dir)

    client.set_flow_run_state(UUID(submitted.flow_run_id), AwaitingRetry(), force=True)
    until(lambda: len(read_controllers(site, run_dir)) == 2, interval_s=ASKING_INTERVAL_S)
    assert jobs_at_work(site, run_dir) == [job], "adopted: not a second one"
    assert [path.name for path in site.runs_dir.iterdir()] == [run_dir.run_id], "not a second run"
    state_of(client, submitted.flow_run_id, "Running")

    client.set_flow_run_state(UUID(submitted.flow_run_id), Cancelling())
    state_of(client, submitted.flow_run_id, "Cancelled")
    assert jobs_at_work(site, run_dir) == []
    record = read_record(run_dir)
    assert (record.state, record.cause) == (RunState.CANCELLED, "cancelled in Prefect (through Prefect, unverified)")
    assert len(record.attempts) == 1


def read_controllers(site: Site, run_dir: RunDir) -> list[dict[str, Any]]:
    with HistoryStore(site.database_url) as store:
        return [one for one in show_run(store, run_dir.run_id).controllers if one["flow_run_id"]]


def test_errors_are_in_the_message_of_the_flow_run(client: Any, site: Site, worker: Path) -> None:
    """Errors that the form cannot detect: nothing is created and nothing is submitted."""
    done = register("quickstart", site)
    overrides = {"overrides": "loops.main.num_stepps=5"}
    flow_run = client.create_flow_run_from_deployment(UUID(done.id), parameters=overrides)
    failed = state_of(client, str(flow_run.id), "Failed")
    assert "loops.main.num_stepps" in failed.message
    assert 'did you mean "num_steps"' in failed.message or "loops.main.num_steps" in failed.message
    assert not site.runs_dir.exists() or not list(site.runs_dir.iterdir())
