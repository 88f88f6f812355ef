"""Signs of life of a worker: its beats, the collective it is in, and what ``/proc`` shows of it from outside."""
