"""Supervision of workers: the agent's second thread, hang detection and verdicts, lost agents, deadlines."""
