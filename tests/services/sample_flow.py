"""A flow of a few lines, for a real worker: it says that it has begun, waits to be let go, and says how it ended."""

import os
import time
from pathlib import Path

from prefect import flow


@flow(name="waits", retries=0)
def waits(folder: str) -> None:
    """Waits for a file ``go`` in the folder."""
    place = Path(folder)
    (place / "begun").write_text(str(os.getpid()))
    try:
        while not (place / "go").exists():
            time.sleep(0.1)
        (place / "done").touch()
    finally:
        (place / "let go").touch()
