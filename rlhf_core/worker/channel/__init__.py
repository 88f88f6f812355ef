"""Messages between the agents of an attempt: the store that agent 0 hosts, signatures, reports and orders."""
