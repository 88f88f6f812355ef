"""GRPO done right (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783, sec. 3.2).

    A_i  = r_i - mean(r)
    L    = sum over completions i and tokens t of L_it / (completions of the update x longest length)

with the clipped surrogate ``L_it`` of GRPO. Neither divides by the standard deviation of a group, which favours prompts
that are nearly always or never solved, nor by the length of a completion, which favours long wrong ones.
"""

from rlhf_core.training.algorithms.grpo import GroupRelativePolicyOptimisation

OBJECTIVE = GroupRelativePolicyOptimisation()
"""GRPO's objective; only the settings differ."""
