"""Durations and sizes with a unit, in the unit of a setting."""

import re
from datetime import time

_SECONDS = {"_s": ("seconds", 1), "_h": ("hours", 3600), "_hours": ("hours", 3600), "_days": ("days", 86_400)}
"""Unit of a setting, and its length in seconds, by the end of the setting's name."""
_DURATIONS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_GIBIBYTES = {"m": 1 / 1024, "g": 1.0, "t": 1024.0}
_CLOCK = re.compile(r"(?:(\d{1,5})-)?(\d{1,5}):(\d\d):(\d\d)", re.ASCII)
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?(s|m|min|h|d)", re.ASCII | re.IGNORECASE)
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?([mgt])(?:i?b)?", re.ASCII | re.IGNORECASE)


def in_unit(setting: str, value: object) -> str:
    """Number to write for a duration or size with a unit, with the unit of the setting: ``in seconds, that is 86400``.

    Empty if the value has no unit, or the setting is neither a duration nor a size. Durations are those of people
    (``24h``) and Slurm's (``1-00:00:00``; TOML reads ``12:00:00`` as a time of day). A GB is a GiB, as for Slurm.
    """
    text = str(value) if isinstance(value, str | time) else ""
    if setting.endswith("_gb"):
        size = _SIZE.fullmatch(text)
        return f"in GiB, that is {_number(float(size[1]) * _GIBIBYTES[size[2].lower()])}" if size else ""
    suffix = next((one for one in _SECONDS if setting.endswith(one)), "")
    seconds = _seconds(text)
    if not suffix or setting.endswith("_gb_s") or seconds is None:
        return ""
    unit, length_s = _SECONDS[suffix]
    return f"in {unit}, that is {_number(seconds / length_s)}"


def _seconds(text: str) -> float | None:
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return days * 86_400 + hours * 3600 + minutes * 60 + seconds
    found = _DURATION.fullmatch(text)
    return float(found[1]) * _DURATIONS[found[2].lower()] if found else None


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{round(value, 4):.12g}"
