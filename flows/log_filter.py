"""Keeps out of the log what the state of a flow run says already.

Where a flow returned a failed or cancelled state, Prefect's engine raises that as an exception when it asks for the
result, and logs the place in its own program where it did: 2,800 characters that tell nothing.
"""

import logging

from prefect.exceptions import CancelledRun, FailedRun

LOGGERS = ("prefect.flow_runs", "prefect.engine")
"""Loggers in which Prefect's engine says it: the log of the flow run, and that of its process."""


def is_news(record: logging.LogRecord) -> bool:
    """True if a line is more than the exception that Prefect makes of a state that was returned."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, FailedRun | CancelledRun)


def leave_out() -> None:
    """Have the loggers of this process keep what is news; harmless when it was done before."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(is_news)
