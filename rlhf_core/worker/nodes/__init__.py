"""The nodes of an attempt: their membership, the facts about each, and the probe that compares and measures them."""
