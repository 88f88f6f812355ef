"""A small flow for a real worker: it reports its start, waits to be released, and reports its end."""

import os
import time
from pathlib import Path

from prefect import flow


@flow(name="waits", retries=0)
def waits(folder: str) -> None:
    """Wait for a file ``go`` in the folder."""
    place = Path(folder)
    (place / "begun").write_text(str(os.getpid()))
    try:
        while not (place / "go").exists():
            time.sleep(0.1)
        (place / "done").touch()
    finally:
        (place / "let go").touch()
