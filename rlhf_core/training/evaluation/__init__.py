"""Measuring of a model on held-out data: sampled and greedy completions, ranked pairs, and the intervals of their
means."""
