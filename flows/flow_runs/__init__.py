"""Flow runs and task runs as this site knows them: the facts that the reconciler judges, the link between a flow run
and its run, and what follows when a flow run is ended from outside."""
