"""The agent of a node: startup and shutdown, the phases it runs and, on agent 0, decisions about groups and restarts.
"""
