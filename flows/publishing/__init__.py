"""Publication of a run in Prefect: its artifacts and events, and the thread of the controller that publishes them."""
