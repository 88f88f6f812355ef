"""A reward function that blocks training until the test releases it."""

import os
import time
from pathlib import Path
from typing import Any

WAITS_FROM_CALL = 10
_num_calls = 0


def until_go(*, completions: list[str], **columns: Any) -> list[float]:
    """Share of distinct characters; from the tenth call on, waits for the file in ``TOY_GO``."""
    global _num_calls
    _num_calls += 1
    while _num_calls >= WAITS_FROM_CALL and not Path(os.environ["TOY_GO"]).exists():
        time.sleep(0.05)
    return [len(set(text)) / max(len(text), 1) for text in completions]
