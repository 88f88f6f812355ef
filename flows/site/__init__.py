"""The services of a site on one machine: server, worker, keeper; and what the server has to know."""
