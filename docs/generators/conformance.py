"""``docs/conformance.md``: the losses next to those of TRL. Needs the training extra: the figures are computed."""

import sys
from pathlib import Path

COMPARISON = Path(__file__).parents[2] / "tests" / "training" / "conformance"


def conformance() -> str:
    """Text of the page."""
    sys.path.insert(0, str(COMPARISON))
    from conformance_page import page

    return page()
