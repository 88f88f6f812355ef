"""Supervision of workers: the agent's second thread, suspicion and verdict on a hang, lost agents, deadlines."""
