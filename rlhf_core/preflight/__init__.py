"""Checks of a run before it takes any resources. Facts are gathered once; the checks on them are pure."""
