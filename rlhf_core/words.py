"""How figures are said to people: the same in the terminal, in reports and in Prefect."""


def duration(seconds: float) -> str:
    """Seconds as people say them: ``8.2 s``, ``12 s``, ``3 min 05 s``, ``2 h 14 min``."""
    whole = round(seconds)
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``10,000 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def place_text(attempt: int, restart: int) -> str:
    """Attempt and restart as people say them: ``attempt 1``, ``attempt 1 after restart 2``."""
    return f"attempt {attempt}" + (f" after restart {restart}" if restart else "")
