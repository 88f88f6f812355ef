"""One attempt of a run, as its controller handles it: its plan, its job, and its end with the decision on a retry."""
