"""Weight syncs into rollout engines, summarised in a sentence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_core.text.formatting import count, listed, place_text

if TYPE_CHECKING:
    from rlhf_core.history.queries.rows import UnacknowledgedSync, WeightSyncs

_NAMED = 5
"""Number of unacknowledged versions to name individually."""


def weight_sync_text(facts: "WeightSyncs | None") -> str:
    """Format the syncs of a run; empty if there are none."""
    if facts is None:
        return ""
    parts = [f"{count(facts['num_versions'], 'version')} to {count(facts['engines'], 'engine')}"]
    if facts["seconds"] is not None:
        parts.append(f"{' and '.join(facts['transports'])}, median {_seconds(facts)}")
        parts += [f"{facts['gb_per_s']:.3g} GB/s"] if facts["gb_per_s"] else []
    return ", ".join([*parts, _acknowledged(facts["unacknowledged"])])


def _seconds(facts: "WeightSyncs") -> str:
    parts = f"{facts['wire_s']:.3g} on the wire, {facts['apply_s']:.3g} to apply"
    return f"{facts['seconds']:.3g} s ({parts})" if facts["wire_s"] else f"{facts['seconds']:.3g} s"


def _acknowledged(missing: "Sequence[UnacknowledgedSync]") -> str:
    if not missing:
        return "all acknowledged"
    named = [
        f"{row['version']} ({place_text(row['attempt'], row['restart'])}: {row['acknowledged']} of {row['engines']})"
        for row in missing
    ]
    return f"NOT ACKNOWLEDGED by all engines: version {listed(named, _NAMED)}"
