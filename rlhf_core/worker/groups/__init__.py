"""Groups of workers: one elastic start for all, or processes of their own."""
