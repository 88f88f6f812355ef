"""Histories on both databases, for the tests of this folder."""

from history_tools import database_url, runs, store
from old_databases import empty_url, scripts_read_once

__all__ = ["database_url", "empty_url", "runs", "scripts_read_once", "store"]
