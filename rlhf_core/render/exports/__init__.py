"""A run for other programs: tables in files, and the formats of experiment trackers.

Their libraries are imported when they are needed: none is part of the control plane.
"""
