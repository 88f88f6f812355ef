"""The nodes of an attempt: which they are, the facts about each, and the probe that compares and measures them."""
