"""Groups of workers: one elastic start for the whole group, or independent processes."""
