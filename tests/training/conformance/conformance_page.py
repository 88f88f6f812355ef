"""``docs/conformance.md``: the losses next to those of TRL, from the figures of the comparison."""

from collections.abc import Mapping
from typing import Any

from conformance_built import BUILT, NOT_BUILT
from conformance_cases import CASES, CONTROLS, Case
from conformance_run import TRL, difference, ours, theirs

NEGLIGIBLE = 1e-12
"""Differences below are rounding, and not the same on every machine."""

PAGE = """\
<!-- Made by docs/generate.py (make docs). Change the code, not this page. -->
# Conformance with TRL

Losses, gradients and advantages next to those of TRL {version}, on the same tokens, in float64. A test makes these
comparisons again and fails past 1e-6 (`tests/training/conformance`).

The left side was recorded from TRL itself: its trainer is constructed as a user does, makes its own batch of the rows
(tokenizer, collator, advantages) and computes its own loss; only completions, and the log-probabilities of a sampler
that is not the policy, are given. A few lines of TRL compute in float32 whatever the model has; they were made to say
float64 (the head that gives log-probabilities, and the odds ratio of ORPO), and nothing else was changed. The right
side is the objective of `rlhf_core/training/algorithms` that the loops call, in micro-batches of three rows. Model:
an OPT of 1,700 weights; lengths are ragged, one group of rewards has no spread, both sides of the clip are reached.

The gradient column is the largest difference over all weights. "Several updates" is the loss of a policy that has
moved since it sampled. PPO and REINFORCE++ are not in TRL {version}: `tests/training/test_core_policy_gradient.py`
holds them against the formulas of their papers. KTO is compared in one micro-batch of TRL's, which takes its divergence
anew for each. A penalty that TRL weighs with the probability ratio, its default, is `kl_weighted` here.

| loss | TRL | settings here | value | gradient | advantages |
|---|---|---|---|---|---|
{rows}

{agreeing} of {all} losses are compared; those that are not built yet count as nothing.

## Controls

The same comparison with one setting that is not TRL's has to fail, and does.

| loss | setting here instead | value | gradient | advantages |
|---|---|---|---|---|
{controls}
"""


def page() -> str:
    """Text of the page; runs every comparison."""
    by_name = {case.name: case for case in CASES}
    return PAGE.format(
        version=TRL["trl"],
        rows="\n".join(_row(case) for case in CASES),
        agreeing=len(BUILT),
        all=len(CASES),
        controls="\n".join(_control(by_name[name], changes) for name, changes in CONTROLS),
    )


def _row(case: Case) -> str:
    cells = [case.name, f"`{case.trainer}` {_options(case.options)}", f"`{case.algorithm}` {_options(case.settings)}"]
    figures = [NOT_BUILT[case.name], "-", "-"] if case.name in NOT_BUILT else _figures(case)
    return f"| {' | '.join([*cells, *figures])} |"


def _control(case: Case, changes: Mapping[str, Any]) -> str:
    return f"| {' | '.join([case.name, _options(changes), *_figures(case, **changes)])} |"


def _figures(case: Case, **changes: Any) -> list[str]:
    found = difference(ours(case, **changes), theirs(case))
    return [_figure(value) for value in (found.loss, found.gradient, found.advantages)]


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"< {NEGLIGIBLE:.0e}" if value < NEGLIGIBLE else f"{value:.0e}"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in options.items())
