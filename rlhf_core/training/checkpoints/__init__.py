"""Checkpoints of a trainer: written (``writer``, at once or in the background), read (``resume``, ``state``) and proven
sound. Copies in the main memory of the nodes are in ``memory``."""
