"""From the launch line of a trainer to a config with ``trainer.kind = "command"``: what was read, and what was not."""
