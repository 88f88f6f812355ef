"""Transfer of weights from a trainer to its rollout engines: one protocol (``base``), and one or two files per
transport.

The package knows neither trainers nor engines: a sender takes names and tensors, a receiver yields them.
"""
