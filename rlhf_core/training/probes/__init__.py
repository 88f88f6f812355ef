"""Checks before training: a node and its links, rows and tokens of the data, reward functions."""
