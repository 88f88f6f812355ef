"""The site's Prefect server itself: addresses, password and settings, the web application, request checks, and the
temporary server of a single run."""
