"""A whole site for the browser: Prefect server with its UI, worker and site daemon by ``rlhf up``, and a real Slurm."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from slurm_cluster import Cluster

sys.path.insert(0, str(Path(__file__).parents[1] / "services"))

from shop_floor import Floor, free_port, until

__all__ = ["PATIENCE_S", "BrowserSite", "Shoot", "browser", "browser_site", "until"]

PATIENCE_S = 240.0
"""How long is waited for what must happen: nothing is measured here, and the machine may be busy with others."""

Shoot = Callable[[str], None]
"""Takes a picture of the page, under a name."""

CONFIG = """\
name = "sorting"
seed = 5

[model]
tokenizer = "char"
[model.config]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 64

[data]
generator = "rlhf_core.training.tasks:sort_digits"
generator_args = { num_digits = 3, num_train = 400, num_eval = 32 }
max_prompt_tokens = 8

[sft]
num_steps = 20
batch_size = 32
learning_rate = 3e-3

[train]
algorithm = "grpo"
num_steps = 8
learning_rate = 1e-4
micro_batch_size = 16

[grpo]
prompts_per_step = 8
samples_per_prompt = 4
measure_kl = true

[rollout]
max_new_tokens = 4

[reward]
functions = ["grader:exact"]

[evaluate]
num_prompts = 32

[checkpoint]
every_num_steps = 5

[resources]
ranks_per_node = 2
time_limit_s = 1800

[supervise]
backoff_s = 0
floor_s = 25
rollout_floor_s = 25
reward_floor_s = 25
checkpoint_floor_s = 25
evaluate_floor_s = 25
"""

GRADER = '''\
"""Graders of the team: what its configs name as reward functions."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVICE_IS_UP = Path({service!r})
_calls = 0


def exact(*, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 for the right answer."""
    return [float(found.strip() == right) for found, right in zip(completions, answer, strict=True)]


def slow(**columns: Any) -> list[float]:
    """A grader that takes its time, so that there is some to watch."""
    time.sleep(0.1)
    return exact(**columns)


def by_service(**columns: Any) -> list[float]:
    """A grader whose service is away after some calls, until somebody starts it again."""
    global _calls
    _calls += 1
    if _calls > 8 and not SERVICE_IS_UP.exists():
        raise ValueError("the grading service answered 503: it is down for maintenance")
    return exact(**columns)
'''


def browser() -> str | None:
    """The browser of this machine."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


@dataclass
class BrowserSite(Floor):
    """A site on a throw-away cluster, and a folder of a person's own in it."""

    cluster: Cluster | None = None

    def environment(self, **more: str) -> dict[str, str]:
        slurm = dict(self.cluster.environment) if self.cluster is not None else {}
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return super().environment(**slurm, RLHF_SCHEDULER="slurm", COLUMNS="160", PATH=programs, **more)

    def start(self, *arguments: str, **more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "rlhf_core.cli.main", *arguments],
            cwd=self.folder,
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def ui(self) -> str:
        """Address of the pages."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        """Where this person keeps configs and graders."""
        return self.home / "team"

    @property
    def service_is_up(self) -> Path:
        """The grading service of ``grader:by_service`` is up where this file is."""
        return self.home / "service-is-up"

    def write_settings(self) -> None:
        super().write_settings()
        self.folder.mkdir()
        (self.folder / "grader.py").write_text(GRADER.format(service=str(self.service_is_up)))
        (self.folder / "sorting.toml").write_text(CONFIG)

    def up(self) -> None:
        """Start the services; a busy machine may take its time."""
        process = self.start("up")
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{output}\n{errors}\n{self.logs()}"

    def deploy(self, config: str, *options: str) -> str:
        """Have a config be a deployment. Returns its id."""
        found = self.rlhf("deploy", config, *options, "--json")
        return str(json.loads(found.stdout)["url"].rsplit("/", 1)[-1])

    def deployment(self, name: str) -> str:
        """Id of a deployment that is there."""
        status, found = self.ask(f"/deployments/name/rlhf-run/{name}")
        assert status == 200, found
        return str(found["id"])

    def rows(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        """Ask the database, past all of our own code."""
        with closing(sqlite3.connect(self.home / "history.db")) as connection:
            return connection.execute(question, values).fetchall()

    def flow_state(self, flow_run: str, *names: str) -> str:
        """Wait until Prefect has a flow run in one of these states. Returns the message of the state."""

        def now() -> dict[str, Any] | None:
            _, found = self.ask(f"/flow_runs/{flow_run}")
            return found["state"] if found["state"]["name"] in names else None

        return str(until(now, PATIENCE_S)["message"])

    def run_of(self, flow_run: str) -> str:
        """The run that a flow run drives, once it is in the database."""
        question = "SELECT DISTINCT run_id FROM controllers WHERE flow_run_id = ?"
        ((run_id,),) = until(lambda: self.rows(question, flow_run), PATIENCE_S)
        return str(run_id)

    def state(self, run_id: str) -> str:
        """State of a run in the database."""
        ((state,),) = self.rows("SELECT state FROM runs WHERE run_id = ?", run_id)
        return str(state)

    def becomes(self, run_id: str, *states: str) -> str:
        """Wait until the database has a run in one of these states; an end that is none of them fails."""

        def now() -> str | None:
            state = self.state(run_id)
            assert state in states or state not in ("completed", "failed", "cancelled"), self.why(run_id, state)
            return state if state in states else None

        return str(until(now, PATIENCE_S))

    def why(self, run_id: str, state: str) -> str:
        """Describe a run for a test that fails."""
        events = self.rows("SELECT kind, state, message FROM events WHERE run_id = ?", run_id)
        return f"{run_id} is {state}\n{events}\n{self.logs()}"

    def jobs(self, run_id: str) -> list[tuple[str, str]]:
        """Job id and comment of each living job of a run, as squeue has them."""
        assert self.cluster is not None
        lines = self.cluster.command("squeue", "--noheader", "--format=%i|%k").splitlines()
        pairs = [tuple(line.split("|", 1)) for line in lines if run_id in line]
        return [(job, comment) for job, comment in pairs]

    def step(self, run_id: str) -> int:
        """The last step of a run that the database has."""
        ((step,),) = self.rows("SELECT coalesce(max(step), 0) FROM metrics WHERE run_id = ?", run_id)
        return int(step)

    def ranks(self, run_id: str) -> list[psutil.Process]:
        """The trainer ranks of a run, by their rank."""
        found = {}
        for process in psutil.process_iter():
            try:
                words, around = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            if "trainer" in words and any(run_id in word for word in words) and "RANK" in around:
                found[int(around["RANK"])] = process
        return [found[rank] for rank in sorted(found)]


@contextmanager
def browser_site(home: Path, cluster_folder: Path) -> Iterator[BrowserSite]:
    """Start all of it; nothing is left at the end."""
    cluster = Cluster(cluster_folder, nodes=4, kill_wait_s=1)
    site = BrowserSite(home, free_port(), max_runs=12, cluster=cluster)
    site.write_settings()
    cluster.up()
    try:
        site.up()
        yield site
    finally:
        site.kill_all()
        cluster.down()
