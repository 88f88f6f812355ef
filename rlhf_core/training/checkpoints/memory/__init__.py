"""Checkpoints in the main memory of the nodes: a copy on the own node, one on the next, and the restart from them."""
