"""The order of the steps of a run: ``stages`` in plain Python, ``run`` as a Prefect flow. Prefect lives here."""
