"""The training code: models, data, rewards, rollouts, algorithms, checkpoints and the loops that tie them together.

``types``, ``seeds``, ``tasks``, ``data`` and ``rewards`` do not import torch, so they can be used and tested without
it.
"""
