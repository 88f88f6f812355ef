"""Content of ``spec.json``."""

from rlhf_core.schemas.base import Int32, Label, Message, Moment, Schema
from rlhf_core.schemas.run import RunSpec

SCHEMA_VERSION = 2
"""Version of ``spec.json``. Workers reject unknown versions."""


READABLE_VERSIONS = (1, SCHEMA_VERSION)
"""Readable versions of ``spec.json``. The settings of version 1, of rlhf-flows 0.1, are translated."""

MAX_TAGS = 100
"""Maximum number of tags of a run."""


class StoredSpec(Schema):
    """Content of ``spec.json``: the resolved spec and its origin. Written once."""

    schema_version: Int32 = SCHEMA_VERSION
    """Version of this file's format."""
    run_id: Label
    """Id of the run."""
    created_at: Moment
    """Time at which the run was made (UTC): for a request in Prefect, once a worker has started it."""
    owner: Label
    """User who requested it, as given."""
    owner_account: Label = ""
    """Operating system's user of the request, or a note that it came through Prefect, where any name can be given.
    Empty in files of rlhf-flows 0.1."""
    config_source: Message
    """Config file, as given."""
    overrides: tuple[Message, ...] = ()
    """``--set`` overrides, as given."""
    package_version: Label
    """Version of rlhf-flows."""
    code_revision: Label = ""
    """Git revision of the folder in which it was started, with ``-dirty`` if it had changes; for a preset started
    outside a repository, that of the program's checkout. Empty without either."""
    code_folder: Message = ""
    """Folder in which modules of the user's code were found. Empty in files written before this was recorded."""
    trial_of: Label = ""
    """Run that this one is a trial of; empty for any other run."""
    tags: tuple[Label, ...] = ()
    """Tags for searches."""
    flow_run_id: Label = ""
    """Prefect flow run that created it, by which a retried flow run finds its run. Empty without Prefect."""
    spec: RunSpec
    """The resolved spec."""
