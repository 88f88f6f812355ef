"""Settings: the TOML file of a run and its overrides (``loading``), the file of a site (``site``), paths in its
variables (``site_paths``), the meaning and type of every setting (``fields``), and readable errors (``problems``)."""
