"""The table of a campaign, with 95 % bounds."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from fault_measure import Row

LEVEL = 0.95
WHERE = {"slurm": "Slurm with four nodes", "local": "the local scheduler as one node"}


def at_most(failures: int, trials: int) -> float:
    """Upper end of the one-sided 95 % interval of Clopper and Pearson for a share: 0 of 20 means at most 14 %."""
    if failures >= trials:
        return 1.0
    low, high = failures / trials if trials else 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most_so_many(failures, trials, middle) > 1 - LEVEL:
            low = middle
        else:
            high = middle
    return high


def _at_most_so_many(count: int, trials: int, share: float) -> float:
    return sum(math.comb(trials, i) * share**i * (1 - share) ** (trials - i) for i in range(count + 1))


def markdown(rows: Sequence[Row]) -> str:
    """One line per kind of fault, one for all controls of a kind, and a summary."""
    header = (
        "| fault | found | seconds to find (worst) | in time | blame right | class right | recovery | right | "
        "training again after (worst) | in time | steps lost (most) | final parameters equal |"
    )
    lines = [header, "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for name in dict.fromkeys(row.row for row in rows):
        of_kind = [row for row in rows if row.row == name]
        lines.append("| " + " | ".join(_cells(name, of_kind)) + " |")
    where = ", ".join(sorted({WHERE[row.scheduler] for row in rows}))
    summary = f"{len(rows)} cases in {len({row.scenario for row in rows})} runs, on {where}."
    return "\n".join([summary, "", *lines, "", *_bounds(rows)])


def _cells(name: str, rows: Sequence[Row]) -> list[str]:
    actions = sorted({row.action.replace("_", " ") for row in rows if row.action})
    return [
        name,
        f"{sum(row.found for row in rows)} of {len(rows)}" + (" (false alarms)" if rows[0].control else ""),
        _spread([row.found_s for row in rows]),
        _share(rows, lambda row: row.in_time),
        _share(rows, lambda row: row.blame_right),
        _share(rows, lambda row: row.class_right),
        ", ".join(actions) or "-",
        _share(rows, lambda row: row.action_right),
        _spread([row.again_s for row in rows]),
        _share(rows, lambda row: row.again_in_time),
        _most([row.steps_lost for row in rows]),
        _share(rows, lambda row: row.same_numbers),
    ]


def _share(rows: Sequence[Row], answer: Callable[[Row], bool | None]) -> str:
    answers = [found for found in map(answer, rows) if found is not None]
    return f"{sum(answers)} of {len(answers)}" if answers else "-"


def _spread(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} ({max(known):.1f})" if known else "-"


def _most(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return str(max(known)) if known else "-"


def _bounds(rows: Sequence[Row]) -> list[str]:
    faults = [row for row in rows if not row.control]
    controls = [row for row in rows if row.control]
    stops = [row for row in faults if row.action_right is not None]
    counts = (
        ("missed faults", [not row.found for row in faults]),
        ("false alarms in healthy controls", [row.found for row in controls]),
        ("wrong class", [not row.class_right for row in faults]),
        ("wrong blame", [not row.blame_right for row in faults if row.blame_right is not None]),
        ("false stops", [row.action == "stop" and not row.action_right for row in stops]),
        ("found too late", [not row.in_time for row in rows if row.in_time is not None]),
        ("training again too late", [not row.again_in_time for row in rows if row.again_in_time is not None]),
        ("double submissions (runs)", [bool(row.submitted_twice) for row in rows if row.number == 0]),
        ("final parameters differ", [not row.same_numbers for row in rows if row.same_numbers is not None]),
    )
    return [
        "| over all | count | share is at most (95 %) |",
        "|---|---|---|",
        *(
            f"| {name} | {sum(found)} of {len(found)} | {at_most(sum(found), len(found)):.1%} |"
            for name, found in counts
            if found
        ),
    ]


def write_between(page: str, name: str, text: str) -> str:
    """The page with its text between the two markers with this name replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"found no {begin} ... {end} in the page")
    return f"{before}{begin}\n{text}\n{end}{after}"
