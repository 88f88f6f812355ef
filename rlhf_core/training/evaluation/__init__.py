"""Evaluation of a model on held-out data: sampled and greedy completions, ranked pairs, confidence intervals."""
