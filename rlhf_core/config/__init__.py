"""Settings: the TOML file of a run and its overrides (``loading``), the file of a site (``site``), the meaning and type
of every setting (``fields``), and readable errors (``problems``)."""
