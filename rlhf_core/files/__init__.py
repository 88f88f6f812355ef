"""Reading and writing of files: bounded reads of files that other processes write (``reading``), writes of whole files
(``whole``), appended lines (``appended``), files private to one user (``private``), rows of data files,
fingerprints, and files that come with this program (``shipped``)."""
