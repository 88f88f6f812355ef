"""The agent of a node: its beginning and end, the phases it runs, and, on agent 0, the decisions about groups and
restarts."""
