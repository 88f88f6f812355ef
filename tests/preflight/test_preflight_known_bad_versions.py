"""Table of incompatible versions: every row can match, names its source, and blocks the affected runs."""

import functools
from dataclasses import replace
from typing import get_args

import pytest
from control_fakes import make_spec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from test_preflight_checks import found, with_packages

from rlhf_core.preflight.known_bad_versions import KNOWN_BAD, KnownBad, Use
from rlhf_core.schemas.algorithms import specs
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.run import RolloutSpec, RunSpec

OWN = tuple(row for row in KNOWN_BAD if not row.only_commands)
IDS = [" ".join(f"{name}{versions}" for name, versions in row.packages.items()) for row in KNOWN_BAD]
PROBES = ("0.1", "0.8.5", "0.10.0", "0.14.0", "0.15.2", "0.16.0", "0.17.1", "0.18.0", "0.20.2", "0.27.0", "0.27.1")
PROBES = (*PROBES, "1.0.6", "0.15.0", "2.7.0", "2.25.1", "2.29.2", "4.9.3", "5.0")


def an_example(row: KnownBad) -> dict[str, str]:
    """Installed versions that match the row."""
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
            "1.16.0",
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


@functools.cache
def valid_specs() -> list[RunSpec]:
    """Every valid kind of run that the table distinguishes. Algorithms and engines are taken from the schema."""
    found = []
    for algorithm, traits in specs().items():
        for engine in get_args(RolloutSpec.model_fields["engine"].annotation):
            for resources in (
                {"ranks_per_node": 1, "gpus_per_node": 0},
                {"ranks_per_node": 2, "gpus_per_node": 0},
                {"ranks_per_node": 8, "gpus_per_node": 8},
            ):
                base = make_spec(sft={"num_steps": 0}, resources=resources).model_dump()
                base["loops"]["main"]["algorithm"], base["rollout"]["engine"] = {"name": algorithm}, engine
                base["loops"]["main"]["reference"] = "/teacher" if traits.distils else ""
                found.append(RunSpec.model_validate(base))
    return found


def commands() -> list[tuple[RunSpec, Use]]:
    """Runs with external trainers, with all conditions of rows."""
    found = []
    for row in KNOWN_BAD:
        for algorithm in sorted(row.algorithms) or ["grpo"]:
            spec = RunSpec.model_validate(
                {
                    "name": "theirs",
                    "trainer": {"kind": "command", "argv": ["torchrun"], "num_steps": 9, "algorithm": algorithm},
                    "resources": {"ranks_per_node": 2, "gpus_per_node": 2},
                }
            )
            found.append((spec, Use(engine=row.engine, launcher=row.launcher)))
    return found


@pytest.mark.parametrize("row", KNOWN_BAD, ids=IDS)
def test_a_row_concerns_a_run_that_can_be_asked_for(row: KnownBad) -> None:
    met = [spec for spec in valid_specs() if row.applies_to(spec) and row.concerns(spec)]
    assert bool(met) != row.only_commands, "a row that rlhf-flows itself can meet is not limited to other programs"
    assert any(row.applies_to(spec) and row.concerns(spec, use) for spec, use in commands())


@pytest.mark.parametrize("row", OWN, ids=lambda row: IDS[KNOWN_BAD.index(row)])
def test_a_row_in_force_is_reported_for_the_runs_that_meet_it(row: KnownBad) -> None:
    """The row goes through validation, gathered facts and the check itself; a run that does not meet it has no
    finding."""
    facts = with_packages(an_example(row))
    for spec in valid_specs():
        results = found(replace(facts, spec=spec), "environment.versions")
        findings = [one for one in results if row.happens in one.found]
        fatal = row.concerns(spec) and row.certain
        assert [one.status for one in findings] == [CheckStatus.BLOCKED if fatal else CheckStatus.WARNING]
        assert ("is not affected" in findings[0].found) == (not row.concerns(spec))


def test_a_row_for_other_programs_does_not_apply_to_our_own_trainer() -> None:
    """Runs with external trainers, which are affected, are in test_preflight_command.py."""
    others = [row for row in KNOWN_BAD if row.only_commands]
    assert others
    for row in others:
        results = found(with_packages(an_example(row)), "environment.versions")
        assert not any(row.happens in one.found for one in results)


def test_local_labels_do_not_count() -> None:
    (row,) = [row for row in KNOWN_BAD if row.packages.get("vllm") == "==0.10.0"]
    assert not row.matches({"vllm": "0.10.0", "torch": "2.7.1+cu128"})
    assert not row.matches({"vllm": "unknown", "torch": "2.9"})
