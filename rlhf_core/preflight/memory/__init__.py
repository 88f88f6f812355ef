"""Memory of each role, estimated only from the configs of run and model. Pure functions; no model library.

Permanent memory (weights, gradients, optimizer, reference) is exact arithmetic. Temporary memory (activations, logits,
cache) is counted tensor by tensor for decoders with gated feed-forward layers, at the longest prompts and completions
that the config allows: accurate to about ten per cent, and rather too high than too low.

``gpus`` has the memory of each type of GPU, ``shapes`` the dimensions of a model, ``formulas`` the bytes of each part,
``engines`` those of vLLM, ``roles`` the sums, ``remedies`` the settings that fit.
"""
