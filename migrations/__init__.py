"""Alembic migrations of the history. ``rlhf db upgrade`` runs them; they import only ``rlhf_core.history.tables``.

From a checkout, ``alembic`` works too: ``alembic -x url=sqlite:///history.db current`` (or with RLHF_DATABASE_URL set).
"""
