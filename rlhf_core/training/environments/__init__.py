"""Rollouts of several turns: tools and environments in processes beside the rank, with any engine.

``functions`` calls what users write, in processes that ``server`` forks and ``pool`` talks to; ``observations`` turns
results into tokens; ``rollout_steps`` has the course of a rollout (``open_rollout``), ``conversations`` samples in
rounds, and ``turn_source`` hands turns to engines that take them at any time.
"""
