"""Models: loading and building of causal language models and reward models, adapters, merging, gathering the weights of
a sharded model, and token log-probabilities."""
