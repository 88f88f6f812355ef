"""The user tour, followed step by step: its commands as printed on the page, and its instructions in a browser."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pages
import pytest
from process_tools import ASKING_INTERVAL_S, kill_all, until
from site_files import ROOT
from sites import TIMEOUT_S, Site
from slurm_cluster import needs_slurm

pytestmark = [pytest.mark.end_to_end, pytest.mark.training, pytest.mark.timeout(1500), needs_slurm]

PAGE = ROOT / "docs" / "tour.md"
ON_THE_PAGE = "/tmp/tour"


def blocks() -> list[str]:
    """The command blocks, in order."""
    return re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


@dataclass
class Terminal:
    """A shell in which the command blocks run in sequence; a variable exported by one is set for the next."""

    folder: Path
    """Stands for the folder of the page."""
    kept: Path
    """Environment as the last block left it."""
    environment: dict[str, str]
    said: list[str] = field(default_factory=list)

    def run(self, block: str) -> None:
        script = block.replace(ON_THE_PAGE, str(self.folder)) + f'env -0 > "{self.kept}"\n'
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", script],
            env=self.environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        self.said.append(f"{block}\n{done.stdout}\n{done.stderr}")
        assert done.returncode == 0, "\n".join(self.said)
        pairs = (line.split("=", 1) for line in self.kept.read_text().split("\0") if line)
        self.environment = dict(pairs)


@dataclass
class Reader:
    """A user who follows the page: the steps in the browser, before the commands of a section."""

    site: Site
    page: Any

    def asks_for_a_run_and_waits_until_it_trains(self) -> None:
        pages.sign_in(self.page, self.site.url, self.site.rlhf("password").stdout.strip())
        pages.open_deployment(self.page, self.site.url, self.site.deployment("slurm-quickstart"))
        pages.choose_custom_run(self.page)
        table = re.findall(r"^\| (\w+) \| `(.*)` \|$", PAGE.read_text(), flags=re.MULTILINE)
        assert len(table) == 5, "the values for the form, as the page has them"
        pages.fill(self.page, dict(table))
        pages.submit(self.page)
        pages.leave(self.page)
        until(lambda: self.site.step(self.run("mine")) > 40, timeout_s=TIMEOUT_S, interval_s=ASKING_INTERVAL_S)

    def sees_the_incident_repaired(self) -> None:
        until(
            lambda: self.site.rows("SELECT * FROM decisions WHERE run_id = ?", self.run("mine")),
            timeout_s=TIMEOUT_S,
            interval_s=ASKING_INTERVAL_S,
        )

    def approves(self) -> None:
        ((flow_run,),) = self.site.rows("SELECT flow_run_id FROM controllers WHERE run_id = ?", self.run("mine"))
        self.site.flow_becomes(flow_run, "Paused")
        pages.open_flow_run(self.page, self.site.url, flow_run)
        form = pages.open_answer(self.page)
        pages.approve(form, "Ada", "")
        pages.send_answer(form)
        pages.leave(self.page)
        self.site.flow_becomes(flow_run, "Completed")

    def schedules_a_run_and_takes_the_schedule_away(self) -> None:
        pages.open_deployment(self.page, self.site.url, self.site.deployment("nightly"))
        pages.make_cron_schedule(self.page, "* * * * *")
        pages.leave(self.page)
        until(
            lambda: self.site.rows("SELECT * FROM runs WHERE name = 'nightly'"),
            timeout_s=TIMEOUT_S,
            interval_s=ASKING_INTERVAL_S,
        )
        pages.open_deployment(self.page, self.site.url, self.site.deployment("nightly"))
        pages.delete_schedule(self.page, "Every minute")
        pages.leave(self.page)

    def run(self, name: str) -> str:
        """The newest run with a name, once it exists."""
        question = "SELECT run_id FROM runs WHERE name = ? ORDER BY created_at DESC LIMIT 1"
        ((run_id,),) = until(lambda: self.site.rows(question, name), timeout_s=TIMEOUT_S, interval_s=ASKING_INTERVAL_S)
        return str(run_id)


BEFORE: dict[str, Callable[[Reader], None]] = {
    "squeue": Reader.asks_for_a_run_and_waits_until_it_trains,
    "rlhf watch mine": Reader.sees_the_incident_repaired,
    "/promoted/": Reader.approves,
    "rlhf watch nightly": Reader.schedules_a_run_and_takes_the_schedule_away,
}
"""Work in the browser before a block of commands, by a text that only this block has."""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stands in for the folder of the tour; no process is left running in it."""
    folder = tmp_path_factory.mktemp("tour")
    yield folder
    kill_all(folder / "site")
    program = [sys.executable, str(ROOT / "infra" / "slurm" / "cluster.py"), "down", str(folder / "slurm")]
    if (folder / "slurm").exists():
        subprocess.run(program, check=True, capture_output=True)


def test_every_browser_step_has_its_place_on_the_page() -> None:
    assert len(blocks()) >= 8
    assert [sum(words in block for block in blocks()) for words in BEFORE] == [1] * len(BEFORE)


@pytest.mark.site
def test_the_page_is_followed(folder: Path, fresh_page: Any, tmp_path: Path) -> None:
    site = Site(folder / "site", max_runs=12, makes_database=True)
    site.write_settings()  # only for the port: other tests may run on this machine
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RLHF_", "PREFECT_", "SLURM_"))}
    terminal = Terminal(
        folder,
        tmp_path / "environment",
        {
            **plain,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "160",
        },
    )
    reader = Reader(site, fresh_page)
    done: dict[str, Any] = {}
    for block in blocks():
        for words, action in BEFORE.items():
            if words in block:
                action(reader)
        if "cluster.py down" in block:
            done = seen_at_the_end(site, folder)
        terminal.run(block)
    assert done == {
        "mine": [("completed", 7, 230)],
        "incidents": [("restart_in_place",)],
        "promotions": [("promoted", "Ada (through Prefect, unverified)")],
        "report": True,
        "export": True,
    }
    assert not folder.exists(), "nothing is left behind"
    assert site.commands() == []


def seen_at_the_end(site: Site, folder: Path) -> dict[str, Any]:
    """The result of the tour, checked without our own code."""
    return {
        "mine": site.rows("SELECT state, seed, total_steps FROM runs WHERE name = 'mine'"),
        "incidents": site.rows("SELECT action FROM decisions WHERE run_id = ?", Reader(site, None).run("mine")),
        "promotions": site.rows("SELECT state, decided_by FROM promotions"),
        "report": "<svg" in (folder / "mine.html").read_text(),
        "export": any((folder / "export").rglob("*.csv")),
    }
