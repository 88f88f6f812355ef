"""Requests of runs: a flow run of a deployment, with what was given on the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.exceptions import ObjectNotFound

from flows.deployments.registration import connected, deployed, register
from flows.flow_runs.facts import RESUME_DEPLOYMENT
from flows.flow_runs.links import page
from flows.form import SETTINGS, overrides_of, prefilled, read_form
from flows.queries import RUN_FLOW
from rlhf_core.config import loading as configs
from rlhf_core.config.site import Site
from rlhf_core.control.driving_flow_run import DrivingFlowRun
from rlhf_core.control.snapshots import keep
from rlhf_core.errors import BadConfig, BadInput
from rlhf_core.presets import PRESETS


@dataclass(frozen=True)
class Submitted:
    """A submitted flow run."""

    run_id: str
    """Id of its future run; also the name of the flow run."""
    flow_run_id: str
    url: str
    """Its page."""


def submit(
    name: str, site: Site, *, overrides: Sequence[str] = (), config: str = "", tags: Sequence[str] = (), owner: str = ""
) -> Submitted:
    """Submit a run of a deployment, and return at once.

    Args:
        name: name of the deployment, with or without ``rlhf-run/``.
        overrides: settings to change, each as ``section.field=value``.
        config: config to use instead of the deployed one; it must be a stored one.
        tags: additional labels to find it by.
        owner: the requesting user. Default: the owner of the deployment.

    Raises:
        BadConfig: the overrides cannot be used.
        BadInput: there is no such deployment, or it is the one that resumes runs.
        PrefectUnavailable: no server answers.
    """
    full = name if name.startswith(f"{RUN_FLOW}/") else f"{RUN_FLOW}/{name}"
    with connected() as client:
        try:
            deployment = client.read_deployment_by_name(full)
        except ObjectNotFound:
            known = [one.name for one in client.read_deployments()]
            raise BadInput(
                f"there is no deployment {full!r}, and no file of that name; there are {', '.join(known) or 'none'}"
            ) from None
        if full == RESUME_DEPLOYMENT:
            raise BadInput(f"{full} only resumes runs: use `rlhf resume RUN`, or its form in the UI")
        given: dict[str, Any] = {"overrides": "\n".join(overrides)} if overrides else {}
        if config:
            given |= {"config": config, **prefilled(configs.load(config))}
        if tags:
            present = read_form(deployment.parameters).tags
            given["tags"] = ", ".join(dict.fromkeys((*present, *tags)))
        if owner:
            given["owner"] = owner
        # Prefect adds the parameters of the deployment, whose config may have settings that this one lacks.
        lacking = SETTINGS.keys() - given.keys() if config else set()
        # Errors are reported here, not by a flow run that fails later.
        form = read_form(
            {name: value for name, value in {**deployment.parameters, **given}.items() if name not in lacking}
        )
        spec = configs.load(form.config, overrides_of(form, given_as="--set"))
        flow_run = client.create_flow_run_from_deployment(deployment.id, parameters=given, tags=form.tags)
        run_id = DrivingFlowRun(str(flow_run.id), created=flow_run.created).run_id(spec.name)
        parameters = {name: value for name, value in flow_run.parameters.items() if name not in lacking}
        client.update_flow_run(flow_run.id, name=run_id, parameters=parameters)
    return Submitted(run_id, str(flow_run.id), page(site, "runs/flow-run", flow_run.id))


def submit_config(
    config: str, site: Site, *, overrides: Sequence[str] = (), tags: Sequence[str] = (), owner: str = ""
) -> Submitted:
    """Submit a run of a config file in its current version, or of a deployment, registering it first if needed.

    Raises:
        As :func:`register` and :func:`submit`.
    """
    if not Path(config).is_file():
        if config in PRESETS and not _is_deployed(config):
            register(config, site)
        return submit(config, site, overrides=overrides, tags=tags, owner=owner)
    needed: Sequence[str] = ()
    try:
        name = configs.load(config).name
    except BadConfig:  # the file is complete only with the overrides, which become part of the config
        needed, overrides = overrides, ()
        name = configs.load(config, needed).name
    if not _is_deployed(name):
        register(config, site, tags=tags, owner=owner, overrides=needed)
    kept = keep(config, needed, name, site.home, Path.cwd(), further=overrides)
    return submit(name, site, overrides=overrides, config=str(kept.config), tags=tags, owner=owner)


def _is_deployed(name: str) -> bool:
    """True if there is a deployment of that name.

    Raises:
        PrefectUnavailable: no server answers.
    """
    with connected() as client:
        return name in deployed(client, [name])
