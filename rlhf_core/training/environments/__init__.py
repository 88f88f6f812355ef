"""Rollouts of several turns: tools and environments in processes beside the rank, and the loop over any engine.

``functions`` calls what users write, in processes that ``server`` forks and ``pool`` talks to; ``observations`` turns
results into tokens; ``conversations`` is the loop.
"""
