"""The training tower: models, data, rewards, rollouts, algorithms, checkpoints and the loops that join them.

``types``, ``tasks``, ``data.loading`` and ``rewards.functions`` import no torch: they can be used and tested without
it. The functions that a config may name are in ``rewards`` and ``tasks``.
"""
