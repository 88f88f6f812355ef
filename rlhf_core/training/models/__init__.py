"""Models: causal language models and reward models loaded or built, adapters, merging, whole weights of a split model,
and the log-probabilities of tokens."""
