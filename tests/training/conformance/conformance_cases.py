"""Losses that are compared with TRL's: the class and options in TRL, and the corresponding settings of ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GROUP = 4
"""Completions per prompt."""
MAX_NEW_TOKENS = 9
"""Longest completion."""
TEMPERATURE = 0.9

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One loss in both projects."""

    name: str
    trainer: str
    """Trainer class of TRL."""
    options: Options
    """Options of its config that differ from their defaults."""
    algorithm: str
    """Name of our algorithm."""
    settings: Options = field(default_factory=dict)
    """Our settings that differ from their defaults."""
    margins: bool = False
    """The pairs state by how much the chosen completion is better."""
    sampler: bool = False
    """Completions come from an engine whose token probabilities differ from the trainer's."""
    observed: bool = False
    """Some tokens of the completions are observations between turns, which the policy did not sample."""

    @property
    def several_updates(self) -> bool:
        """True if the policy has moved since the completions were sampled."""
        return self.options.get("num_iterations", 1) > 1


_MOVED: Options = {"num_iterations": 2}
"""The loss of a later update of a batch, by a policy that has moved since it was sampled."""
_AGGREGATION = {"grpo": "sequence_mean", "bnpo": "token_mean", "dr_grpo": "fixed_length", "dapo": "token_mean"}
_THEIR_PENALTY: Options = {"beta": 0.1, "use_bias_correction_kl": False}
_PENALTY: Options = {"kl_coefficient": 0.1, "kl_estimator": "k3"}


def _sampled(trainer: str, name: str, options: Options, settings: Options, **more: Any) -> Case:
    common = {"samples_per_prompt": GROUP, "num_epochs": options.get("num_iterations", 1)}
    algorithm = {"GRPOTrainer": "grpo", "RLOOTrainer": "rloo"}[trainer]
    return Case(name, trainer, options, more.pop("algorithm", algorithm), {**common, **settings}, **more)


def _grpo(name: str, options: Options, settings: Options, **more: Any) -> Case:
    return _sampled("GRPOTrainer", f"grpo, {name}", options, settings, **more)


def _by_aggregation(name: str, options: Options, settings: Options) -> tuple[Case, ...]:
    return tuple(
        _grpo(f"{theirs}, {name}", {"loss_type": theirs, **options}, {"loss_aggregation": ours, **settings})
        for theirs, ours in _AGGREGATION.items()
    )


def _corrected(mode: str, options: Options, settings: Options) -> Case:
    theirs = {"loss_type": "dapo", "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5}
    ours = {"correction": mode, "correction_cap": 1.5}
    return _grpo(f"dapo, correction {mode}", {**theirs, **options}, {**ours, **settings}, sampler=True)


_SUPERVISED = (Case("sft", "SFTTrainer", {}, "sft"),)

_PREFERENCE = (
    Case("reward model", "RewardTrainer", {}, "reward_model"),
    Case("reward model, margins", "RewardTrainer", {}, "reward_model", margins=True),
    Case(
        "reward model, centred",
        "RewardTrainer",
        {"center_rewards_coefficient": 0.01},
        "reward_model",
        {"centring_coefficient": 0.01},
        margins=True,
    ),
    *(
        Case(f"dpo, {loss}", "DPOTrainer", {"loss_type": loss, **common}, "dpo", {"loss": loss, **common})
        for loss, common in (
            *((loss, {"beta": 0.2}) for loss in ("sigmoid", "ipo", "hinge")),
            ("robust", {"beta": 0.2, "label_smoothing": 0.1}),
        )
    ),
    *(
        Case(
            f"dpo, {loss}, weight 0.5 on likelihood",
            "DPOTrainer",
            {"loss_type": [loss, "sft"], "loss_weights": [1.0, 0.5], "beta": 0.2},
            "dpo",
            {"loss": loss, "beta": 0.2, "sft_coefficient": 0.5},
        )
        for loss in ("sigmoid", "ipo")
    ),
    Case(
        "kto",
        "KTOTrainer",
        {"beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.5},
        "kto",
        {"beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.5},
    ),
    Case("orpo", "ORPOTrainer", {"beta": 0.2}, "orpo", {"beta": 0.2}),
    *(
        Case(
            f"cpo, {loss}, {f'weight {alpha:g} on' if alpha else 'without'} likelihood",
            "CPOTrainer",
            {"loss_type": loss, "beta": 0.2, "cpo_alpha": alpha},
            "cpo",
            {"loss": loss, "beta": 0.2, "nll_coefficient": alpha},
        )
        for loss, alpha in (("sigmoid", 1.0), ("sigmoid", 0.0), ("hinge", 0.5), ("ipo", 1.0))
    ),
    Case(
        "cpo, sigmoid, label smoothing",
        "CPOTrainer",
        {"loss_type": "sigmoid", "beta": 0.2, "cpo_alpha": 0.3, "label_smoothing": 0.2},
        "cpo",
        {"loss": "sigmoid", "beta": 0.2, "nll_coefficient": 0.3, "label_smoothing": 0.2},
    ),
    *(
        Case(
            f"simpo{', label smoothing' if smoothing else ''}",
            "CPOTrainer",
            {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.8, "cpo_alpha": 0.0, **smoothing},
            "simpo",
            {"beta": 2.0, "gamma": 0.8, **smoothing},
        )
        for smoothing in ({}, {"label_smoothing": 0.1})
    ),
)

_THEIR_CROSS: Options = {
    **_MOVED,
    "epsilon": 0.1,
    "beta": 0.1,
    "use_bias_correction_kl": True,
    "entropy_coef": 0.05,
    "mask_truncated_completions": True,
    "scale_rewards": "batch",
}
_CROSS: Options = {
    **_PENALTY,
    "clip_low": 0.1,
    "kl_weighted": True,
    "entropy_coefficient": 0.05,
    "mask_truncated": True,
    "advantage_scale": "batch",
}


def _crossed(name: str, mode: str, options: Options, settings: Options, algorithm: str = "grpo") -> Case:
    """Nearly all options at once: the order in which they act matters."""
    theirs = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5, **_THEIR_CROSS}
    ours = {"correction": mode, "correction_cap": 1.5, **_CROSS}
    return _sampled(
        "GRPOTrainer",
        f"{name}, options crossed, correction {mode}",
        {**theirs, **options},
        {**ours, **settings},
        algorithm=algorithm,
        sampler=True,
    )


_CROSSED = (
    *(
        _crossed(
            f"grpo, {theirs}",
            mode,
            {"loss_type": theirs, "epsilon_high": 0.28, "delta": 1.4},
            {"loss_aggregation": ours, "clip_high": 0.28, "dual_clip": 1.4},
        )
        for (theirs, ours), mode in zip(
            _AGGREGATION.items(),
            ("token_truncate", "sequence_mask", "token_mask", "sequence_truncate"),
            strict=True,
        )
    ),
    _crossed(
        "gspo",
        "sequence_truncate",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.08},
        {"clip_high": 0.08},
        "gspo",
    ),
    _crossed("cispo", "token_mask", {"loss_type": "cispo", "epsilon_high": 1.28}, {"clip_high": 0.28}, "cispo"),
)

_POLICY_GRADIENT = (
    *_by_aggregation("several updates", _MOVED, {}),
    *_by_aggregation("on-policy", {}, {}),
    *_by_aggregation("several updates and k3", {**_MOVED, **_THEIR_PENALTY}, _PENALTY),
    *_by_aggregation("on-policy and k3", _THEIR_PENALTY, _PENALTY),
    *(
        _grpo(
            f"dapo, {name}, k3 weighted by the ratio",
            {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True, **moved},
            {**_PENALTY, "kl_weighted": True},
        )
        for name, moved in (("on-policy", {}), ("several updates", _MOVED))
    ),
    _grpo(
        "dapo, clip-higher",
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28, **_MOVED},
        {"clip_low": 0.1, "clip_high": 0.28},
    ),
    *(
        _grpo(
            f"{theirs}, entropy bonus",
            {"loss_type": theirs, "entropy_coef": 0.05, **moved},
            {"loss_aggregation": _AGGREGATION[theirs], "entropy_coefficient": 0.05},
        )
        for theirs, moved in (("grpo", _MOVED), ("dapo", {}))
    ),
    _grpo("dapo, dual clip", {"loss_type": "dapo", "delta": 1.25, **_MOVED}, {"dual_clip": 1.25}),
    *(
        _grpo(f"dapo, scale {scale}", {"loss_type": "dapo", "scale_rewards": scale}, {"advantage_scale": scale})
        for scale in ("batch", "none")
    ),
    *(
        _grpo(
            f"{theirs}, truncated completions masked",
            {"loss_type": theirs, "mask_truncated_completions": True, **_MOVED},
            {"loss_aggregation": ours, "mask_truncated": True},
        )
        for theirs, ours in _AGGREGATION.items()
    ),
    _corrected("token_truncate", _MOVED, {}),
    _corrected("token_mask", {}, {}),
    _corrected("sequence_truncate", _MOVED, {}),
    _corrected("sequence_mask", {**_MOVED, **_THEIR_PENALTY}, _PENALTY),
    _sampled(
        "GRPOTrainer",
        "gspo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08, **_MOVED},
        {"clip_low": 0.05, "clip_high": 0.08},
        algorithm="gspo",
    ),
    _sampled(
        "GRPOTrainer",
        "cispo",
        {"loss_type": "cispo", "epsilon_high": 1.28, **_MOVED},
        {"clip_high": 0.28},
        algorithm="cispo",
    ),
    _sampled(
        "GRPOTrainer",
        "dr_grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none", **_MOVED},
        {},
        algorithm="dr_grpo",
    ),
    _sampled(
        "GRPOTrainer",
        "dapo",
        {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True, **_MOVED},
        {},
        algorithm="dapo",
    ),
    *_CROSSED,
    _sampled("RLOOTrainer", "rloo", {"beta": 0.0}, {}),
    _sampled("RLOOTrainer", "rloo, several updates", {"beta": 0.0, **_MOVED}, {}),
    _sampled("RLOOTrainer", "rloo, k1 penalty", {"beta": 0.1, **_MOVED}, {"kl_coefficient": 0.1, "kl_estimator": "k1"}),
    _sampled(
        "RLOOTrainer",
        "rloo, normalised advantages and k1 penalty",
        {"beta": 0.1, "normalize_advantages": True, **_MOVED},
        {"kl_coefficient": 0.1, "kl_estimator": "k1", "normalise_advantages": True},
    ),
)

_SEVERAL_TURNS = (
    *(
        _grpo(
            f"{theirs}, several turns and updates, k3",
            {"loss_type": theirs, **_MOVED, **_THEIR_PENALTY},
            {"loss_aggregation": ours, **_PENALTY},
            observed=True,
        )
        for theirs, ours in _AGGREGATION.items()
    ),
    _grpo(
        "dapo, several turns, correction sequence_truncate",
        {
            "loss_type": "dapo",
            "vllm_importance_sampling_mode": "sequence_truncate",
            "vllm_importance_sampling_clip_max": 1.5,
            **_MOVED,
        },
        {"correction": "sequence_truncate", "correction_cap": 1.5},
        sampler=True,
        observed=True,
    ),
    _sampled(
        "GRPOTrainer",
        "gspo, several turns",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08, **_MOVED},
        {"clip_low": 0.05, "clip_high": 0.08},
        algorithm="gspo",
        observed=True,
    ),
    _sampled(
        "GRPOTrainer",
        "cispo, several turns",
        {"loss_type": "cispo", "epsilon_high": 1.28, **_MOVED},
        {"clip_high": 0.28},
        algorithm="cispo",
        observed=True,
    ),
)

CASES = (*_SUPERVISED, *_PREFERENCE, *_POLICY_GRADIENT, *_SEVERAL_TURNS)
"""All comparisons, in the order of the page."""

Control = tuple[str, Options]
CONTROLS: tuple[Control, ...] = (
    ("dpo, sigmoid", {"loss": "hinge"}),
    ("dpo, ipo", {"beta": 0.1}),
    ("dpo, sigmoid, weight 0.5 on likelihood", {"sft_coefficient": 0.0}),
    ("reward model, centred", {"centring_coefficient": 0.0}),
    ("kto", {"undesirable_weight": 1.0}),
    ("orpo", {"beta": 0.1}),
    ("cpo, sigmoid, weight 1 on likelihood", {"nll_coefficient": 0.0}),
    ("simpo", {"gamma": 0.0}),
    ("grpo, grpo, on-policy", {"loss_aggregation": "token_mean"}),
    ("grpo, dapo, on-policy", {"loss_aggregation": "fixed_length"}),
    ("grpo, dr_grpo, on-policy", {"loss_aggregation": "sequence_mean"}),
    ("grpo, dapo, on-policy", {"advantage_scale": "none"}),
    ("grpo, dapo, scale batch", {"advantage_scale": "group"}),
    ("grpo, dapo, several updates and k3", {"kl_estimator": "k1"}),
    ("grpo, dapo, several updates and k3", {"kl_estimator": "k2"}),
    ("grpo, dapo, on-policy and k3", {"kl_weighted": True}),
    ("grpo, dapo, clip-higher", {"clip_high": 0.1}),
    ("grpo, dapo, entropy bonus", {"entropy_coefficient": 0.0}),
    ("grpo, dapo, dual clip", {"dual_clip": 0.0}),
    ("grpo, dapo, correction token_truncate", {"correction": "token_mask"}),
    ("grpo, dapo, correction sequence_truncate", {"correction": "token_truncate"}),
    ("grpo, dapo, truncated completions masked", {"mask_truncated": False}),
    *(
        ("grpo, dapo, options crossed, correction sequence_truncate", change)
        for change in (
            {"correction": "sequence_mask"},
            {"dual_clip": 0.0},
            {"kl_weighted": False},
            {"entropy_coefficient": 0.0},
            {"mask_truncated": False},
            {"advantage_scale": "group"},
        )
    ),
    ("simpo, label smoothing", {"label_smoothing": 0.0}),
    ("rloo, k1 penalty", {"kl_estimator": "k3"}),
    ("rloo, normalised advantages and k1 penalty", {"normalise_advantages": False}),
)
"""Cases with a setting of ours that differs from TRL's: each must disagree."""
