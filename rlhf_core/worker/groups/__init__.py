"""Groups of workers: started together, or each by itself; both forked by the fork server of a node."""
