"""Cache of report plots: each test process draws a plot only once.

A drawing is text that depends only on its arguments, and takes Matplotlib longer than the rest of the report. Most
tests write reports of the same few runs.
"""

from collections.abc import Callable
from typing import Any

import pytest

NAMES = ("line_chart", "point_chart", "stacked_chart")

_drawn: dict[str, str] = {}


def draw_once(patch: pytest.MonkeyPatch) -> None:
    """Cache each drawing, and return it when the same arguments are drawn again."""
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
