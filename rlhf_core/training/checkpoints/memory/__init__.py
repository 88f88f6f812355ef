"""In-memory checkpoints: a copy on the rank's own node, one on the next node, and restarts from them."""
