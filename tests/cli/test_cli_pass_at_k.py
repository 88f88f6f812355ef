"""pass@k stands with the other evaluations of a run, in the order of k."""

import json

import pytest
from history_tools import ingested, whole_run

from rlhf_core.cli.main import execute
from rlhf_core.config.site import load_site
from rlhf_core.control.views.summary import summarise

NAMES = ["greedy", "sampled", "pass@1", "pass@2", "pass@16"]


def test_pass_at_k_is_in_the_history_and_in_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    run = whole_run(load_site().runs_dir)
    for position, name in enumerate(NAMES[2:]):
        run.evaluation("before", name, 0.3 + position / 10, 4)
        run.evaluation("after", name, 0.4 + position / 10, 52)
    ingested(run)
    assert [row.name for row in summarise(run.dir).accuracy] == NAMES
    assert execute(["show", run.run_id, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["evaluations"]
    assert [row["name"] for row in shown if row["when"] == "after"] == NAMES
