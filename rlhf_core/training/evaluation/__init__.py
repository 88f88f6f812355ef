"""Evaluation of a model on held-out data: sampled and greedy completions, pass@k, ranked pairs, confidence
intervals; and role evaluator, which does it after training."""
