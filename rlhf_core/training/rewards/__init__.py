"""Rewards of completions: functions, reward models, the process that runs the functions, and the scorer that combines
them.

The built-in functions for configs are exported here: ``rlhf_core.training.rewards:exact_match``, ``:gsm8k_answer`` and
``:environment_reward``.
"""

from rlhf_core.training.rewards.functions import environment_reward, exact_match, gsm8k_answer

__all__ = ["environment_reward", "exact_match", "gsm8k_answer"]
