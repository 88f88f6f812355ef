"""Conversion of a trainer's launch line to a config with ``trainer.kind = "command"``, with a report of the parts
read."""
