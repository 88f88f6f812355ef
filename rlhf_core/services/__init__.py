"""The services of a site on one machine: started, watched, ended. No Prefect in it."""
