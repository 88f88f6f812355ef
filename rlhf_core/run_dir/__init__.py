"""Run directories: the paths in them (``run``, ``attempt``, ``checkpoint``) and the reader of the journal. Every path
that two programs share is defined here."""
