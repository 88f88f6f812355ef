"""Commands of ``rlhf``: one module per command or group of related commands, registered by ``cli.main``."""
