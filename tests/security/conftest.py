"""Histories on both databases, for the tests of this folder."""

from history_tools import database_url, store

__all__ = ["database_url", "store"]
