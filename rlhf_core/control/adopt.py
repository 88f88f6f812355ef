"""``python -m rlhf_core.control.adopt RUN``: take over a run whose controller died, without Prefect.

The site daemon starts this as a separate process when Prefect cannot start a flow run. The controller is the same as
any other: the lease lets only one drive the run, and a second one exits at once. Since no user asked to resume the run,
its retry budgets, back-offs and pending cancel requests stay in force.
"""

import os
import subprocess
import sys

from rlhf_core.config.site import Site, load_site
from rlhf_core.control.controller import Observer, opened
from rlhf_core.errors import RlhfError
from rlhf_core.files import private as private_files
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.lease import IfHeld
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.text.escaping import terminal


def start(run_id: str, site: Site) -> "subprocess.Popen[bytes]":
    """Start the process, which outlives this one and logs to ``logs/adopted-<run>.log`` in the home folder."""
    logs = site.home / "logs"
    private_files.make_folder(logs)
    with (logs / f"adopted-{run_id}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "rlhf_core.control.adopt", run_id],
            env={**os.environ, **site_variables(site)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def site_variables(site: Site) -> dict[str, str]:
    """The site settings of this process, which override those in the environment."""
    return {
        "RLHF_HOME": str(site.home),
        "RLHF_RUNS": str(site.runs_dir),
        "RLHF_DATABASE_URL": site.database_url,
        "RLHF_SCHEDULER": site.scheduler,
        "RLHF_COMPUTE_PYTHON": site.compute_python,
    }


class _LogWriter(Observer):
    """An observer that prints stages and messages with their times."""

    def stage_started(self, title: str) -> None:
        """Print the title of a stage that begins."""
        self.log(title)

    def log(self, text: str) -> None:
        """Print a message."""
        print(f"{utc_now():%Y-%m-%d %H:%M:%S} {terminal(text)}", flush=True)


def main(run_id: str) -> int:
    """Drive the run to its end. The exit codes are those of `rlhf run`."""
    from rlhf_core.control.steps import drive

    site = load_site()
    try:
        with (
            HistoryStore(site.database_url) as store,
            opened(
                RunDir.of(site.runs_dir, run_id), site, store, observer=_LogWriter(), if_held=IfHeld.FAIL
            ) as controller,
        ):
            drive(controller)
    except RlhfError as error:
        print(terminal(str(error)), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
