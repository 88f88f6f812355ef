"""Fitness of nodes: checks of their facts, differences between them, measured speed, and strikes over all runs."""
