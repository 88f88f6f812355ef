"""Groups of workers: one elastic start for all, or processes of their own; both forked by the fork server of a node."""
