"""What Prefect shows of a run beside its states: how far it is, its curves, findings, incidents, and what it came to.

A view and nothing else: made from the run directory by a thread of its own (:mod:`flows.view.tell`), it can be late or
missing, and neither holds a controller up nor changes what a run does. ``docs/prefect.md`` has every name.
"""

from flows.view.keys import artifact_key
from flows.view.tell import shown_in_prefect

__all__ = ["artifact_key", "shown_in_prefect"]
