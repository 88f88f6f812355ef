"""Folder of a run: the paths in it (``run``, ``attempt``, ``checkpoint``) and the reader of its journal. Every path
that two programs share is here."""
