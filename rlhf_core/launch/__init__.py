"""From a config to one running attempt: its paths, the run directory, the journal, the lease, and submitting once."""
