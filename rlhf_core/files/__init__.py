"""Reading and writing of files: bounded reads of files that other processes write (``reading``), writes of whole files
(``whole``), appended lines (``appended``), files private to one user (``private``), rows of data files, and
fingerprints."""
