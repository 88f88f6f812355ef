"""Reasons not to start, found before anything is taken. Facts are gathered once; the checks on them are pure."""
