"""Phrases that tell the cause of a failure: a table of regular expressions, in three parts by what they are about."""
