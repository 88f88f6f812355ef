"""Log filter for errors that the state of a flow run already describes.

If a flow returns a failed or cancelled state, Prefect's engine raises it as an exception when it reads the result and
logs the traceback: 2,800 characters of Prefect internals that explain nothing.
"""

import logging

from prefect.exceptions import CancelledRun, FailedRun

LOGGERS = ("prefect.flow_runs", "prefect.engine")
"""Loggers that carry these tracebacks: that of the flow run and that of its process."""


def is_news(record: logging.LogRecord) -> bool:
    """False for a line that only reports the exception Prefect makes of a returned state."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, FailedRun | CancelledRun)


def leave_out() -> None:
    """Install the filter on this process's loggers; safe to call more than once."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(is_news)
