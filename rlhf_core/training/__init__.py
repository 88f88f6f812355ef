"""The training tower: models, data, rewards, rollouts, algorithms, checkpoints and the loops that join them.

``types``, ``seeds``, ``tasks``, ``data`` and ``rewards`` import no torch: they can be used and tested without it.
"""
