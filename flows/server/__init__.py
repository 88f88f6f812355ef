"""The Prefect server of a site, apart from what runs on it: its addresses, password and settings, the web application
that it is served as, the checks at its door, and the temporary server of a single run."""
