"""Slurm options of the site, and options of a run that override them."""

import re
from pathlib import Path

import pytest

from rlhf_core.config.site import load_site
from rlhf_core.errors import BadConfig
from rlhf_core.schemas.cluster import SlurmSpec


def test_a_run_speaks_over_its_site_and_lists_are_added(tmp_path: Path) -> None:
    (tmp_path / "rlhf.toml").write_text(
        'scheduler = "slurm"\n[slurm]\npartition = "gpu"\naccount = "team"\nexclude = ["bad1"]\n'
        'environment = { A = "site", B = "site" }\n'
    )
    site = load_site({"RLHF_HOME": str(tmp_path)}).slurm
    run = SlurmSpec(partition="debug", exclude=("bad2",), environment={"A": "run"})
    both = run.over(site)
    assert (both.partition, both.account, both.exclude) == ("debug", "team", ("bad1", "bad2"))
    assert both.environment == {"A": "run", "B": "site"}
    assert SlurmSpec().over(site) == site
    assert run.over(SlurmSpec()) == run


@pytest.mark.parametrize(
    ("table", "key", "hint"),
    [
        ("slurm", "partion", 'did you mean "slurm.partition"?'),
        ("prefect", "prot", 'did you mean "prefect.port"?'),
        ("prefect", "lr", "the keys are host, port, url, "),  # in a run, another name of learning_rate
        ("notify", "webhook", 'did you mean "notify.webhook_url"?'),
        ("retention", "seed", "the keys are checkpoints_days, deployments_days"),
    ],
)
def test_a_mistake_in_a_table_is_named(tmp_path: Path, table: str, key: str, hint: str) -> None:
    """With the settings of that table, not with those of a run."""
    (tmp_path / "rlhf.toml").write_text(f"[{table}]\n{key} = 1\n")
    with pytest.raises(BadConfig, match=re.escape(f'unknown key "{table}.{key}"; {hint}')):
        load_site({"RLHF_HOME": str(tmp_path)})
