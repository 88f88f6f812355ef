"""Messaging between the agents of an attempt: the store hosted by agent 0, signatures, reports and orders."""
