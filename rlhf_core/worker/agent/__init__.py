"""The agent of a node: startup and shutdown, the phases it runs, and agent 0's decisions about groups and restarts."""
