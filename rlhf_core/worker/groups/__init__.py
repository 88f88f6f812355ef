"""Groups of workers: one elastic start for all, or separate processes; both forked by the fork server of a node."""
