"""The ``rlhf`` command. Modules here import heavy modules only when a command runs, so that ``--help`` stays fast."""
