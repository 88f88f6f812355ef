"""Checkpoints of a trainer: writing (``writer``, synchronously or in the background), reading (``resume``, ``state``)
and verification (``soundness``). ``memory`` keeps copies in the nodes' main memory."""
