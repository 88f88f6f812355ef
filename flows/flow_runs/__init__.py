"""Flow runs and task runs of this site: facts for the reconciler, links to runs, and hooks for flow runs ended from
outside."""
