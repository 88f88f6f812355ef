"""Which nodes an attempt gets, and for which roles. Pure: what the scheduler has is passed in."""
