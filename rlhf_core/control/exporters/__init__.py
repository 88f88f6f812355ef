"""Export of all runs of a site to experiment trackers: one process for each, watched by the site daemon."""
