"""Ways to sample completions: one protocol (``base``), one file per engine."""
