"""Rewards of completions: functions and reward models, the process that functions run in, and the scorer that joins
them.

The functions that a config may name are here: ``rlhf_core.training.rewards:exact_match`` and ``:gsm8k_answer``.
"""

from rlhf_core.training.rewards.functions import exact_match, gsm8k_answer

__all__ = ["exact_match", "gsm8k_answer"]
