"""Translation of external trainers' metric names into those of docs/metrics.md.

Taken from the sources of transformers 5.19, TRL 1.16.0, ms-swift 4.6.0, OpenRLHF 0.11.2 and the log of LLaMA-Factory.
A name means the same in all of them, except for the names in OpenRLHF's own table, so one table serves programs built
on any of them. A comment marks each row where a trainer's metric differs from this project's metric of that name.
"""

import hashlib
from collections.abc import Mapping
from itertools import chain, islice

from rlhf_core.schemas.command_trainer import CommandTrainer

OWN_GROUP = "trainer"
"""Group of metrics that this project has no name for."""
MAX_NAME_CHARACTERS = 400
MAX_NAMES = 2_000
"""Maximum number of metrics in one line of ``metrics.jsonl``, as in ``MetricsLine``."""

MACHINE_GROUPS = ("time", "speed")
"""Groups of metrics that depend on the machine."""
LEFT_OUT = ""

COMMON: Mapping[str, str] = {
    # transformers.Trainer
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "train_runtime": "time/run_s",
    "train_samples_per_second": "speed/samples_per_s",
    "train_steps_per_second": "speed/steps_per_s",
    "train_tokens_per_second": "speed/tokens_per_s",
    "eval_runtime": "time/evaluate_s",
    "eval_samples_per_second": "speed/eval_samples_per_s",
    "eval_steps_per_second": "speed/eval_steps_per_s",
    # TRL: GRPO and related trainers; ms-swift uses the same names
    "reward": "reward/mean",
    "reward_std": "reward/std",  # TRL since 1.0: over all completions of the step, not within groups
    "frac_reward_zero_std": "rollout/zero_std_groups",
    "completions/mean_length": "rollout/length_mean",
    "completions/min_length": "rollout/length_min",
    "completions/max_length": "rollout/length_max",
    "completions/clipped_ratio": "rollout/truncated_share",
    "completion_length": "rollout/length_mean",  # TRL before 0.16
    "entropy": "rollout/entropy",
    "entropy/mean": "rollout/entropy",  # ms-swift
    "kl": "policy/kl",
    "policy_loss": "loss/policy",
    "clip_ratio": "policy/clip_share",
    "clip_ratio/region_mean": "policy/clip_share",
    "clip_ratio/low_mean": "policy/clip_low_share",
    "clip_ratio/high_mean": "policy/clip_high_share",
    "sampling/sampling_logp_difference/mean": "rollout/train_gap",
    "step_time": "time/step_s",
    # TRL, DPO, CPO and ORPO
    "rewards/chosen": "preference/chosen_reward",
    "rewards/rejected": "preference/rejected_reward",
    "rewards/margins": "preference/margin",
    "rewards/accuracies": "preference/accuracy",
    "logps/chosen": "preference/chosen_logp",
    "logps/rejected": "preference/rejected_logp",
    "logits/chosen": "preference/chosen_logit",
    "logits/rejected": "preference/rejected_logit",
    "log_odds_ratio": "preference/log_odds_ratio",
    "log_odds_chosen": "preference/log_odds_chosen",
    "nll_loss": "loss/nll",
    "aux_loss": "loss/aux",
    # ms-swift
    "train_speed(s/it)": "time/step_s",  # mean since the start
    # LLaMA-Factory
    "lr": "train/learning_rate",
    "accuracy": "preference/accuracy",
    "throughput": "speed/tokens_per_s",
    "percentage": LEFT_OUT,
}
"""Names without the ``train/`` prefix that trainers use in TensorBoard."""

OPENRLHF: Mapping[str, str] = {
    "policy_loss": "train/loss",
    "actor_grad_norm": "train/grad_norm",
    "actor_lr": "train/learning_rate",
    "rollout/reward_mean": "reward/mean",
    "rollout/reward_std": "reward/std",  # over all completions of the step, not within groups
    "rollout/response_length_mean": "rollout/length_mean",
    "response_length": "rollout/length_mean",
    "rollout/truncated_rate": "rollout/truncated_share",
    "entropy_loss": "rollout/entropy",  # the mean entropy itself; the loss takes it times minus a coefficient
    "ppo_clip_ratio": "policy/clip_share",
    "ppo_kl": "policy/step_kl",  # from the policy that sampled
    "timing/make_experience": "time/make_experience_s",
    "timing/generation": "time/rollout_s",
    "timing/ppo_train": "time/train_s",
    "timing/broadcast": "time/weight_sync_s",
    "timing/step_total": "time/step_s",
    "dynamic_filtering_pass_rate": "rollout/kept_share",
    "acc": "preference/accuracy",
    "chosen_reward": "preference/chosen_reward",
    "reject_reward": "preference/rejected_reward",
}
"""Names of OpenRLHF; names missing here are as in :data:`COMMON`."""

_TIMES = ("timing/", "time/", "profiling/")
_SPEEDS = ("speed/", "perf/")
_TRAIN = "train/"
_EVALUATION = ("eval/", "eval_")


class MetricNames:
    """Renames one trainer's metrics."""

    def __init__(self, trainer: CommandTrainer) -> None:
        self._given = trainer.metrics
        self._known = {**COMMON, **(OPENRLHF if trainer.framework == "openrlhf" else {})}
        self._rank = {name: place for place, name in enumerate(self._known)}

    def rename(self, values: Mapping[str, float]) -> dict[str, float]:
        """The metrics of one step under this project's names.

        If two metrics map to the same name, the user's mapping wins, then the first in the table; the other keeps its
        own name. Metrics that this project has no name for are kept under ``trainer/``.

        Returns:
            At most :data:`MAX_NAMES` metrics, those with this project's names first.
        """
        found: dict[str, float] = {}
        own: dict[str, float] = {}
        for raw in sorted(values, key=self._precedence):
            name = self._name(raw)
            if name == LEFT_OUT:
                continue
            legal = legal_name(name)
            if legal in found:
                group = name.partition("/")[0]
                legal = legal_name(f"{group if group in MACHINE_GROUPS else OWN_GROUP}/{_short(raw)}")
            (own if legal.startswith(f"{OWN_GROUP}/") else found).setdefault(legal, values[raw])
        return dict(islice(chain(found.items(), own.items()), MAX_NAMES))

    def _precedence(self, raw: str) -> tuple[bool, int]:
        return raw not in self._given and _short(raw) not in self._given, self._rank.get(_short(raw), len(self._rank))

    def _name(self, raw: str) -> str:
        short = _short(raw)
        for name in (raw, short):
            if name in self._given:
                return self._given[name]
        return self._known[short] if short in self._known else _by_form(short)


def _short(raw: str) -> str:
    """The name without TensorBoard's ``train/`` prefix; evaluation names in the form used in the log."""
    if raw.startswith(_TRAIN):
        return raw.removeprefix(_TRAIN)
    return f"eval_{raw.removeprefix('eval/')}" if raw.startswith("eval/") else raw


def _by_form(name: str) -> str:
    """Names derived from a pattern, such as those of reward functions and evaluations."""
    group, _, rest = name.partition("/")
    if group == "rewards" and rest:
        return f"reward/{rest.removesuffix('/mean')}"
    if "per_second" in name or name.startswith(_SPEEDS):
        return name if name.startswith("speed/") else f"speed/{name}"
    if name.startswith(_EVALUATION):
        return f"eval/{name.removeprefix('eval_')}"
    if name.startswith(_TIMES):
        return name if group == "time" else f"time/{rest}"
    return f"{OWN_GROUP}/{name}"


def legal_name(name: str) -> str:
    """A name that ``metrics.jsonl`` accepts: printable, and at most 400 characters long.

    Distinct names stay distinct: unprintable characters are escaped, and a name that is too long ends in a hash of the
    whole name.
    """
    printable = name if name.isprintable() else "".join(one if one.isprintable() else _escaped(one) for one in name)
    if len(printable) <= MAX_NAME_CHARACTERS:
        return printable or OWN_GROUP
    mark = "~" + hashlib.blake2b(printable.encode(), digest_size=8).hexdigest()
    return printable[: MAX_NAME_CHARACTERS - len(mark)] + mark


def _escaped(character: str) -> str:
    return f"\\u{{{ord(character):x}}}"
