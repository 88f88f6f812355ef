"""Weights from a trainer to its rollout engines: one protocol (``base``), one way in a file or two.

The package knows neither trainers nor engines: a sender takes names and tensors, a receiver gives them.
"""
