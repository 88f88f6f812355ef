"""Export of runs for other programs: tables in files, and the formats of experiment trackers.

The trackers' libraries are imported lazily: none is a dependency of the control plane.
"""
