"""What looks after all runs of a site: reads their files, compares the three books, and mends."""
