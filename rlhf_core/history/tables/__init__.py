"""Tables and views of the history.

Conventions: ids are text; times are UTC and aware (:class:`UtcDateTime`); units are in names. ``attempt`` counts from
1, ``restart`` from 0. Every key comes from the run directory (a step, a position in a file, the number of an attempt),
never from a counter of the database, so reading the same file twice cannot create two rows. The only exception is
``metric_keys.key_id``: names of metrics are stored once.

``docs/database.md`` is generated from the docstrings of these classes and their columns. Migration scripts create the
tables. Views are declared for queries and that page in ``views``, and their SQL is in ``view_sql``.
"""

from rlhf_core.history.tables import attempts, incidents, metrics, results, runs  # noqa: F401 - registers the tables
from rlhf_core.history.tables.base import Base, CleanJson, CleanText, UtcDateTime
from rlhf_core.history.tables.views import ViewBase

SCHEMA_REVISION = "0019"
"""The newest migration, which is the schema that this program reads and writes."""

metadata = Base.metadata
"""All tables."""

VIEWS = tuple(ViewBase.metadata.tables)
"""Names of the views."""

__all__ = ["SCHEMA_REVISION", "VIEWS", "Base", "CleanJson", "CleanText", "UtcDateTime", "ViewBase", "metadata"]
