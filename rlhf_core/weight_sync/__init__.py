"""Weights from a trainer to its rollout engines: one protocol (``base``), one file per way.

The package knows neither trainers nor engines: a sender takes names and tensors, a receiver gives them.
"""
