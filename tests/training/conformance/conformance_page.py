"""``docs/conformance.md``: our losses next to those of TRL, with the figures of the comparison."""

from collections.abc import Mapping
from typing import Any

from conformance_cases import CASES, CONTROLS, Case
from conformance_run import TRL, difference, ours, theirs

NEGLIGIBLE = 1e-12
"""Smaller differences are rounding errors, and vary between machines."""

PAGE = """\
<!-- Made by docs/generate.py (make docs). Change the code, not this page. -->
# Conformance with TRL

This page compares our losses, gradients and advantages with those of TRL {version}, on the same tokens, in float64. A
test repeats these comparisons and fails if a difference exceeds 1e-6 (`tests/training/conformance`).

The TRL side was recorded from TRL itself. Its trainer is constructed the way a user would, builds its own batch from
the rows (tokenizer, collator, advantages) and computes its own loss. We supply only the completions, and the
log-probabilities of a sampler that is not the policy. A few lines of TRL compute in float32 whatever the model uses
(the head that gives log-probabilities, and the odds ratio of ORPO); we changed them to float64, and nothing else. Our
side is the objective of `rlhf_core/training/algorithms` that the training loops call, in micro-batches of three rows.
Another test has the loop itself make the updates of the algorithms that sample, from completions to gradients.
The model is an OPT with 1,700 weights. Lengths are ragged, one group of rewards has no spread, and both sides of the
clip are reached.

The gradient column shows the largest difference over all weights. "Several updates" is the loss of a policy that has
moved since it sampled. "Several turns" has observations among the tokens of the completions, which TRL is told of by
`env_mask`, the tool mask of a `rollout_func`. PPO and REINFORCE++ are not in TRL {version};
`tests/training/test_core_policy_gradient.py` checks them against the formulas of their papers, and the expected
gradient of `distillation` against that of the KL divergence over the whole vocabulary, which TRL's `GKDTrainer`
minimises with `beta=1`: ours takes one sampled token for the vocabulary. KTO is compared in one TRL micro-batch,
because TRL estimates its divergence anew for each. A penalty weighted by the probability ratio, as is
TRL's default, is `kl_weighted` here.

| loss | TRL | settings here | value | gradient | advantages |
|---|---|---|---|---|---|
{rows}

{all} losses are compared.

## Controls

With one setting changed from TRL's, the same comparison must fail, and it does.

| loss | changed setting | value | gradient | advantages |
|---|---|---|---|---|
{controls}
"""


def page() -> str:
    """Text of the page; runs all comparisons."""
    by_name = {case.name: case for case in CASES}
    return PAGE.format(
        version=TRL["trl"],
        rows="\n".join(_row(case) for case in CASES),
        all=len(CASES),
        controls="\n".join(_control(by_name[name], changes) for name, changes in CONTROLS),
    )


def _row(case: Case) -> str:
    cells = [case.name, f"`{case.trainer}` {_options(case.options)}", f"`{case.algorithm}` {_options(case.settings)}"]
    return f"| {' | '.join([*cells, *_figures(case)])} |"


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
