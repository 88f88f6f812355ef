"""A site's own checks: entry points of installed packages (docs/preflight.md)."""

import importlib.metadata

from rlhf_core.preflight.facts import Plugin
from rlhf_core.preflight.registry import PLUGINS, one_line
from rlhf_core.survival import Survived


def load_plugins() -> tuple[Plugin, ...]:
    """Import every installed plug-in, in the order of their names."""
    found = sorted(importlib.metadata.entry_points(group=PLUGINS), key=lambda point: (point.name, point.value))
    return tuple(_load(point) for point in found)


def _load(point: importlib.metadata.EntryPoint) -> Plugin:
    with Survived(also=(SystemExit,)) as found:  # foreign code; its exceptions become findings
        function = point.load()
        if not callable(function):
            return Plugin(point.name, problem=f"{point.value} is not a function")
        return Plugin(point.name, function)
    return Plugin(point.name, problem=f"{point.value} does not import: {one_line(found.problem)}")
