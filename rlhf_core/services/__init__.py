"""The services of a site on one machine: starting, monitoring and stopping them. Independent of Prefect."""
