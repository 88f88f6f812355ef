"""The ``rlhf`` command. Modules here import nothing of weight before a command runs: ``--help`` answers at once."""
