"""Reading and writing of files: within bounds where others write them (``reading``), as a whole (``whole``), line by
line (``appended``), for one user alone (``private``), the rows of data files, and fingerprints."""
