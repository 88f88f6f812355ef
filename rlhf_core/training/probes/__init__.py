"""Checks before training: of a node and its links, of the rows and tokens of the data, and of reward functions."""
