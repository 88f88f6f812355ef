"""The table of versions that go wrong together: every row can match, says where it is from, and blocks whom it must."""

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from test_preflight_checks import found, with_packages

from rlhf_core.preflight.known_bad import KNOWN_BAD, KnownBad
from rlhf_core.schemas.checks import CheckStatus

IDS = [" ".join(f"{name}{versions}" for name, versions in row.packages.items()) for row in KNOWN_BAD]
PROBES = ("0.1", "0.8.5", "0.10.0", "0.14.0", "0.15.2", "0.16.0", "0.17.1", "0.18.0", "0.20.2", "0.27.0", "0.27.1")
PROBES = (*PROBES, "1.0.6", "2.7.0", "2.25.1", "2.29.2", "4.9.3", "5.0")


def an_example(row: KnownBad) -> dict[str, str]:
    """Installed versions that the row is about."""
    return {
        name: next(version for version in PROBES if SpecifierSet(versions).contains(version))
        for name, versions in row.packages.items()
    }


@pytest.mark.parametrize("row", KNOWN_BAD, ids=IDS)
def test_a_row_matches_what_it_is_about_and_says_where_it_is_from(row: KnownBad) -> None:
    installed = an_example(row)
    assert row.matches(installed)
    assert not row.matches({name: installed[name] for name in list(installed)[1:]}), "all packages must be there"
    assert row.source.startswith("https://github.com/")


@pytest.mark.parametrize("row", KNOWN_BAD, ids=IDS)
def test_what_a_row_advises_is_not_bad_itself(row: KnownBad) -> None:
    advised = Requirement(row.instead)
    bad = row.packages.get(advised.name)
    if bad is not None:
        probes = [
            *PROBES,
            "0.18.3",
            "0.19.1",
            "0.29",
            "2.6.0",
            "2.7.1",
            "2.9.1",
            "2.10.0",
            "2.11.0",
            "2.13.0",
            "2.29.3",
        ]
        good = [version for version in probes if advised.specifier.contains(version)]
        assert good
        assert not any(SpecifierSet(bad).contains(version) for version in good)


def test_preference_training_hangs_on_several_ranks_only() -> None:
    spec = with_packages({}).spec
    orpo = spec.model_copy(update={"train": spec.train.model_copy(update={"algorithm": "orpo"})})
    alone = orpo.model_copy(update={"resources": spec.resources.model_copy(update={"ranks_per_node": 1})})
    (row,) = [row for row in KNOWN_BAD if row.matches({"trl": "0.16.1"})]
    assert (row.concerns(orpo), row.concerns(alone), row.concerns(spec)) == (True, False, False)
    assert not row.matches({"trl": "0.17.0"})


def test_an_engine_that_is_not_used_only_warns() -> None:
    facts = with_packages({"vllm": "0.10.0", "torch": "2.9.1"})
    (one, two) = found(facts, "environment.versions")
    assert {one.status, two.status} == {CheckStatus.WARNING}
    assert "vllm 0.10.0 with torch 2.9.1" in two.found


def test_local_labels_do_not_count() -> None:
    (row,) = [row for row in KNOWN_BAD if row.packages.get("vllm") == "==0.10.0"]
    assert not row.matches({"vllm": "0.10.0", "torch": "2.7.1+cu128"})
    assert not row.matches({"vllm": "unknown", "torch": "2.9"})
