"""Commands of ``rlhf``: one module per command, or per few that belong together. ``cli.main`` registers them."""
