"""Write the pages of docs/ that are made from the code: ``python docs/generate.py`` (``make docs``).

Each page has a module in docs/generators. ``tests/docs`` fails when one of them is not up to date.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # also from a checkout that is not installed

from generators.command_line import cli, commands  # noqa: E402
from generators.configuration import configuration  # noqa: E402
from generators.conformance import conformance  # noqa: E402
from generators.database import database, picture  # noqa: E402
from generators.failures import failures_page  # noqa: E402
from generators.preflight import preflight  # noqa: E402
from generators.trainers import trainers  # noqa: E402

__all__ = ["PAGES", "commands", "main"]

PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "failures.md": failures_page,
    "cli.md": cli,
    "preflight.md": preflight,
    "database.md": database,
    "trainers.md": trainers,
    "images/database.svg": picture,
}
"""Files in docs/ and the functions that write them."""

MEASURED: dict[str, Callable[[], str]] = {"conformance.md": conformance}
"""Likewise, from figures that training code computes; the test that computes them too compares the page."""


def main() -> None:
    """Write every page; those with figures of training code only where its requirements are installed."""
    measured = MEASURED if importlib.util.find_spec("torch") else {}
    for name, make in {**PAGES, **measured}.items():
        (ROOT / "docs" / name).write_text(make(), encoding="utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
