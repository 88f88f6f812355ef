"""A new run from a config file: its spec and its directory, before any controller drives it."""

from collections.abc import Sequence
from pathlib import Path

from rlhf_core.config.site import Site
from rlhf_core.control.driving_flow_run import DrivingFlowRun
from rlhf_core.control.epochs import with_steps_of_epochs
from rlhf_core.control.site_names import for_site
from rlhf_core.control.snapshots import kept_with
from rlhf_core.launch.config_paths import load_spec
from rlhf_core.launch.prepare import git_revision, prepare, program_revision
from rlhf_core.presets import PRESETS
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler import get_scheduler
from rlhf_core.schemas.run import RunSpec


def resolve(
    source: str,
    overrides: Sequence[str] = (),
    name: str = "",
    folder: Path | None = None,
    *,
    refuse_misplaced: bool = False,
) -> RunSpec:
    """Build the spec of a config file, its overrides and a name, with absolute paths, as :func:`load_spec`.

    Raises:
        BadConfig: lists every problem found.
    """
    named = [*overrides, f'name="{name}"'] if name else list(overrides)
    return load_spec(source, named, folder or Path.cwd(), refuse_misplaced=refuse_misplaced)


def stored_spec(spec: RunSpec, site: Site, folder: Path | None = None) -> RunSpec:
    """The spec as its run stores it: with folders in place of names, and steps in place of epochs.

    Args:
        spec: with absolute paths.
        folder: source of the user's code. Default: the current folder.

    Raises:
        BadConfig: the rows of an epoch cannot be counted, or a loop would be too long.
    """
    return with_steps_of_epochs(for_site(spec, site), site, folder or Path.cwd())


def new_run(
    source: str,
    overrides: Sequence[str],
    site: Site,
    name: str = "",
    *,
    folder: Path | None = None,
    owner: str = "",
    tags: Sequence[str] = (),
    flow_run: DrivingFlowRun | None = None,
) -> RunDir:
    """Create a run from a config file, without starting anything.

    Args:
        folder: base of relative paths. Default: the current folder.
        owner: the user who requested the run. Default: the user of this process.
        tags: labels to find the run by.
        flow_run: the Prefect flow run that creates it.

    Raises:
        BadConfig: the config cannot be used, or its epochs cannot be converted to steps.
        BadInput: the site's scheduler is unknown.
        RunDirError: the run directory cannot be created.
    """
    spec = resolve(source, overrides, name, folder, refuse_misplaced=True)
    get_scheduler(site.scheduler)  # refuse a run that could never start
    kept = kept_with(source)
    code_folder = kept.code if kept is not None else folder
    revision = kept.revision if kept is not None else git_revision(code_folder or Path.cwd())
    if kept is None and not revision and source in PRESETS:
        # A preset ships with the program, and a deployment of one does not start in a user's folder.
        revision = program_revision()
    return prepare(
        stored_spec(spec, site, code_folder),
        site.runs_dir,
        config_source=str(source),
        overrides=overrides,
        folder=code_folder,
        revision=revision,
        owner=owner,
        tags=tags,
        run_id=flow_run.run_id(spec.name) if flow_run is not None and flow_run.id else "",
        flow_run_id=flow_run.id if flow_run is not None else "",
    )
