"""Flow runs and task runs of this site: facts for the reconciler, the flow run of this process, and hooks for flow runs
ended from outside."""
