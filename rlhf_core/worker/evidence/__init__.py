"""Evidence of a failure: stacks, process states and log tails, and the reports of how the workers exited."""
