"""The training code: models, data, rewards, rollouts, algorithms, checkpoints and the loops that tie them together.

``types``, ``tasks``, ``data.loading`` and ``rewards.functions`` do not import torch, so they can be used and tested
without it. The functions that a config may name are in ``rewards`` and ``tasks``.
"""
