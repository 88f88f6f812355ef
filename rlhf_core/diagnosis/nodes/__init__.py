"""Fitness of nodes: checks of their facts, differences between them, their measured speed, strikes over all runs."""
