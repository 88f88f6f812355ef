"""Schedules as given on the command line: a line of cron(8) and a time zone, refused if they never come."""

import asyncio
import contextlib
import difflib
from datetime import datetime
from zoneinfo import available_timezones

from prefect.client.schemas.schedules import CronSchedule
from pydantic import ValidationError

from rlhf_core.errors import BadInput

_NUM_FIELDS = 5


def cron_schedule(cron: str, timezone: str) -> CronSchedule | None:
    """Schedule of ``--cron`` and ``--timezone``; None if neither is given.

    Raises:
        BadInput: it has no date, or the time zone is unknown.
    """
    if not cron:
        if timezone:
            raise BadInput("--timezone is about --cron, which is not given")
        return None
    zones = available_timezones()  # empty where no time zones are installed
    if timezone and zones and timezone not in zones:
        near = difflib.get_close_matches(timezone, sorted(zones), n=1)
        raise BadInput(
            f"--timezone {timezone!r} is unknown. Expected a name of the IANA time zone database, for instance "
            f"{near[0] if near else 'Europe/Berlin'}"
        )
    try:
        schedule = CronSchedule(cron=cron, timezone=timezone or "UTC")
        if (num_fields := len(cron.split())) > _NUM_FIELDS:  # Prefect takes the sixth for seconds
            cause = f"it has {num_fields} fields"
        elif _next_date(schedule) is not None:
            return schedule
        else:
            cause = "no date fits it"
    except ValidationError as error:
        cause = "; ".join(detail["msg"].removeprefix("Value error, ") for detail in error.errors())
    raise BadInput(
        f"--cron {cron!r}{f' in {timezone!r}' if timezone else ''} is no schedule: {cause}. Expected minute, hour, day "
        f'of the month, month, day of the week, for instance "0 2 * * *" for two o\'clock every night'
    )


def _next_date(schedule: CronSchedule) -> datetime | None:
    """Next time of a schedule; None if it has none, as on February 30: Prefect would accept it and start nothing."""
    from prefect.server.schemas.schedules import CronSchedule as ServerSchedule

    with contextlib.suppress(ValueError):
        return next(iter(asyncio.run(ServerSchedule(**schedule.model_dump()).get_dates(1))), None)
    return None
