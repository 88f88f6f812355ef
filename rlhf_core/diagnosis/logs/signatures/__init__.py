"""Phrases that name the cause of a failure: a table of regular expressions in three parts, by subject."""
