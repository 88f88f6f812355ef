"""Nodes of an attempt, and their roles. Pure: what the scheduler has is passed in."""
