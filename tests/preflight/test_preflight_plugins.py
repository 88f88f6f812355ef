"""Disabled checks, and a site's own checks: a real package on the path, and the findings of broken ones."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_preflight_checks import found, healthy, with_spec

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.plugins import load_plugins
from rlhf_core.preflight.registry import run_checks
from rlhf_core.schemas.checks import CheckResult, CheckStatus

CODE = '''
from rlhf_core.preflight.registry import passed, warning


def quota(facts):
    """A full quota ends the run at its first checkpoint."""
    yield passed("the quota is not used up")
    if facts.spec.name == "small":
        yield warning("a small run", "a large one", "ask for more")


def breaks(facts):
    """Never mind."""
    yield passed("so far, so good")
    raise ValueError("two\\nlines")


def leaves(facts):
    raise SystemExit(3)


def talks(facts):
    return ["hello"]


def says_nothing(facts):
    """Nothing to say is fine."""
'''

POINTS = """[rlhf_flows.checks]
site.quota = site_checks:quota
site.breaks = site_checks:breaks
site.leaves = site_checks:leaves
site.talks = site_checks:talks
site.says_nothing = site_checks:says_nothing
site.gone = site_checks:gone
site.no_module = no_such_module_here:check
batch.micro_batch = site_checks:quota
"""


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """A healthy run at a site with its own checks."""
    (tmp_path / "site_checks.py").write_text(CODE)
    package = tmp_path / "site_checks-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: site-checks\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "site_checks", raising=False)
    return healthy(plugins=load_plugins())


def only(facts: Facts, id: str) -> CheckResult:
    (result,) = found(facts, id)
    return result


def test_a_plugin_is_made_like_any_other_check(facts: Facts) -> None:
    assert [one.status for one in found(facts, "site.quota")] == [CheckStatus.PASSED, CheckStatus.WARNING]
    assert found(facts, "site.says_nothing") == []


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("site.leaves", "SystemExit: 3"),
        ("site.talks", "expected a Finding"),
        ("site.gone", "site_checks:gone does not import: AttributeError"),
        ("site.no_module", "ModuleNotFoundError"),
    ],
)
def test_a_broken_plugin_is_a_warning_and_no_more(facts: Facts, id: str, message: str) -> None:
    result = only(facts, id)
    assert (result.status, message in result.found) == (CheckStatus.WARNING, True), result
    assert "\n" not in result.found
    assert id in result.advice


def test_what_a_plugin_found_before_it_broke_is_kept(facts: Facts) -> None:
    good, bad = found(facts, "site.breaks")
    assert good.status is CheckStatus.PASSED
    assert "ValueError: two lines" in bad.found


def test_a_plugin_cannot_take_the_id_of_a_check(facts: Facts) -> None:
    own, other = found(facts, "batch.micro_batch")
    assert own.status is CheckStatus.PASSED
    assert (other.status, "already" in other.found) == (CheckStatus.WARNING, True)


def test_plugins_can_be_turned_off(facts: Facts) -> None:
    spec = with_spec(preflight={"off": {"site.breaks": "known", "site.gone": "its package is being rewritten"}}).spec
    quiet = replace(facts, spec=spec)
    assert only(quiet, "site.breaks").found == "turned off: known"
    assert only(quiet, "site.gone").status is CheckStatus.SKIPPED
    assert [one.status for one in found(quiet, "preflight.off")] == [CheckStatus.PASSED]


def test_a_check_that_is_turned_off_is_not_made() -> None:
    spec = with_spec(grpo={"prompts_per_step": 7}, preflight={"off": {"batch.prompts_divide_ranks": "a trial"}}).spec
    results = run_checks(healthy(spec=spec))
    assert [one.found for one in results if one.status is CheckStatus.SKIPPED] == ["turned off: a trial"]
    assert [one.id for one in results if one.status is CheckStatus.BLOCKED] == []


@pytest.mark.parametrize("id", ["node.clock", "probe.bandwidth"])
def test_checks_of_nodes_may_be_turned_off_too(id: str) -> None:
    results = found(with_spec(preflight={"off": {id: "measured by hand"}}), "preflight.off")
    assert [one.status for one in results] == [CheckStatus.PASSED]
