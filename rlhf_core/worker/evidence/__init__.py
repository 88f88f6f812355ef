"""Evidence of a failure: stacks, process states and ends of logs, and the reports of how the workers ended."""
