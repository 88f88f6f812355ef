"""Views of a run, read from its directory: timeline, progress, summary, and its curves as a picture."""
