"""Alembic migrations of the history, which ``rlhf db upgrade`` runs.

From a checkout, ``alembic`` works too: ``alembic -x url=sqlite:///history.db current`` (or with RLHF_DATABASE_URL set).
"""
