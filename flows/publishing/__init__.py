"""Publication of a run in Prefect: its artifacts and events, and the controller's thread that publishes them."""
