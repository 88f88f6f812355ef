"""From a spec to one running attempt: the run directory, the journal, the lease, and submitting once."""
