"""The Prefect flow run in which a controller runs, and the run that it creates."""

from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path

from rlhf_core.errors import RunDirError
from rlhf_core.run_dir.run import RunDir


@dataclass(frozen=True)
class DrivingFlowRun:
    """The Prefect flow run that drives a run; all fields are empty without Prefect."""

    id: str = ""
    url: str = ""
    """URL of its page in the Prefect UI."""
    created: datetime | None = None
    """Time of the request, or of the schedule; stays the same when the flow run is retried."""
    adopts: bool = False
    """True if the reconciler created it for a run whose controller died, and no user has retried it since. No user
    asked to resume the run then, so its retry budgets continue and a pending cancel request still counts."""

    def run_id(self, name: str) -> str:
        """The id of the run that this flow run creates. It never changes, so a second run cannot be created."""
        moment = self.created or datetime.min
        return f"{name}-{moment:%Y%m%d-%H%M%S}-{self._mark}"

    def run_dir(self, runs: Path) -> RunDir | None:
        """The run that this flow run has created, if any.

        The answer comes from the run directories, which are either complete or absent, and never from the history: the
        first row of a run is written long after its directory, and a flow run can be killed in between.
        """
        for path in sorted(runs.glob(f"*-{self._mark}")) if self.id else ():
            run_dir = RunDir(path)
            try:
                if run_dir.read_spec().flow_run_id == self.id:
                    return run_dir
            except RunDirError:
                continue  # damaged or written by a newer version, so not known to be ours
        return None

    @property
    def _mark(self) -> str:
        return blake2b(self.id.encode(), digest_size=3).hexdigest()


NO_FLOW_RUN = DrivingFlowRun()
"""That of a controller without Prefect."""
