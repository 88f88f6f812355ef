"""Deployments: runs that users can request in Prefect, through a form filled in from a config, or on a schedule.

Registering again updates a deployment: its config, form and environment. Settings made in the UI in the meantime
(schedules, limits, a pause) are kept, unless they are passed again.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from flows.deployments.cron_schedule import cron_schedule
from flows.deployments.work_pool import QUEUES
from flows.flow_runs.facts import RESUME
from flows.flow_runs.links import page
from flows.form import BOUNDS, Form, prefilled, read_form, settings_text, without_setting
from flows.queries import RUN_FLOW, of_flow
from flows.run import DESCRIPTION, rlhf_run
from flows.schedules import SKIP_IF_BUSY
from flows.server.clients import commanding_client
from flows.server.settings import START_IT, server_answers
from rlhf_core.config import loading as configs
from rlhf_core.config.problems import is_name
from rlhf_core.config.site import Site
from rlhf_core.control.snapshots import keep, key_of
from rlhf_core.errors import BadInput, PrefectUnavailable
from rlhf_core.files import private as private_files
from rlhf_core.machine.accounts import user_name
from rlhf_core.presets import PRESETS
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.escaping import markdown_code
from rlhf_core.text.redaction import carries_secret

ENTRYPOINT = "flows.run.rlhf_run"
"""Entry point of the flow for a worker: an installed module, so the process's working folder does not matter."""

SCHEDULE = "rlhf-deploy"
"""Slug of the schedule set on the command line; schedules made in the UI have other slugs."""

PASSED_SITE_VARIABLES = (
    "RLHF_RUNS",
    "RLHF_SCHEDULER",
    "RLHF_COMPUTE_PYTHON",
    "RLHF_MAX_RESTARTS_PER_HOUR",
    "RLHF_JOB_SECRETS",
)
"""Site settings that are passed on to flow-run processes if they come from the environment. Settings that may hold a
password are not among them, because Prefect would display them: those come from the worker's environment or from
``rlhf.toml``."""


@dataclass(frozen=True)
class Registered:
    """A deployment registered with Prefect."""

    name: str
    """``rlhf-run/<name>``."""
    id: str
    url: str
    """Its page."""
    earlier_owner: str = ""
    """Owner of its runs until now; empty for a new deployment."""


@dataclass(frozen=True)
class _Wanted:
    """A deployment before it is registered with Prefect."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    schema: Mapping[str, Any]
    tags: Sequence[str]
    priority: str | None = None
    limit: int | None = None
    skip_if_busy: bool | None = None


def register(
    config: str,
    site: Site,
    *,
    name: str = "",
    cron: str = "",
    timezone: str = "",
    limit: int | None = None,
    priority: str | None = None,
    skip_if_busy: bool | None = None,
    tags: Sequence[str] = (),
    owner: str = "",
    overrides: Sequence[str] = (),
    folder: Path | None = None,
) -> Registered:
    """Create a deployment from a config, or update the deployment of that name.

    Args:
        config: a config file, or the name of a preset. A file is stored in its current version, with the user's code.
        name: name of the deployment. Default: the name in the config.
        cron: schedule, as in cron(8); empty leaves the schedules unchanged.
        timezone: time zone of the schedule, as ``Europe/Berlin``. Default: UTC.
        limit: number of its runs that may be driven at the same time; others wait. 0 for no limit, None for no change.
        priority: ``high``, ``default`` or ``low``; None for no change.
        skip_if_busy: skip scheduled times at which its last run is still running; None for no change.
        tags: labels to find its runs by; empty for no change.
        owner: the requesting user. Default: the user of this process.
        overrides: settings to change, each as ``section.field=value``.
        folder: base of relative paths. Default: the current folder.

    Raises:
        BadConfig: the config cannot be used.
        BadInput: the schedule, the name or the priority is invalid, or there is no work pool.
        PrefectUnavailable: no server answers.
    """
    spec = configs.load(config, overrides)
    name = name or spec.name
    _require_valid(name, limit, priority)
    schedule = cron_schedule(cron, timezone)
    with connected() as client:
        _require_pool(client, site)
        present = deployed(client, [name]).get(name)
        tags = tags or (read_form(present.parameters).tags if present is not None else ())
        wanted = _wanted(config, spec, site, name, tags=tags, owner=owner, overrides=overrides, folder=folder)
        wanted = replace(wanted, priority=priority, limit=limit, skip_if_busy=skip_if_busy)
        deployment = _put(client, site, wanted, present)
        if schedule is not None:
            _set_schedule(client, UUID(deployment.id), schedule)
    return deployment


def _require_valid(name: str, limit: int | None, priority: str | None) -> None:
    if priority is not None and priority not in QUEUES:
        raise BadInput(f"--priority: found {priority!r}, expected one of {', '.join(QUEUES)}")
    if limit is not None and limit < 0:
        raise BadInput(f"--limit: found {limit}, expected a number of runs, or 0 for no limit")
    if name == RESUME or not is_name(name):
        raise BadInput(
            f"a deployment cannot be called {name!r}: expected lower-case letters, digits, - and _, and not "
            f"{RESUME!r}, which resumes runs; give --name"
        )


def _wanted(
    config: str,
    spec: RunSpec,
    site: Site,
    name: str,
    *,
    tags: Sequence[str] = (),
    owner: str = "",
    overrides: Sequence[str] = (),
    folder: Path | None = None,
) -> _Wanted:
    """Build the deployment of a config; see :func:`register`."""
    # A preset comes with the program; a file, or a changed preset, is stored.
    is_preset = config in PRESETS and not overrides and not Path(config).is_file()
    source = config if is_preset else str(keep(config, overrides, name, site.home, folder or Path.cwd()).config)
    parameters = {
        "config": source,
        **prefilled(spec),
        "owner": owner or user_name(),
        "tags": ", ".join(tags),
        "overrides": "",
    }
    return _Wanted(
        name=name,
        description=_description(config, overrides),
        parameters=parameters,
        schema=_form(parameters, hidden=("config", "run_id", *without_setting(spec))),
        tags=["rlhf", *tags],
    )


def _description(config: str, overrides: Sequence[str]) -> str:
    """Description of one deployment, as Markdown: its flow, its config and all its settings."""
    changed = f", with {', '.join(map(markdown_code, overrides))}" if overrides else ""
    return f"{DESCRIPTION}\n\nFrom {markdown_code(config)}{changed}.\n\n## Settings\n\n{settings_text()}"


def _form(parameters: Mapping[str, Any], hidden: Sequence[str]) -> dict[str, Any]:
    """The form of one deployment as a parameter schema, with its own values and without the fields it fixes."""
    schema = rlhf_run.parameters.model_dump()
    fields = {name: dict(field) for name, field in schema["properties"].items() if name not in hidden}
    for name, field in fields.items():
        if name not in parameters:
            continue
        # A config with epochs gives no steps.
        is_given, field["default"] = parameters[name] != Form.model_fields[name].default, parameters[name]
        if name in BOUNDS and is_given:
            field.pop("minimum", None)
            field |= BOUNDS[name]
    return {**schema, "properties": fields, "required": ["run_id"] if "run_id" in fields else []}


def register_presets(site: Site) -> list[Registered]:
    """Register every preset and :data:`RESUME_DEPLOYMENT`, as ``rlhf up`` does. A config that a user has deployed under
    the name of a preset stays.

    Raises:
        BadInput: there is no work pool.
        PrefectUnavailable: no server answers.
    """
    resume = _Wanted(
        name=RESUME,
        description="Goes on with a run: adopts its job if it is alive, else starts it again from its last complete "
        "checkpoint. `rlhf runs` lists the ids.",
        parameters={},
        schema=_form({}, hidden=[field for field in Form.model_fields if field != "run_id"]),
        tags=["rlhf"],
        priority="high",  # after a restart of everything, new runs must not come before those whose jobs are running
    )
    specs = {preset: configs.load(preset) for preset in PRESETS}
    wanted = [*(_wanted(preset, spec, site, spec.name) for preset, spec in specs.items()), resume]
    with connected() as client:
        _require_pool(client, site)
        present = deployed(client, [one.name for one in wanted])
        return [
            _put(client, site, one, present.get(one.name)) for one in wanted if not _is_stored(present.get(one.name))
        ]


def _is_stored(present: DeploymentResponse | None) -> bool:
    """True for a deployment of a stored config, which is not a preset as it comes with the program."""
    return present is not None and key_of(str(present.parameters.get("config") or "")) is not None


def environment(site: Site) -> dict[str, str]:
    """Site settings for flow-run processes, without any that may hold a password."""
    passed = {name: os.environ[name] for name in PASSED_SITE_VARIABLES if os.environ.get(name)}
    database = os.environ.get("RLHF_DATABASE_URL", "")
    if database and not carries_secret(database):
        passed["RLHF_DATABASE_URL"] = database
    return {"RLHF_HOME": str(site.home), **passed}


# ---------------------------------------------------------------------------------------------------------------------
# Prefect


@contextmanager
def connected() -> Iterator[SyncPrefectClient]:
    """A client of the configured server.

    Raises:
        PrefectUnavailable: there is none, or it does not answer, or only with errors.
    """
    if not server_answers():
        raise PrefectUnavailable(f"the Prefect server at {PREFECT_API_URL.value()} does not answer. {START_IT}")
    with commanding_client() as client:
        yield client


def _require_pool(client: SyncPrefectClient, site: Site) -> None:
    try:
        client.read_work_pool(site.prefect.pool)
    except ObjectNotFound:
        raise BadInput(
            f"the Prefect server has no work pool {site.prefect.pool!r} ([prefect] pool of rlhf.toml). "
            f"`rlhf up` makes it"
        ) from None


def deployed(client: SyncPrefectClient, names: Sequence[str]) -> dict[str, DeploymentResponse]:
    """Existing deployments of the flow with one of these names, by name."""
    found = client.read_deployments(
        flow_filter=of_flow(),
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(names))),
    )
    return {one.name: one for one in found}


def _put(client: SyncPrefectClient, site: Site, wanted: _Wanted, present: DeploymentResponse | None) -> Registered:
    _make_working_folder(site)
    fields = _fields(site, wanted, present)
    if present is None:
        deployment_id = client.create_deployment(client.create_flow_from_name(RUN_FLOW), wanted.name, **fields)
    else:
        deployment_id = present.id
        update = DeploymentUpdate(**fields)
        if wanted.limit is not None or not _has(present, update):  # limits are stored elsewhere
            client.update_deployment(deployment_id, update)
    return Registered(
        f"{RUN_FLOW}/{wanted.name}",
        str(deployment_id),
        page(site, "deployments/deployment", deployment_id),
        str(present.parameters.get("owner") or "") if present is not None else "",
    )


def _make_working_folder(site: Site) -> None:
    try:
        if not site.runs_dir.exists():
            private_files.make_folder(site.runs_dir)
    except OSError as error:
        raise BadInput(
            f"cannot make the folder of the runs {site.runs_dir}: {error.strerror}. Set RLHF_RUNS to a writable folder"
        ) from None


def _fields(site: Site, wanted: _Wanted, present: DeploymentResponse | None) -> dict[str, Any]:
    """Fields of a deployment, new or updated."""
    skips, queue = wanted.skip_if_busy, wanted.priority
    if present is not None:
        skips = SKIP_IF_BUSY in present.tags if skips is None else skips
        queue = queue or present.work_queue_name  # without one, Prefect would reset it to the pool's default queue
    fields: dict[str, Any] = {
        "description": wanted.description,
        "parameters": dict(wanted.parameters),
        "parameter_openapi_schema": dict(wanted.schema),
        "enforce_parameter_schema": True,
        "entrypoint": ENTRYPOINT,
        "path": None,
        "pull_steps": [],
        # Otherwise it would start in a temporary folder, along with the jobs that it starts and that outlive it:
        # a process whose folder is gone cannot even load torch. The nodes can see this one.
        "job_variables": {"env": environment(site), "working_dir": str(site.runs_dir)},
        "tags": [*wanted.tags, *([SKIP_IF_BUSY] if skips else [])],  # its flow runs inherit them
        "work_pool_name": site.prefect.pool,
        "work_queue_name": queue or "default",
    }
    if wanted.limit is not None:
        fields["concurrency_limit"] = wanted.limit or None
        fields["concurrency_options"] = _ENQUEUE if wanted.limit else None
    return fields


_ENQUEUE = ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)


def _has(deployment: DeploymentResponse, update: DeploymentUpdate) -> bool:
    """True if a deployment already has all values of an update."""
    has = deployment.model_dump(mode="json")
    return all(has[field] == value for field, value in update.model_dump(mode="json", exclude_unset=True).items())


def _set_schedule(client: SyncPrefectClient, deployment_id: UUID, schedule: CronSchedule) -> None:
    for present in client.read_deployment_schedules(deployment_id):
        if present.slug == SCHEDULE:
            client.delete_deployment_schedule(deployment_id, present.id)
    client.create_deployment_schedules(deployment_id, [DeploymentScheduleCreate(schedule=schedule, slug=SCHEDULE)])
