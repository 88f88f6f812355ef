"""Undriven times, lost time, recoveries and goodput of a run as ``docs/database.md`` defines them, computed from its
rows without SQL."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

Row = dict[str, Any]
Rows = dict[str, list[Row]]
Span = tuple[datetime, datetime]

STEP_SECONDS, LOSS = 1, 2
"""Ids of the names of metrics."""

ENDED = ("completed", "failed", "cancelled")


def place(row: Row) -> tuple[int, int]:
    """Attempt and restart."""
    return row["attempt"], row["restart"]


def seconds(begin: datetime, end: datetime) -> float:
    """Seconds between two times."""
    return (end - begin).total_seconds()


class ExpectedTimes:
    """Times of one run."""

    def __init__(self, rows: Rows) -> None:
        (self.run,) = rows["runs"]
        self.rows = rows
        self.events = sorted(rows["events"], key=lambda event: event["position"])
        self.timed = [row for row in rows["metrics"] if row["key_id"] == STEP_SECONDS]
        self.steps = self.timed or rows["metrics"]
        self.end: datetime = self.run["ended_at"] or self.run["progress_at"]

    @cached_property
    def undriven(self) -> list[Span]:
        """Times in which nothing drove the run."""
        spans = []
        state, num_controllers = "", 0
        for index, event in enumerate(self.events):
            if event["kind"] == "run_moved":
                state = event["state"]
                moves = [later["time"] for later in self.events[index + 1 :] if later["kind"] == "run_moved"]
                if state in ENDED and moves:
                    spans.append((event["time"], moves[0]))
            elif event["kind"] == "controller_started":
                num_controllers += 1
                if num_controllers > 1 and state not in ENDED and not self._has_job(event["time"]):
                    signs = self._signs_of_life(event["time"])
                    spans += [(max(signs), event["time"])] if signs else []
        return spans

    def _has_job(self, time: datetime) -> bool:
        """Return True if a job waits in a queue or has workers that are alive."""
        is_queued = any(
            one["submitted_at"] and one["submitted_at"] < time and (self.start(one) or time) >= time
            for one in self.rows["attempts"]
        )
        starts = [one for one in self.rows["restarts"] if one["started_at"]]
        return is_queued or any(one["started_at"] < time <= one["ended_at"] for one in starts)

    def start(self, attempt: Row) -> datetime | None:
        """Earliest sign that the job of a submitted attempt runs."""
        of_workers = [one["started_at"] for one in self.rows["restarts"] if one["attempt"] == attempt["number"]]
        signs = [time for time in (attempt["started_at"], *of_workers) if time]
        return max(min(signs), attempt["submitted_at"]) if signs else None

    def _signs_of_life(self, until: datetime) -> list[datetime]:
        """Times before a moment of events, and of steps with a time or, without such, of any metric."""
        steps = [row["time"] for row in self.timed if row["time"] < until]
        steps = steps or [row["time"] for row in self.rows["metrics"] if row["time"] < until]
        return steps + [event["time"] for event in self.events if event["time"] < until]

    def driven_s(self, begin: datetime, end: datetime) -> float:
        """Seconds between two moments without the undriven times."""
        return seconds(begin, end) - sum(
            seconds(*span) for span in self.undriven if begin <= span[0] and span[1] <= end
        )

    @cached_property
    def interruptions(self) -> list[Row]:
        """Incidents that ended all workers, each once, in the order of their detection."""
        decisions = self.rows["decisions"]
        survived = {one["decision_id"] for one in decisions if one["action"] in ("continue", "restart_workers")}
        by_controller = {place(one) for one in self.rows["incidents"] if one["found_by"] == "controller"}
        found = [
            one
            for one in self.rows["incidents"]
            if one["incident_id"] not in survived
            and (one["found_by"] == "controller" or place(one) not in by_controller)
        ]
        return sorted(found, key=lambda one: (one["seen_at"], one["incident_id"]))

    def is_valid(self, row: Row) -> bool:
        """Return True for a metric of a step that no later restart repeated."""
        return not any(
            later["first_step"] is not None and later["first_step"] <= row["step"] and place(later) > place(row)
            for later in self.rows["restarts"]
        )

    @cached_property
    def interval(self) -> float:
        """Mean number of steps of an external trainer from one step with a time to the next."""
        valid = [row for row in self.timed if self.is_valid(row)]
        num_timed = sum(row["value"] is not None for row in valid)
        is_external = self.run["spec"]["trainer"]["kind"] == "command"
        return max(row["step"] for row in valid) / num_timed if is_external and num_timed else 1.0

    def spent_s(self, rows: Iterable[Row]) -> float:
        """Seconds of steps; of a run without step times, from the first to the last metric of each restart."""
        rows = list(rows)
        if self.timed:
            return sum(row["value"] or 0.0 for row in rows if row["key_id"] == STEP_SECONDS) * self.interval
        times = [[row["time"] for row in rows if place(row) == of] for of in {place(row) for row in rows}]
        return sum(seconds(min(one), max(one)) for one in times)

    def repeated_s(self, incident: Row) -> float:
        """Seconds of the repeated steps of the restart of its first interruption."""
        if next(one for one in self.interruptions if place(one) == place(incident)) is not incident:
            return 0.0
        steps = [row for row in self.rows["metrics"] if place(row) == place(incident)]
        return self.spent_s(steps) - self.spent_s(filter(self.is_valid, steps))

    def downtime_s(self, incident: Row) -> float:
        """Seconds from the last step before an interruption to the next step, interruption or end."""
        seen_at, number = incident["seen_at"], self.interruptions.index(incident)
        done = [row["time"] for row in self.steps if place(row) <= place(incident) and row["time"] <= seen_at]
        planned = [one["planned_at"] for one in self.rows["attempts"] if one["number"] == incident["attempt"]]
        before = self.interruptions[number - 1]["seen_at"] if number else None
        since = max([*done, *filter(None, planned)], default=seen_at)
        if before and (not done or max(done) < before):
            since = seen_at
        next_step = min(self._later_steps(incident), key=lambda row: row["time"], default=None)
        until = [self.end, *(one["seen_at"] for one in self.interruptions[number + 1 :])]
        until += [event["time"] for event in self.events if event["state"] in ENDED and event["time"] >= seen_at]
        if next_step:
            length = (next_step["value"] or 0.0) * self.interval if self.timed else 0.0
            until.append(next_step["time"] - timedelta(seconds=length))
        return self.driven_s(since, min(until)) if min(until) > since else 0.0

    def _later_steps(self, incident: Row) -> list[Row]:
        return [row for row in self.steps if place(row) > place(incident)]

    def recovery(self, incident: Row) -> list[datetime | float | None]:
        """Columns of ``run_recoveries`` from ``first_step_at``."""
        later = self._later_steps(incident)
        highest = max((row["step"] for row in self.steps if place(row) <= place(incident)), default=0)
        columns: list[datetime | float | None] = []
        for rows in (later, [row for row in later if row["step"] > highest]):
            reached = min((row["time"] for row in rows), default=None)
            columns += [reached, self.driven_s(incident["seen_at"], reached) if reached else None]
        return columns

    @cached_property
    def lost_s(self) -> Mapping[str, tuple[float, float]]:
        """Downtime and repeated time of each interruption, by its id."""
        return {one["incident_id"]: (self.downtime_s(one), self.repeated_s(one)) for one in self.interruptions}

    @cached_property
    def goodput(self) -> list[float | None]:
        """Columns of ``run_goodput`` from ``wall_s``."""
        wall_s = seconds(self.run["created_at"], self.end) - sum(seconds(*span) for span in self.undriven)
        queue_s = sum(
            seconds(one["submitted_at"], self.start(one) or self.run["progress_at"])
            for one in self.rows["attempts"]
            if one["submitted_at"]
        )
        productive_s = self.spent_s(filter(self.is_valid, self.rows["metrics"]))
        repeated_s = self.spent_s(self.rows["metrics"]) - productive_s
        lost_s = sum(map(sum, self.lost_s.values()))
        return [wall_s, queue_s, productive_s, repeated_s, lost_s, productive_s / (wall_s - queue_s)]
