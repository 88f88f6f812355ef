"""Slurm options of the site, and options of a run that override them."""

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


def test_a_mistake_in_the_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "rlhf.toml").write_text('[slurm]\npartion = "gpu"\n')
    with pytest.raises(BadConfig, match=r'unknown key "slurm.partion"; did you mean "slurm.partition"'):
        load_site({"RLHF_HOME": str(tmp_path)})
