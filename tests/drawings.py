"""Plots of reports, each drawn once by a test process.

A drawing is text that only its arguments decide, and takes Matplotlib longer than all else of a report. Most tests
write the report of the same few runs.
"""

from collections.abc import Callable
from typing import Any

import pytest

NAMES = ("line_chart", "point_chart", "stacked_chart")

_drawn: dict[str, str] = {}


def draw_once(patch: pytest.MonkeyPatch) -> None:
    """Keep what was drawn, and return it when the same is to be drawn again."""
    from rlhf_core.render import plots

    for name in NAMES:
        patch.setattr(plots, name, _kept(getattr(plots, name)))


def _kept(draw: Callable[..., str]) -> Callable[..., str]:
    def drawn(*arguments: Any, **named: Any) -> str:
        key = repr((draw.__name__, arguments, sorted(named.items())))
        if key not in _drawn:
            _drawn[key] = draw(*arguments, **named)
        return _drawn[key]

    return drawn
