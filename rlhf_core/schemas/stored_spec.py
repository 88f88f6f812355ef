"""Content of ``spec.json``."""

from rlhf_core.schemas.base import Int32, Label, Message, Moment, Schema
from rlhf_core.schemas.run import RunSpec

SCHEMA_VERSION = 2
"""Version of ``spec.json``. A worker refuses a version it does not know."""


READABLE_VERSIONS = (1, SCHEMA_VERSION)
"""Versions of ``spec.json`` that are read. The settings of version 1, of rlhf-flows 0.1, are translated."""

MAX_TAGS = 100
"""Most tags of a run."""


class StoredSpec(Schema):
    """Content of ``spec.json``: the resolved spec and where it came from. Written once."""

    schema_version: Int32 = SCHEMA_VERSION
    """Version of this file's form."""
    run_id: Label
    """Identity of the run."""
    created_at: Moment
    """Time at which it was asked for (UTC)."""
    owner: Label
    """Name of the person who asked, as was said."""
    owner_account: Label = ""
    """The operating system's user that said so, or that it came through Prefect, where anybody can say any name. Empty
    in files of rlhf-flows 0.1."""
    config_source: Message
    """The config file it came from, as given."""
    overrides: tuple[Message, ...] = ()
    """The ``--set`` overrides, as given."""
    package_version: Label
    """Version of rlhf-flows."""
    code_revision: Label = ""
    """Git revision of the folder it was started from, with ``-dirty`` if it had changes; of a preset that was started
    outside a repository, that of the program's own checkout. Empty without either."""
    trial_of: Label = ""
    """Run that this one tries out first; empty for a run of its own."""
    tags: tuple[Label, ...] = ()
    """Words to find it by."""
    flow_run_id: Label = ""
    """Prefect flow run that made it; one that is tried again finds its run by this. Empty without Prefect."""
    spec: RunSpec
    """The resolved spec."""
