"""Rewards of completions: functions, reward models, the process that runs the functions, and the scorer that combines
them.

The built-in functions for configs are exported here: ``rlhf_core.training.rewards:exact_match`` and ``:gsm8k_answer``.
"""

from rlhf_core.training.rewards.functions import exact_match, gsm8k_answer

__all__ = ["exact_match", "gsm8k_answer"]
